"""One published figure beside ours: what the source says, what this project gives, and how far they are apart."""

from collections.abc import Sequence
from dataclasses import dataclass

FAR = 0.2  # of the published value: from here on a difference needs its cause


@dataclass(frozen=True, slots=True)
class Figure:
    """`published`: lowest and highest of what the source says, None where it says no number under stated conditions.
    `ours` None: no data. `by`: the table of step times, or the code, that gave it. `why`: what the difference comes
    from where it is known, or why there is no data; shown only where it is needed. `holds`: of a claim that is no
    number, whether ours says the same."""

    what: str
    source: str
    published: tuple[float, float] | None
    ours: float | None
    by: str
    unit: str = ""
    digits: int = 2
    why: str = ""
    remark: str = ""  # conditions that are always to be told
    claim: str = ""
    holds: bool | None = None

    def __post_init__(self) -> None:
        if self.ours is None and self.holds is None and not self.why:
            raise ValueError(f"{self.what}: no data needs its reason")

    @property
    def ratio(self) -> float | None:
        """Ours over the published value, over the nearer end of a range; 1 inside of it."""
        if self.published is None or self.ours is None:
            return None
        low, high = self.published
        if low <= self.ours <= high:
            return 1.0
        return self.ours / (low if self.ours < low else high)

    @property
    def is_far(self) -> bool:
        return self.holds is False or (self.ratio is not None and not 1 - FAR <= self.ratio <= 1 + FAR)

    def cells(self) -> tuple[str, ...]:
        notes = [self.remark] if self.remark else []
        if self.ours is None and self.holds is None:
            notes.append(self.why)
        elif self.is_far:
            notes.append(self.why or "unexplained")
        if self.holds is not None:
            ratio = "agrees" if self.holds else "differs"
        else:
            ratio = "–" if self.ratio is None else f"{self.ratio:.2f}"
        return self.what, self.source, self._published(), self._ours(), ratio, self.by, "; ".join(notes)

    def _published(self) -> str:
        if self.claim or self.published is None:
            return self.claim or "–"
        low, high = self.published
        return self._number(low) if low == high else f"{self._number(low, unit=False)}–{self._number(high)}"

    def _ours(self) -> str:
        if self.ours is None:
            return "no data" if self.holds is None else ("the same" if self.holds else "otherwise")
        return self._number(self.ours)

    def _number(self, value: float, unit: bool = True) -> str:
        return f"{value:,.{self.digits}f}{self.unit if unit else ''}"


def exactly(value: float) -> tuple[float, float]:
    return value, value


HEAD = ("figure", "source", "published", "ours", "ratio", "ours by", "conditions, and why it differs")


def table(figures: Sequence[Figure]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cell or " " for cell in figure.cells()) + " |" for figure in figures]
    return "\n".join(lines) + "\n"
