"""A comparison as text for a terminal, and as a document for programs. Lays out; every number is somebody else's."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.policy.cells import Cell, slo
from bench.policy.full import TARGETS, Goodput
from bench.policy.known import Known
from bench.policy.runs import Result, Run, finite, sources
from bench.policy.studies import Effect
from bench.policy.verdict import Difference, Judged, Row, Standing

HEADS = ("policy", "attained", "ours less it [95 %]", "ours is", "draws", "moves/h", "lost s", "lost to")


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    ]


def heading(judged: Judged) -> str:
    cell, target = judged.cell, slo(judged.cell)
    growing = f" + {target.ttft_seconds_per_token * 1000:.2f} s/1,000 tokens" if target.ttft_seconds_per_token else ""
    aim = (
        f"Splitwise's nine percentiles over {cell.reference}"
        if cell.nine
        else f"TTFT {target.ttft_seconds:.2f} s{growing}, TBT {target.tbt_seconds * 1000:.0f} ms"
    )
    return (
        f"{cell.name}: {cell.machines} x {cell.machine}; {aim}; {judged.requests_per_second:.1f} requests/s, "
        f"{cell.share:g} of the fluid bound; {judged.requests} requests in {cell.seconds:.0f} s"
    )


def cell_lines(judged: Judged) -> list[str]:
    with_admission = any(row.admission is not None for row in judged.rows)
    heads = [*HEADS, *(["with admission"] if with_admission else [])]
    rows = []
    for row in judged.rows:
        texts = row_texts(row)
        rows.append([*texts, _share(row.admission)] if with_admission else texts)
    said = [heading(judged), *aligned(heads, rows)]
    said.append(f"  clairvoyant {_share(judged.clairvoyant)}, bound {_share(judged.bound)} (first draw)")
    if judged.shuffled:
        said.append(f"  shuffled: {shuffled_text(judged)}")
    said += [f"  {claim_text(claim)}" for claim in judged.claims]
    said += [f"  WRONG: {fault}" for fault in judged.faults]
    said += [f"  FAILED: {crash}" for crash in judged.crashes]
    return [*said, f"  verdict: {judged.verdict}"]


def claim_text(claim: Any) -> str:
    held = {True: "holds", False: "missed", None: "open"}[claim.holds]
    asked = "above" if claim.above else "at least"
    why = f"; {claim.why}" if claim.why else ""
    return f"ours / {claim.name}: {_share(claim.ratio)}, to be {asked} {claim.least:g}: {held}{why}"


def shuffled_text(judged: Judged) -> str:
    return ", ".join(
        f"{name} {found.value:.3f}"
        + (f" (ours less it {difference_text(found.difference)})" if found.difference else "")
        for name, found in judged.shuffled.items()
    )


def row_texts(row: Row) -> list[str]:
    return [
        row.policy,
        value_text(row),
        difference_text(row.difference),
        "" if row.difference is None and row.standing is not Standing.OPEN else row.standing.value,
        str(row.draws),
        f"{row.moves_per_hour:.0f}",
        f"{row.lost_machine_seconds:.0f}",
        causes_text(row.causes),
    ]


def value_text(row: Row) -> str:
    if row.in_part is not None:
        return f"{row.in_part:.3f} in part"
    return _share(row.value) if row.value is not None or not row.note else row.note[:40]


def difference_text(difference: Difference | None) -> str:
    if difference is None:
        return ""
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.3f}"
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def causes_text(causes: Mapping[str, float]) -> str:
    return ", ".join(f"{cause} {share:.3f}" for cause, share in causes.items() if share >= 0.0005)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def summary_lines(found: Sequence[Judged]) -> list[str]:
    short = [judged for judged in found if not judged.is_good]
    claims = [claim for judged in found for claim in judged.claims]
    said = [f"{len(found) - len(short)} of {len(found)} cells: at least as good as all"]
    said += [f"  {judged.cell.name}: {judged.verdict}" for judged in short]
    for name in dict.fromkeys(claim.name for claim in claims):
        own = [claim for claim in claims if claim.name == name]
        held, missed = (sum(claim.holds is want for claim in own) for want in (True, False))
        said.append(f"{name}: holds in {held}, missed in {missed}, open in {len(own) - held - missed}")
    return said


# Single runs.

RUN_HEADS = (
    "cell",
    "policy",
    "seed",
    "attained",
    "TTFT p50",
    "p90",
    "p99",
    "TBT p50",
    "p99",
    "moves/h",
    "lost s",
    "CPU s",
)


def run_lines(runs: Sequence[Run], known: Known) -> list[str]:
    """One row each, and the mean of each policy in a cell that has several."""
    rows: list[list[str]] = []
    for _, group in _grouped(runs).items():
        results = [(run, known(run)) for run in group]
        rows += [_run_row(run, result) for run, result in results]
        values = [result.value for _, result in results if result is not None and result.value is not None]
        if len(values) > 1:
            mean = f"{math.fsum(values) / len(values):.4f}"
            rows.append([group[0].cell.name, group[0].policy, "mean", mean, *[""] * (len(RUN_HEADS) - 5), ""])
    return aligned((*RUN_HEADS, "lost to"), [row if len(row) > len(RUN_HEADS) else [*row, ""] for row in rows])


def _grouped(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.cell.name, run.policy), []).append(run)
    return found


def _run_row(run: Run, result: Result | None) -> list[str]:
    start = [run.cell.name, run.policy, str(run.seed)]
    if result is None or result.value is None:
        said = "not run" if result is None else result.note
        return [*start, said, *[""] * (len(RUN_HEADS) - 4)]
    names = ("ttft_p50", "ttft_p90", "ttft_p99", "tbt_p50", "tbt_p99")
    times = [_seconds(result.figures.get(f"{name}_seconds")) for name in names]
    rest = [f"{result.moves_per_hour:.0f}", f"{result.lost_machine_seconds:.0f}", f"{result.cpu_seconds:.1f}"]
    return [*start, f"{result.value:.4f}", *times, *rest, causes_text(result.causes)]


def _seconds(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


# Studies and goodput.


def effect_lines(cell: str, effects: Sequence[Effect]) -> list[str]:
    rows = [[e.variant, f"{e.value:.4f}", difference_text(e.difference), f"{e.moves_per_hour:.0f}"] for e in effects]
    return [cell, *aligned(("ours", "attained", "as it is less this [95 %]", "moves/h"), rows)]


def goodput_lines(cell: Cell, found: Sequence[Goodput]) -> list[str]:
    rows = [[g.policy, *("–" if rate is None else f"{rate:.3f}" for rate in g.per_machine)] for g in found]
    heads = ("policy", *(f"{target:.0%}" for target in TARGETS))
    return [f"{cell.name}: requests/s per machine that attain", *aligned(heads, rows)]


# For programs.


def document(found: Sequence[Judged], **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = finite(
        {
            "format": 1,
            "sources": {"ours": sources(True), "others": sources(False)},
            "cells": {
                judged.cell.name: {
                    **dataclasses.asdict(judged),
                    "cell": judged.cell.document(),
                    "verdict": judged.verdict,
                    "slo": dataclasses.asdict(slo(judged.cell)),
                }
                for judged in found
            },
            **more,
        }
    )
    return result
