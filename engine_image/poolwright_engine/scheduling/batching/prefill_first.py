"""As vLLM before chunked prefill (SOSP 2023): prompts go first and alone; decodes run in steps without a prompt.

Prompts start early and decodes stand still while they come.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poolwright_engine.scheduling.scheduler import Batch, Scheduler


class PrefillFirst:
    def fill(self, scheduler: "Scheduler", batch: "Batch") -> None:
        line = [*scheduler.prompts_in_flight(), *scheduler.candidates(batch)]
        decodes = not line or not line[0].is_prompt
        if decodes:
            scheduler.decode_running(batch)
            line = scheduler.candidates(batch)  # decodes may have taken memory
        for prompt in line:
            # A sequence that was swapped out comes back as a decode, and not among prompts.
            tokens = scheduler.piece(batch, prompt, batch.room_for_prefill)
            if not tokens or prompt.is_prompt is decodes:
                break
            scheduler.compute(batch, prompt, tokens)
