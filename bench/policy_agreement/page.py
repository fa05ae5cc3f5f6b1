"""The tables of docs/reference/simulator-agreement.md, from what the bench wrote. It measures nothing."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.engine_pages import Row, fill, table

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/simulator-agreement.md"


def _percent(name: str, digits: int = 1) -> Callable[[Row], str]:
    return lambda row: f"{100 * row[name]:.{digits}f}"


def _signed(name: str) -> Callable[[Row], str]:
    return lambda row: f"{100 * row[name]:+.1f}"


def _milliseconds(name: str) -> Callable[[Row], str]:
    return lambda row: f"{1000 * row[name]:.1f}"


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "measure": lambda row: f"{row['measure'].upper()} P{row['percent']}",
    "real, ms": _milliseconds("real"),
    "lowest": _milliseconds("lowest"),
    "highest": _milliseconds("highest"),
    "simulated, ms": _milliseconds("simulated"),
    "error, %": _signed("error"),
    "spread of the real runs, %": _percent("spread"),
    "allowance, %": _percent("allowance"),
    "agrees": lambda row: "yes" if row["agrees"] else "**no**",
}


def write(sections: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any], page: Path = PAGE) -> None:
    for name, section in sections.items():
        fill(page, name, f"{shown(section)}\n{_about(section, about)}\n")


def shown(section: Mapping[str, Any]) -> str:
    return table(section["rows"], COLUMNS) + "".join(f"\n{line}\n" for line in facts(section))


def facts(section: Mapping[str, Any]) -> list[str]:
    repeats = section["repeats"]
    answers = len(repeats[0]["answers"])
    lines = [f"{len(repeats)} repeats of {answers} requests with at least {least_gaps(section)} gaps each."]
    if not enough_gaps(section):
        lines[0] += f" **Fewer than the {section['least_gaps']} that such percentiles ask for.**"
    if "step_errors" in section:
        found = section["step_errors"]
        lines.append(
            f"Steps: {found['steps']}; mean error of one {100 * found['mean']:.1f} %, at most "
            f"{100 * section['step_limit']:.0f} % {'kept' if steps_agree(section) else '**not kept**'} (with prompts "
            f"{100 * found['with_prompts']:.1f} %, decodes alone {100 * found['decodes']:.1f} %), of all their time "
            f"together {100 * found['total']:+.1f} %."
        )
    if "ways" in section:
        found = section["ways"]
        lines.append(
            f"Measured on the idle pool: {1000 * found['whole_first_seconds']:.1f} ms to a first token beyond its "
            f"step, {1000 * found['split_first_seconds']:.1f} ms over two machines; a hand-over "
            f"{1000 * found['handoff_seconds']:.1f} ms and {found['bytes_per_second'] / 1e6:.0f} MB/s."
        )
    return lines


def least_gaps(section: Mapping[str, Any]) -> int:
    """Of the repeat that has fewest."""
    return min(sum(len(tokens) - 1 for _, _, tokens in repeat["answers"]) for repeat in section["repeats"])


def enough_gaps(section: Mapping[str, Any]) -> bool:
    return bool(least_gaps(section) >= section.get("least_gaps", 0))


def steps_agree(section: Mapping[str, Any]) -> bool:
    return bool(section["step_errors"]["mean"] <= section["step_limit"])


def agrees(section: Mapping[str, Any]) -> bool:
    """Every row, and the steps where they are compared; too few gaps are no agreement, whatever they say."""
    steps = "step_errors" not in section or steps_agree(section)
    return steps and enough_gaps(section) and all(row["agrees"] for row in section["rows"])


def _about(section: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    shares = [100 * repeat["cpu_share"] for repeat in section["repeats"]]
    return (
        f"*{about['processor']}, {about['cores']} cores, busy {min(shares):.0f} to {max(shares):.0f} % of the time "
        "during the repeats, whoever's work it was.*"
    )
