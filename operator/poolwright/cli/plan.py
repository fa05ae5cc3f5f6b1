"""`poolwright plan` and `ledger`: options make a question; the search and its progress; the answer as text or JSON."""

import json
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from poolwright.sim.plan import Form, Plan, Question
    from poolwright.sim.plan_memory import PlanMemory
    from poolwright.sim.request import Trace
    from poolwright.sim.step_time import MachineModel

INTERRUPTED = 130


def need(*libraries: str) -> None:
    """Ends with what to install where one of them is absent."""
    absent = [name for name in libraries if find_spec(name) is None]
    if absent:
        refuse(f"this needs {', '.join(absent)}: pip install 'poolwright[sim]'")


def refuse(why: str) -> NoReturn:
    typer.echo(why, err=True)
    raise typer.Exit(2)


class Progress:
    """One line on a terminal's standard error, rewritten; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._last = ("", -1)

    def __call__(self, name: str, share: float) -> None:
        percent = int(share * 100)
        if self._shown and (name, percent) != self._last:
            self._last = (name, percent)
            sys.stderr.write(f"\r\x1b[K{percent:3d} %  {name}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def served(
    trace: str | None,
    prompt_tokens: str | None,
    output_tokens: str | None,
    rate: float | None,
    seconds: float,
    seed: int,
) -> "Trace":
    """A trace by name or file, or one generated from lengths and a rate. Raises ValueError, OSError."""
    from poolwright.sim.plan import at_rate, named_trace
    from poolwright.sim.traces import Lengths, generated

    if not seconds > 0 or (rate is not None and not rate > 0):
        raise ValueError("--seconds and --rate are above 0")
    if trace is not None:
        if prompt_tokens is not None or output_tokens is not None:
            raise ValueError("give a trace, or lengths and a rate, not both")
        return at_rate(named_trace(trace), rate, seconds, seed)
    if prompt_tokens is None or output_tokens is None or rate is None:
        raise ValueError("give --trace, or --prompt-tokens, --output-tokens and --rate")
    prompt, output = _percentiles(prompt_tokens), _percentiles(output_tokens)
    lengths = Lengths(
        "lengths", *prompt, *output, most_tokens=max(131_072, 4 * round(prompt[1] + output[1])), source=""
    )
    return generated(lengths, rate, seconds, seed)


def _percentiles(text: str) -> tuple[float, float]:
    """`median` or `median,p90`; one number is the length of all."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{text!r} is no length: give MEDIAN or MEDIAN,P90") from error
    if len(numbers) not in (1, 2) or not 1 <= numbers[0] <= numbers[-1] < 1e7:
        raise ValueError(f"{text!r} is no length: give MEDIAN or MEDIAN,P90, in tokens, the second not below the first")
    return numbers[0], numbers[-1]


def kinds_of(names: list[str]) -> list["MachineModel"]:
    """Raises ValueError."""
    from poolwright.sim.profiles import machine

    try:
        return [machine(name) for name in dict.fromkeys(names)]
    except KeyError as error:
        raise ValueError(error.args[0]) from error


def run(
    *,
    trace: str | None,
    prompt_tokens: str | None,
    output_tokens: str | None,
    rate: float | None,
    seconds: float,
    ttft_seconds: float,
    tbt_seconds: float,
    target: float,
    hardware: list[str],
    machines: int | None,
    most_machines: int,
    goal: str,
    network_gbps: float,
    every_split: bool,
    offline: bool,
    seed: int,
    as_json: bool,
    resume: Path | None,
) -> int:
    """The exit code: 0 where the plan meets its target, 1 where none did, 130 where it was interrupted."""
    need("numpy", "scipy")
    from poolwright.sim.plan import AROUND, Goal, Question
    from poolwright.sim.plan_memory import PlanMemory
    from poolwright.sim.policy import Slo

    try:
        question = Question(
            trace=served(trace, prompt_tokens, output_tokens, rate, seconds, seed),
            slo=Slo(ttft_seconds, tbt_seconds),
            kinds=kinds_of(hardware),
            gbps=network_gbps,
            machines=machines,
            most_machines=most_machines,
            target=target,
            goal=Goal(goal),
            offline=offline,
            around=None if every_split else AROUND,
        )
        memory = PlanMemory(resume) if resume is not None else None
    except (ValueError, OSError) as error:
        refuse(str(error))
    return _answer(question, memory, as_json)


def _answer(question: "Question", memory: "PlanMemory | None", as_json: bool) -> int:
    from poolwright.sim.plan import Plan, plan
    from poolwright.sim.report import plan_document, plan_lines

    progress, found, interrupted = Progress(), Plan(question), False

    def said(form: "Form", share: float) -> None:
        progress(form.name, share)

    try:
        with closing(plan(question, said, memory)) as steps:
            for known in steps:
                found = known
    except KeyboardInterrupt:
        interrupted = True
    progress.clear()
    typer.echo(json.dumps(plan_document(found), indent=2) if as_json else "\n".join(plan_lines(found)))
    if interrupted:
        return INTERRUPTED
    return 0 if _meets(found) else 1


def _meets(found: "Plan") -> bool:
    chosen = found.chosen()
    return chosen is not None and chosen.meets(found.question.target)


def print_ledger(model: str | None, prompt_tokens: float, rate: float) -> None:
    """The KV ledger of a model alone; None: DistServe's example."""
    need("numpy", "scipy")
    from poolwright.sim.kv_ledger import MODELS, distserve_ledger, ledger_of, lines

    if model is None:
        typer.echo("\n".join(distserve_ledger()))
        return
    if model not in MODELS:
        refuse(f"there is no model {model!r} among {', '.join(MODELS)}")
    try:
        ledger = ledger_of(MODELS[model], prompt_tokens, rate)
    except ValueError as error:
        refuse(str(error))
    typer.echo("\n".join(lines(ledger, model=MODELS[model])))


def write(path: Path, what: str | bytes) -> None:
    try:
        path.write_bytes(what.encode() if isinstance(what, str) else what)
    except OSError as error:
        refuse(f"{path}: {error.strerror}")
