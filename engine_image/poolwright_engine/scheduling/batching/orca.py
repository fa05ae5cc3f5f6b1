"""As Orca (OSDI 2022): scheduling by iteration, whole prompts mixed with decodes.

Decodes are in every step; a prompt joins once it fits whole into what they leave, in line. A step grows with the
prompts in it, and so do the gaps between the tokens of those who decode.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poolwright_engine.scheduling.scheduler import Batch, Scheduler


class Orca:
    def fill(self, scheduler: "Scheduler", batch: "Batch") -> None:
        scheduler.decode_running(batch)
        for prompt in (*scheduler.prompts_in_flight(), *scheduler.candidates(batch)):
            tokens = scheduler.piece(batch, prompt, batch.room_for_prefill)
            if not tokens:
                break
            scheduler.compute(batch, prompt, tokens)
