"""How steps are formed: one small strategy for each system, all over the same scheduler.

A strategy says in which order sequences get tokens of a step, and how many; the scheduler does the rest (memory,
seats, prefix hits, preemption, rows). It never changes a sequence itself.
"""

from typing import TYPE_CHECKING, Protocol

from poolwright_engine.scheduler_config import Batching, SchedulerConfig

if TYPE_CHECKING:
    from poolwright_engine.scheduler import Batch, Scheduler


class Strategy(Protocol):
    def fill(self, scheduler: "Scheduler", batch: "Batch") -> None: ...


def strategy(config: SchedulerConfig) -> Strategy:
    from poolwright_engine.batching.orca import Orca
    from poolwright_engine.batching.prefill_first import PrefillFirst
    from poolwright_engine.batching.sarathi import Sarathi
    from poolwright_engine.batching.static import Static
    from poolwright_engine.batching.vllm import Vllm

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
