"""A device that says what it is told: token k of every output is the k-th of a given list, then the end."""

import threading
from collections.abc import Sequence
from typing import NoReturn

from poolwright_engine.scheduling.runner import Step, StepResult
from poolwright_engine.scheduling.sequence import TokenLogprobs
from support.scripted_runner import SHAPE


class SayingRunner:
    """Prompts must be `prompt_tokens` long: only by that can it tell where an output begins. While `gate` is closed no
    step ends. `fail_at_token`: it breaks when asked for this one."""

    def __init__(self, vocab_size: int, end: int, num_blocks: int = 65, block_size: int = 16) -> None:
        self.kv_shape = SHAPE
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.num_host_blocks = 0
        self.block_size = block_size
        self.end = end
        self.prompt_tokens = 1
        self.said: Sequence[int] = ()
        self.fail_at_token: int | None = None
        self.gate = threading.Event()
        self.gate.set()

    def submit(self, step: Step) -> "_Ready":
        return _Ready(self, step)

    def result(self, step: Step) -> StepResult:
        if not self.gate.wait(timeout=30):
            raise RuntimeError("the gate stayed closed")
        tokens = tuple(
            (self._token(context),) if row.samples else ()
            for context, row in zip(step.contexts, step.rows, strict=True)
        )
        logprobs = tuple(tuple(TokenLogprobs(token, -0.5, ((token, -0.5),), 1) for token in made) for made in tokens)
        return StepResult(step.number, tokens, logprobs, 0.0)

    def _token(self, context: int) -> int:
        index = context - self.prompt_tokens
        if index == self.fail_at_token:
            raise RuntimeError("the device broke")
        return self.said[index] if 0 <= index < len(self.said) else self.end

    def read_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int]) -> NoReturn:
        raise RuntimeError("it has no memory")

    def write_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int], data: bytes) -> NoReturn:
        raise RuntimeError("it has no memory")

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> NoReturn:
        raise RuntimeError("it has no memory")

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> NoReturn:
        raise RuntimeError("it has no memory")

    def close(self) -> None:
        self.gate.set()


class _Ready:
    def __init__(self, runner: SayingRunner, step: Step) -> None:
        self._runner = runner
        self._step = step

    def result(self) -> StepResult:
        return self._runner.result(self._step)
