"""As vLLM V1 (0.32, `v1/core/sched/scheduler.py`): no phases, one pass over running, then over waiting.

Every sequence wants what it has not computed, cut in this order: long_prefill_token_threshold, the tokens that may be
scheduled, the tokens of the batch, the context's length. Running sequences stand in order of admission, so a prompt in
flight may take the budget before a later decode; waiting ones are skipped in a step that preempted. Chunks end where
they are cut, not on blocks.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poolwright_engine.scheduling.scheduler import Batch, Scheduler


class Vllm:
    def fill(self, scheduler: "Scheduler", batch: "Batch") -> None:
        for sequence in tuple(scheduler.running):
            if sequence.slot < 0:
                continue  # preempted for one before it
            if sequence.is_prefilling:
                prompt = scheduler.prompt(sequence)
                scheduler.compute(batch, prompt, scheduler.piece(batch, prompt, batch.room_for_prefill, rounded=False))
            elif batch.tokens_left:
                scheduler.decode(batch, sequence)
        for prompt in scheduler.candidates(batch):
            tokens = scheduler.piece(batch, prompt, batch.room_for_prefill, rounded=False)
            if not tokens:
                break
            scheduler.compute(batch, prompt, tokens)
