"""Any runner, with a line in a file for each step that was read: what it held and how long the device worked on it."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from bench.policy_agreement.step_work import work_of

from poolwright_engine.scheduling.runner import Handle, ModelRunner, Step, StepResult


class WatchedRunner:
    """Fulfils `ModelRunner`. A line: [when it was read (monotonic), device seconds, chunks, decodes, context]."""

    def __init__(self, inner: ModelRunner, file: Path) -> None:
        self.kv_shape = inner.kv_shape
        self.vocab_size = inner.vocab_size
        self.num_blocks = inner.num_blocks
        self.num_host_blocks = inner.num_host_blocks
        self.block_size = inner.block_size
        self._inner = inner
        self._lines = file.open("a", buffering=1, encoding="utf-8")

    def submit(self, step: Step) -> "_Watched":
        return _Watched(self, step, self._inner.submit(step))

    def read_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int]) -> Handle[bytes]:
        return self._inner.read_blocks(layers, kv_heads, block_ids)

    def write_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int], data: bytes) -> Handle[None]:
        return self._inner.write_blocks(layers, kv_heads, block_ids, data)

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> Handle[None]:
        return self._inner.swap_out(block_ids, host_block_ids)

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> Handle[None]:
        return self._inner.swap_in(host_block_ids, block_ids)

    def close(self) -> None:
        self._inner.close()
        self._lines.close()

    def note(self, step: Step, seconds: float) -> None:
        work = work_of(step)
        row = [time.monotonic(), seconds, work.chunks, work.decodes, work.context_tokens]
        self._lines.write(json.dumps(row) + "\n")


class _Watched:
    def __init__(self, runner: WatchedRunner, step: Step, inner: Handle[StepResult]) -> None:
        self._runner = runner
        self._step = step
        self._inner = inner

    def result(self) -> StepResult:
        result = self._inner.result()
        self._runner.note(self._step, result.busy_seconds)
        return result
