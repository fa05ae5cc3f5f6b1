"""`poolwright simulate`: policies on a trace, one after the other, as a table, JSON, one HTML page and its pictures."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from poolwright.cli.plan import INTERRUPTED, Progress, kinds_of, need, refuse, served, write

if TYPE_CHECKING:
    from poolwright.sim.policy import Policy
    from poolwright.sim.report import Run

OURS = "ours"


def policies(machines: int) -> "Mapping[str, Callable[[], Policy]]":
    """Ours, the published ones, and every static split of so many machines by its short name, such as 2P2T."""
    from poolwright.sim.baselines.catalog import baselines
    from poolwright.sim.baselines.static_split import static_split
    from poolwright.sim.ours import ours

    splits: dict[str, Callable[[], Policy]] = {f"{machines}M": lambda: static_split(0, 0, machines)}
    for prompt in range(1, machines):
        splits[f"{prompt}P{machines - prompt}T"] = lambda p=prompt: static_split(p, machines - p)  # type: ignore[misc]
    return {OURS: ours, **baselines(max(1, machines // 2)), **splits}


def run(
    *,
    names: list[str],
    trace: str | None,
    prompt_tokens: str | None,
    output_tokens: str | None,
    rate: float | None,
    seconds: float,
    ttft_seconds: float,
    tbt_seconds: float,
    hardware: str,
    machines: int,
    network_gbps: float,
    exact: bool,
    seed: int,
    as_json: bool,
    html: Path | None,
    resume: Path | None,
) -> int:
    """The exit code: 130 where it was interrupted, with what had been run by then."""
    need("numpy", "scipy", *(["matplotlib"] if html is not None else []))
    from poolwright.sim.measures import measure
    from poolwright.sim.plan import Question, run_key, setting_of
    from poolwright.sim.plan_memory import PlanMemory
    from poolwright.sim.policy import Slo
    from poolwright.sim.report import Run, page, run_document, run_lines
    from poolwright.sim.simulation import Conditions, simulate

    try:
        given = served(trace, prompt_tokens, output_tokens, rate, seconds, seed)
        kinds = kinds_of([hardware])
        question = Question(given, Slo(ttft_seconds, tbt_seconds), kinds, network_gbps, machines=machines)
        memory = PlanMemory(resume) if resume is not None else None
    except (ValueError, OSError) as error:
        refuse(str(error))
    known = policies(machines)
    unknown = [name for name in names if name not in known]
    if unknown:
        refuse(f"there is no policy {', '.join(unknown)} among {', '.join(known)}")
    setting = setting_of(question, kinds * machines)
    progress, runs, interrupted = Progress(), [], False
    try:
        for name in dict.fromkeys(names):
            policy = known[name]()
            key = run_key(question, kinds, (machines, name, sorted(policy.parameters.items()), exact, seed))
            if memory is not None and (kept := memory.recall(key)) is not None:
                runs.append(Run.from_json(kept))
                continue
            conditions = Conditions(exact=exact, progress=lambda share, name=name: progress(name, share))  # type: ignore[misc]
            outcome = simulate(policy, given, setting, conditions, seed=seed)
            runs.append(Run.of(policy.name, policy.source, outcome, measure(outcome, setting.slo)))
            if memory is not None:
                memory.keep(key, asdict(runs[-1]))
    except KeyboardInterrupt:
        interrupted = True
    progress.clear()
    if as_json:
        typer.echo(json.dumps(run_document(runs, not interrupted), indent=2))
    else:
        if interrupted:
            typer.echo("Interrupted: these had been run by then")
        typer.echo(f"{given.name}: {len(given)} requests on {machines} x {hardware}")
        typer.echo("\n".join(run_lines(runs)))
    if html is not None:
        write(html, page(f"{given.name} on {machines} x {hardware}", runs))
        _write_pictures(html, runs)
    return INTERRUPTED if interrupted else 0


def _write_pictures(page: Path, runs: "Sequence[Run]") -> None:
    """A PNG beside the page for each run, named after the policy."""
    from poolwright.sim.report import picture

    for run in runs:
        name = re.sub(r"[^a-z0-9]+", "-", run.policy.lower()).strip("-")
        write(page.with_name(f"{page.stem}-{name}.png"), picture(run))
