"""What plans and runs look like: lines for a terminal, a document for programs, one HTML page with pictures inside.

Only shows: every number is `plan`'s, `measures`' or an outcome's. What is unknown is said to be. matplotlib is imported
when a page is asked for, and nowhere else.
"""

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from poolwright.sim import kv_ledger
from poolwright.sim.kv_ledger import GB, PLACEMENTS, network_link
from poolwright.sim.measures import Measures, Percentiles, gap_arrays
from poolwright.sim.outcome import RoleInterval, RunOutcome
from poolwright.sim.plan import Evaluated, Plan
from poolwright_protocol.roles import Role

_RUN_HEADS = ("policy", "attained", "TTFT p50", "p90", "p99", "TBT p50", "p90", "p99", "moves", "refused", "lost")
_SHOWN = 12  # forms in the table of a plan
_POINTS = 120  # along the time of a picture
_COLOURS = {Role.PROMPT: "#c44e52", Role.MIXED: "#8c8c8c", Role.TOKEN: "#4c72b0"}


# Plans.


def plan_lines(plan: Plan) -> list[str]:
    question, chosen, found = plan.question, plan.chosen(), plan.verdict()
    if chosen is None or found is None:
        return ["Nothing was run yet"]
    slo = question.used_slo
    said = [] if plan.complete else ["Interrupted: this is what was known by then", ""]
    aim = "begun within its length" if question.offline else f"TTFT {_s(slo.ttft_seconds)}, TBT {_s(slo.tbt_seconds)}"
    said += [
        f"{question.trace.name}: {len(question.trace)} requests in {question.trace.horizon_seconds:.0f} s; {aim} for "
        f"{question.target:.0%}",
        f"verdict: {found.answer.value}: {found.why}",
        *(f"  {'holds' if a.holds else 'no   '}  {a.name}: {a.why}" for a in found.accounts),
        "",
        f"plan: {chosen.form.name}" + ("" if chosen.meets(question.target) else " (misses the target: the best found)"),
        *_costs(chosen),
        f"  attains {chosen.measures.attainment:.1%}" + _moved(plan),
        f"  TTFT {_percentiles(chosen.measures.ttft)}",
        f"  TBT {_percentiles(chosen.measures.tbt)}",
        f"  {_budget(chosen)}",
    ]
    split = plan.best(split=True)
    if split is not None:
        idle = split.idle
        said.append(
            f"  KV memory idle on prompt machines ({split.form.name}): at least {idle.idle_bytes / GB:.1f} of "
            f"{idle.total_bytes / GB:.1f} GB, {idle.share:.1%}"
        )
    ranked = plan.ranked()
    heads = ["form", "attained", "TTFT p90", "2nd token p90", "TBT p99", "$/h", "W"]
    said += ["", *_table(heads, [_row(e) for e in ranked[:_SHOWN]])]
    if len(ranked) > _SHOWN:
        said.append(f"and {len(ranked) - _SHOWN} that attain less or cost more; --json has all")
    links = (network_link(question.gbps, f"this network, {question.gbps:g} Gbps"), *PLACEMENTS)
    return [*said, "", *kv_ledger.lines(plan.ledger(), links)]


def _costs(chosen: Evaluated) -> list[str]:
    form = chosen.form
    dollars = "unknown, no table has it" if form.dollars_per_hour is None else f"${form.dollars_per_hour:,.2f} an hour"
    watts = "unknown, no table has it" if form.watts is None else f"{form.watts / 1000:,.1f} kW of GPUs at their limit"
    return [f"  machines: {form.machines}, GPUs: {form.gpus}", f"  cost: {dollars}", f"  power: {watts}"]


def _moved(plan: Plan) -> str:
    moves = plan.with_moves
    if moves is None:
        return " with roles held still"
    return f" with roles held still, {moves.attainment:.1%} with moves ({moves.moves} of them)"


def _budget(chosen: Evaluated) -> str:
    tokens = chosen.budget_tokens
    return "budget of a step: by slack under TBT" if tokens is None else f"budget of a step: {tokens} tokens"


def _row(found: Evaluated) -> list[str]:
    m, form = found.measures, found.form
    return [
        form.name,
        f"{m.attainment:.1%}",
        _s(m.ttft.p90),
        _s(m.second_token.p90),
        _s(m.tbt.p99),
        "unknown" if form.dollars_per_hour is None else f"{form.dollars_per_hour:.2f}",
        "unknown" if form.watts is None else f"{form.watts:.0f}",
    ]


def plan_document(plan: Plan) -> dict[str, Any]:
    """For programs; unknown and unbounded numbers are null."""
    question, chosen, found, ledger = plan.question, plan.chosen(), plan.verdict(), plan.ledger()
    links = (network_link(question.gbps, "network"), *PLACEMENTS)
    document = {
        "format": 1,
        "complete": plan.complete,
        "trace": {
            "name": question.trace.name,
            "source": question.trace.source,
            "requests": len(question.trace),
            "seconds": question.trace.horizon_seconds,
        },
        "slo": asdict(question.used_slo),
        "target": question.target,
        "goal": question.goal.value,
        "network_gbps": question.gbps,
        "verdict": None
        if found is None
        else {
            "answer": found.answer.name.lower(),
            "why": found.why,
            "accounts": [asdict(account) for account in found.accounts],
        },
        "plan": None if chosen is None else _evaluated(chosen, question.target),
        "with_moves": None if plan.with_moves is None else asdict(plan.with_moves),
        "evaluated": [_evaluated(e, question.target) for e in plan.evaluated],
        "kv_ledger": {
            "machine": ledger.name,
            "bytes_per_token": ledger.bytes_per_token,
            "bytes_per_request": ledger.request_bytes,
            "bytes_per_second": ledger.bytes_per_second,
            "links": ledger.links,
            "placements": [
                {"name": link.name, "share": passage.share, "seconds": passage.seconds}
                for link in links
                for passage in (ledger.over(link),)
            ],
        },
    }
    result: dict[str, Any] = _finite(document)
    return result


def _evaluated(found: Evaluated, target: float) -> dict[str, Any]:
    form = found.form
    return {
        "name": form.name,
        "prompt": {"machines": form.prompt, "kind": form.prompt_kind.name} if form.split else None,
        "token": {"machines": form.token, "kind": form.token_kind.name} if form.split else None,
        "mixed": None if form.split else {"machines": form.mixed, "kind": form.prompt_kind.name},
        "gpus": form.gpus,
        "dollars_per_hour": form.dollars_per_hour,
        "watts": form.watts,
        "meets": found.meets(target),
        "budget_tokens": found.budget_tokens,
        "idle_prompt_kv_bytes": found.idle.idle_bytes,
        "prompt_kv_bytes": found.idle.total_bytes,
        "measures": asdict(found.measures),
    }


# Runs of policies.


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's run as far as it is shown, so that it can be kept as JSON. `begun`: of each request with a token,
    its arrival, its TTFT and its longest gap."""

    policy: str
    source: str
    trace: str
    seed: int
    measures: Measures
    transferred_bytes: int
    horizon_seconds: float
    intervals: Sequence[RoleInterval]
    notes: Sequence[str]
    begun: Sequence[tuple[float, float, float | None]]

    @classmethod
    def of(cls, policy: str, source: str, outcome: RunOutcome, measures: Measures) -> "Run":
        begun: list[tuple[float, float, float | None]] = []
        for request in outcome.requests:
            if request.ttft_seconds is not None:
                gaps = gap_arrays(request.gaps)[0]
                longest = float(gaps.max()) if len(gaps) else None
                begun.append((request.arrival_seconds, request.ttft_seconds, longest))
        return cls(
            policy,
            source,
            outcome.trace,
            outcome.seed,
            measures,
            outcome.transferred_bytes,
            outcome.horizon_seconds,
            outcome.intervals,
            outcome.notes,
            begun,
        )

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> "Run":
        """Of what `asdict` made."""
        intervals = [RoleInterval(**(interval | {"role": Role(interval["role"])})) for interval in kept["intervals"]]
        begun = [(arrival, ttft, longest) for arrival, ttft, longest in kept["begun"]]
        measures = Measures.from_json(kept["measures"])
        return cls(**(dict(kept) | {"intervals": intervals, "begun": begun, "measures": measures}))


def run_lines(runs: Sequence[Run]) -> list[str]:
    return _table(_RUN_HEADS, [_run_row(run) for run in runs])


def _run_row(run: Run) -> list[str]:
    m = run.measures
    times = [_s(value) for p in (m.ttft, m.tbt) for value in (p.p50, p.p90, p.p99)]
    return [run.policy, f"{m.attainment:.1%}", *times, str(m.moves), str(m.refused), str(m.lost)]


def run_document(runs: Sequence[Run], complete: bool) -> dict[str, Any]:
    result: dict[str, Any] = _finite(
        {
            "format": 1,
            "complete": complete,
            "runs": [
                {
                    "policy": run.policy,
                    "source": run.source,
                    "trace": run.trace,
                    "seed": run.seed,
                    "measures": asdict(run.measures),
                    "transferred_bytes": run.transferred_bytes,
                    "pools": [asdict(interval) for interval in run.intervals],
                    "notes": list(run.notes),
                }
                for run in runs
            ],
        }
    )
    return result


def pool_sizes(run: Run | RunOutcome, at: Sequence[float]) -> dict[Role, list[int]]:
    """Machines of each role at each of those times."""
    return {
        role: [sum(i.role is role and i.began_seconds <= t < i.ended_seconds for i in run.intervals) for t in at]
        for role in Role
    }


def move_times(run: Run | RunOutcome) -> list[float]:
    """When machines took up another role."""
    seen: set[str] = set()
    times = []
    for interval in sorted(run.intervals, key=lambda i: i.began_seconds):
        if interval.uid in seen:
            times.append(interval.began_seconds)
        seen.add(interval.uid)
    return times


def page(title: str, runs: Sequence[Run]) -> str:
    """One HTML file that needs no other: the table, and for each run its pools, TTFT, TBT and moves over time."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _run_row(run)) + "</tr>" for run in runs
    )
    heads = "".join(f"<th>{head}</th>" for head in _RUN_HEADS)
    pictures = "".join(
        f"<h2>{html.escape(run.policy)}</h2><p>{html.escape(run.source)}</p>"
        f'<img alt="pools, TTFT, TBT and moves of {html.escape(run.policy)}" '
        f'src="data:image/png;base64,{base64.b64encode(picture(run)).decode()}">'
        + "".join(f"<p>{html.escape(note)}</p>" for note in run.notes)
        for run in runs
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        "<style>body{font-family:sans-serif;max-width:70em;margin:auto}td,th{padding:.2em .6em;text-align:right}"
        "td:first-child{text-align:left}img{max-width:100%}</style>"
        f"<h1>{html.escape(title)}</h1><table><tr>{heads}</tr>{rows}</table>"
        f"{pictures}</html>\n"
    )


def picture(run: Run) -> bytes:
    """A PNG: pool sizes with moves as lines across, TTFT by arrival, and the longest gap of each request."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    end = max([run.horizon_seconds, *(i.ended_seconds for i in run.intervals)])
    at = [float(t) for t in np.linspace(0.0, end, _POINTS, endpoint=False)]
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    pools, ttft, tbt = figure.subplots(3, 1, sharex=True)
    sizes = {role: counts for role, counts in pool_sizes(run, at).items() if any(counts)}
    pools.stackplot(
        at, *sizes.values(), labels=[r.value for r in sizes], colors=[_COLOURS[r] for r in sizes], step="post"
    )
    pools.set_ylabel("machines")
    pools.legend(loc="upper right")
    ttft.plot([arrival for arrival, _, _ in run.begun], [seconds for _, seconds, _ in run.begun], ".", markersize=3)
    ttft.set_ylabel("TTFT, s")
    longest = [(arrival, gap) for arrival, _, gap in run.begun if gap is not None]
    tbt.plot([arrival for arrival, _ in longest], [gap for _, gap in longest], ".", markersize=3)
    tbt.set_ylabel("longest gap, s")
    tbt.set_xlabel("seconds of the trace, by arrival")
    for axes in (pools, ttft, tbt):
        for time in move_times(run):
            axes.axvline(time, color="black", linewidth=0.5, alpha=0.4)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=80, metadata={"Software": None})
    return written.getvalue()


# Text.


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *rows)
    ]


def _percentiles(values: Percentiles) -> str:
    return f"p50 {_s(values.p50)}, p90 {_s(values.p90)}, p99 {_s(values.p99)}"


def _s(seconds: float | None) -> str:
    if seconds is None:
        return "none"
    if not math.isfinite(seconds):
        return "never"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
