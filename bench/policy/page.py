"""`docs/reference/policy-comparison.md`: the comparison as a page of the docs.

Text between `<!-- begin: NAME -->` and `<!-- end: NAME -->` is made here; the words around them are not.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.engine_pages import fill, table
from bench.policy.contenders import OURS, SHIPPED, is_split
from bench.policy.schedule import FAR_BEHIND_IN_PART
from bench.policy.studies import Effect
from bench.policy.table import causes_text, claim_text, difference_text, heading, shuffled_text
from bench.policy.verdict import Judged, Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "policy-comparison.md"
SHOWN = 0.05  # policies further behind the best of the others than that are counted, not listed


def write(found: Sequence[Judged], spent: str, page: Path = PAGE) -> None:
    fill(page, "summary", f"{_summary(found)}\n{spent}\n")
    fill(page, "cells", "\n".join(_cell(judged) for judged in found))


def write_study(name: str, found: Mapping[str, Sequence[Effect]], page: Path = PAGE) -> None:
    columns: dict[str, Callable[[Any], str]] = {
        "cell": lambda row: row[0],
        "ours": lambda row: row[1].variant,
        "attained": lambda row: _number(row[1].value),
        "as it is less this, 95 %": lambda row: difference_text(row[1].difference),
        "moves/h": lambda row: f"{row[1].moves_per_hour:.0f}",
    }
    rows: Any = [(cell, effect) for cell, effects in found.items() for effect in effects]
    fill(page, name, table(rows, columns))


def _summary(found: Sequence[Judged]) -> str:
    columns: dict[str, Callable[[Any], str]] = {
        "cell": lambda j: j.cell.name,
        "ours": lambda j: _number(j.ours.value),
        "as shipped": lambda j: " / ".join(_number(r.value) for r in j.rows if r.policy in SHIPPED),
        "best other": lambda j: _best_other(j),
        "best split": lambda j: _number(next((r.value for r in j.rows if r.policy == j.split), None)),
        "clairvoyant": lambda j: _number(j.clairvoyant),
        "bound": lambda j: _number(j.bound),
        "verdict": lambda j: j.verdict,
    }
    rows: Any = found
    return table(rows, columns)


def _best_other(judged: Judged) -> str:
    others = [
        r for r in judged.rows if r.value is not None and not (r.policy in (OURS, *SHIPPED) or is_split(r.policy))
    ]
    best = max(others, key=lambda row: row.value or 0.0, default=None)
    return "–" if best is None else f"{_number(best.value)} ({best.policy})"


def _cell(judged: Judged) -> str:
    values = [row.value for row in judged.rows if row.value is not None]
    least = max(values, default=0.0) - SHOWN
    own = (OURS, *SHIPPED)
    listed = [row for row in judged.rows if row.policy in own or (row.value is not None and row.value >= least)]
    in_part = [row for row in judged.rows if row.in_part is not None]
    left = [row for row in judged.rows if row not in (*listed, *in_part)]
    columns: dict[str, Callable[[Any], str]] = {
        "policy": lambda row: row.policy,
        "attained": lambda row: _number(row.value),
        "ours less it, 95 %": lambda row: difference_text(row.difference),
        "draws": lambda row: str(row.draws),
        "moves/h": lambda row: f"{row.moves_per_hour:.0f}",
        "machine-seconds lost": lambda row: f"{row.lost_machine_seconds:.0f}",
        "lost to": lambda row: causes_text(row.causes),
    }
    if any(row.admission is not None for row in judged.rows):
        columns["with admission"] = lambda row: _number(row.admission)
    rows: Any = listed
    said = [f"### {judged.cell.name}\n", f"{heading(judged)}.\n", table(rows, columns)]
    if left:
        said.append(f"More than {SHOWN:g} behind the best: {_listed(left)}.\n")
    if in_part:
        rest = ", ".join(f"{row.policy} {_number(row.in_part)}" for row in in_part)
        said.append(f"Not run to their end, more than {FAR_BEHIND_IN_PART:g} behind ours in the first part: {rest}.\n")
    said.append(f"Clairvoyant {_number(judged.clairvoyant)}, bound {_number(judged.bound)}, of the first draw.")
    if judged.shuffled:
        said.append(f"With the copies' lengths shuffled: {shuffled_text(judged)}.")
    said += [f"{claim_text(claim)}." for claim in judged.claims]
    said += [f"**Cannot be:** {fault}." for fault in judged.faults]
    said += [f"**Failed:** {crash}." for crash in judged.crashes]
    said += [f"{row.policy}: {row.note}." for row in judged.rows if row.note and row.value is not None]
    return "\n".join([*said, f"\n**{judged.verdict}**\n"])


def _listed(rows: Sequence[Row]) -> str:
    return ", ".join(
        f"{row.policy} {_number(row.value)}" + (f" ({row.note})" if row.value is None and row.note else "")
        for row in rows
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
