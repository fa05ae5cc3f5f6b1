"""`Strategy`: what the scheduler asks of a way to form steps, and which one a configuration names."""

from typing import TYPE_CHECKING, Protocol

from poolwright_engine.scheduling.batching.orca import Orca
from poolwright_engine.scheduling.batching.prefill_first import PrefillFirst
from poolwright_engine.scheduling.batching.sarathi import Sarathi
from poolwright_engine.scheduling.batching.static import Static
from poolwright_engine.scheduling.batching.vllm import Vllm
from poolwright_engine.scheduling.scheduler_config import Batching, SchedulerConfig

if TYPE_CHECKING:
    from poolwright_engine.scheduling.scheduler import Batch, Scheduler


class Strategy(Protocol):
    def fill(self, scheduler: "Scheduler", batch: "Batch") -> None: ...


def strategy(config: SchedulerConfig) -> Strategy:
    match config.batching:
        case Batching.SARATHI:
            # Whole prompts mixed with decodes is what is left of it without chunks.
            return Sarathi() if config.chunked_prefill else Orca()
        case Batching.VLLM:
            return Vllm()
        case Batching.ORCA:
            return Orca()
        case Batching.PREFILL_FIRST:
            return PrefillFirst()
        case Batching.STATIC:
            return Static(config.static_batch_size or config.max_num_seqs, config.static_window_seconds)
