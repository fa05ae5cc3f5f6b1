"""Times between tokens, kept once for all requests of a machine that saw the same ones."""

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray


class GapLog:
    """Gaps between the steps with decodes of one machine, in order, as runs of `counts` gaps of `seconds` each."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.seconds = array("d")
        self.counts = array("q")

    def __len__(self) -> int:
        return len(self.seconds)

    def add(self, seconds: float, count: int) -> None:
        self.seconds.append(seconds)
        self.counts.append(count)


class Stream:
    """The tokens of one request as its client sees them: when the first and the last came, and the gaps between."""

    __slots__ = ("first_at", "last_at", "pieces")

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.last_at = 0.0
        self.pieces: list[float | tuple[GapLog, int, int]] = []  # one gap, or a part of a machine's log


class Gaps(Sequence[tuple[float, int]]):
    """(seconds, how many) runs, in order. Nothing is copied before it is asked for."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[float | tuple[GapLog, int, int]]) -> None:
        self._pieces = tuple(pieces)

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """(runs,) seconds and (runs,) counts."""
        seconds: list[NDArray[np.float64]] = []
        counts: list[NDArray[np.int64]] = []
        for piece in self._pieces:
            if isinstance(piece, float):
                seconds.append(np.array([piece]))
                counts.append(np.array([1]))
            else:
                log, start, stop = piece
                seconds.append(np.array(log.seconds[start:stop], dtype=np.float64))
                counts.append(np.array(log.counts[start:stop], dtype=np.int64))
        if not seconds:
            return np.empty(0), np.empty(0, dtype=np.int64)
        return np.concatenate(seconds), np.concatenate(counts)

    def __len__(self) -> int:
        return sum(1 if isinstance(piece, float) else piece[2] - piece[1] for piece in self._pieces)

    def __iter__(self) -> Iterator[tuple[float, int]]:
        for piece in self._pieces:
            if isinstance(piece, float):
                yield piece, 1
            else:
                log, start, stop = piece
                yield from zip(log.seconds[start:stop], log.counts[start:stop], strict=True)

    @overload
    def __getitem__(self, index: int) -> tuple[float, int]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[float, int]]: ...

    def __getitem__(self, index: int | slice) -> tuple[float, int] | Sequence[tuple[float, int]]:
        if index == 0:  # the second token's, asked of every request
            return next(iter(self))
        return tuple(self)[index]
