"""`Seats`: the sampler's side of a runner on a CPU: each slot's last token, what it remembers, and a step's tokens.

Owns the slots and the threads that share a step's rows. Knows no model and no KV cache.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from poolwright_engine.cpu.sampler import NoFiniteLogits, sample
from poolwright_engine.sampling.guide import GuideError, Guides
from poolwright_engine.sampling.slot_memory import SlotMemory, UnusableParams
from poolwright_engine.scheduling.runner import Row, Seat
from poolwright_engine.scheduling.sequence import TokenLogprobs

_ROWS_WORTH_A_THREAD = 4


@dataclass(slots=True)
class RowTokens:
    """What one row sampled, and why it cannot go on: what came before that stands."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


class Seats:
    """Used by one thread. Rows know nothing of one another, so `threads` may share them and no token depends on how."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, eos_ids: frozenset[int], guides: Guides | None, threads: int
    ) -> None:
        self.last_sampled = [0] * max_num_seqs
        self._taken: list[Seat | None] = [None] * max_num_seqs  # by sequences that have not sampled since
        self._memories: list[SlotMemory | None] = [None] * max_num_seqs
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._guides = guides
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sampler")

    def close(self) -> None:
        self._pool.shutdown()

    def take(self, row: Row) -> None:
        """Before the first row of a sequence that brings a seat is computed: what its slot remembered is gone."""
        if row.seat is not None:
            self._taken[row.slot], self._memories[row.slot] = row.seat, None

    def sample(self, rows: Sequence[Row], firsts: Sequence[int], logits: NDArray[np.float32]) -> list[RowTokens]:
        """firsts: of each row, the position of the first token sampled. logits: (positions, vocab), for each row those
        after its last input but the guesses, and after each guess."""
        tokens = [RowTokens() for _ in rows]
        stops = np.cumsum([row.num_draft + 1 for row in rows]).tolist()
        work = [
            (row, first, logits[stop - row.num_draft - 1 : stop])
            for row, first, stop in zip(rows, firsts, stops, strict=True)
        ]

        def share(first: int, step: int) -> None:
            for index in range(first, len(work), step):
                tokens[index] = self._sample(*work[index])

        shares = min(self._threads, len(rows) // _ROWS_WORTH_A_THREAD)
        if shares < 2:
            share(0, 1)
        else:
            list(self._pool.map(share, range(shares), [shares] * shares))
        return tokens

    def _sample(self, row: Row, first: int, logits: NDArray[np.float32]) -> RowTokens:
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        guesses = row.token_ids[row.length - row.num_draft :]
        error = None
        try:
            memory = self._memory(row)
            for offset, after in enumerate(logits):
                if offset > 0 and token_ids[-1] != guesses[offset - 1]:
                    break
                sampled = sample(after, row.params, first + offset, memory)
                if memory is not None:
                    memory.note(sampled.token_id)
                token_ids.append(sampled.token_id)
                if sampled.logprobs is not None:
                    logprobs.append(sampled.logprobs)
        except (GuideError, NoFiniteLogits, UnusableParams) as failure:
            error = str(failure)
        if token_ids:
            self.last_sampled[row.slot] = token_ids[-1]
        return RowTokens(tuple(token_ids), tuple(logprobs), error)

    def _memory(self, row: Row) -> SlotMemory | None:
        params = row.params
        if not params.shapes_logits:
            self._memories[row.slot] = None
            return None
        memory = self._memories[row.slot]
        if memory is None or memory.params != params:
            seat, self._taken[row.slot] = self._taken[row.slot], None
            memory = SlotMemory(params, seat, self._vocab_size, self._eos_ids, self._guides)
            self._memories[row.slot] = memory
        return memory
