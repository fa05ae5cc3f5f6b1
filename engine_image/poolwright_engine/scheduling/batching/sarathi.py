"""Sarathi-Serve's Algorithm 3 (OSDI 2024): decodes first, then chunks of prompts, under one token budget.

No running decode ever waits for a prefill. What the decodes leave goes to prompts in flight and new ones, shared so
that neither a huge prompt nor a stream of short ones starves the other. Of what is left:

- a quarter belongs to the prompt first in line (by admission, then by arrival);
- the rest goes to whoever needs least, ties in line, after those who come back from a preemption, and by rank;
- what that leaves over goes to the first in line.

So a prompt waits for no more than the prompts that need less than it, at three quarters of the prefill rate; and
whatever arrives, a prompt that is first in line ends within four times the steps it would need alone.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poolwright_engine.scheduling.scheduler import Batch, Prompt, Scheduler

_SHARE_OF_FIRST = 4  # one in


class Sarathi:
    def fill(self, scheduler: "Scheduler", batch: "Batch") -> None:
        scheduler.decode_running(batch)
        all_decode = batch.num_decodes == len(scheduler.running)
        prompts = [*(() if all_decode else scheduler.prompts_in_flight()), *scheduler.candidates(batch)]
        for prompt, tokens in self._shares(scheduler, batch, prompts):
            scheduler.compute(batch, prompt, tokens)

    def _shares(self, scheduler: "Scheduler", batch: "Batch", prompts: list["Prompt"]) -> list[tuple["Prompt", int]]:
        """In line; those who get nothing are left out."""
        if not prompts:
            return []

        def turn(entry: tuple[int, "Prompt"]) -> tuple[bool, tuple[bool, int], int]:
            prompt = entry[1]
            return not prompt.is_resumed, scheduler.rank(prompt.sequence), prompt.remaining

        turns = sorted(enumerate(prompts), key=turn)
        room, first = batch.room_for_prefill, prompts[0]
        reserved = min(first.remaining, -(-room // _SHARE_OF_FIRST)) if len(prompts) > 1 else 0
        soon = scheduler.tokens_soon([prompt for _, prompt in turns])
        if soon is not None:
            room = min(room, max(soon, reserved) if turns[0][0] == 0 else soon + reserved)
        left = room - reserved
        shares: dict[int, int] = {}
        for place, prompt in turns:
            own = reserved if place == 0 else 0
            tokens = scheduler.piece(batch, prompt, left + own)
            if place and tokens < min(prompt.remaining, scheduler.blocks.block_size):
                tokens = 0  # less than a block is not worth a seat; the first in line takes any
            left -= max(0, tokens - own)
            shares[place] = tokens
        return [(prompt, shares[place]) for place, prompt in enumerate(prompts) if shares[place]]
