"""Request-level batching, as servers did before Orca: a batch is closed, computed, and gone before the next begins.

It is closed when it has its size, or when its oldest request has waited for the window. Its rows are padded: prompts to
the longest among them, and those who ended early stay until the last one ends. Nothing here computes padding, but
`Batch.padded_tokens` counts it, so that the useful share of such a server can be told.
"""

from typing import TYPE_CHECKING

from poolwright_engine.scheduling.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from poolwright_engine.scheduling.scheduler import Batch, Scheduler


class Static:
    def __init__(self, size: int, window_seconds: float) -> None:
        self._size = size
        self._window_seconds = window_seconds
        self._members: list[Sequence] = []

    def fill(self, scheduler: "Scheduler", batch: "Batch") -> None:
        if not any(member.state is SequenceState.RUNNING for member in self._members):
            self._close(scheduler, batch)
        line = [*scheduler.prompts_in_flight()]
        for prompt in line:
            tokens = scheduler.piece(batch, prompt, batch.room_for_prefill)
            if not tokens:
                break
            scheduler.compute(batch, prompt, tokens)
        if not batch.rows:
            scheduler.decode_running(batch)
            batch.padded_tokens = len(self._members) - len(batch.rows) if batch.rows else 0
        else:
            lengths = [row.length for row in batch.rows]
            batch.padded_tokens = max(lengths) * len(lengths) - sum(lengths)

    def _close(self, scheduler: "Scheduler", batch: "Batch") -> None:
        self._members = []
        line = scheduler.candidates(batch, self._size)
        if not line:
            return
        since = min(prompt.sequence.request.arrival_seconds for prompt in line)
        resumed = any(prompt.is_resumed for prompt in line)
        if len(line) < self._size and batch.now < since + self._window_seconds and not resumed:
            batch.wake_seconds = since + self._window_seconds
            return
        for prompt in line[: self._size]:
            scheduler.admit(batch, prompt)
            self._members.append(prompt.sequence)
