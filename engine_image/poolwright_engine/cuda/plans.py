"""The work lists of attention for one model on one device: of mixed steps by the host, of decodes by the device.

Models with a window in some layers get one list for each window, so that keys outside of it cost nothing. Buffers keep
their place, and what a launch is given does not depend on the step: a CUDA graph holds attention like all else.
"""

from collections.abc import Mapping

import numpy as np
import torch

from poolwright_engine.cuda.batch import BatchInputs
from poolwright_engine.model.model_config import ModelConfig
from poolwright_engine.scheduling.runner import Step
from poolwright_kernels.attention_plan import (
    AttentionPlan,
    AttentionShape,
    PlanBuffers,
    PlanCapacity,
    PlanLayout,
    lanes_of,
    plan_on_host,
)
from poolwright_kernels.attention_tiles import tiles_for
from poolwright_kernels.decode_plan import plan_on_device

Plans = Mapping[int, AttentionPlan]
"""By window; 0: none."""

_CPU_PROGRAMS = 8


class AttentionPlans:
    def __init__(
        self,
        config: ModelConfig,
        block_size: int,
        max_num_seqs: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        decodes_planned: bool,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """decodes_planned: false where attention does not read the list, as the reference does not. cache_dtype: None:
        as `dtype`, that of the queries."""
        shape = AttentionShape(config.heads, config.kv_heads, config.head_size, block_size)
        capability, processors = 90, 0
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            capability, processors = properties.major * 10 + properties.minor, properties.multi_processor_count
        windows = sorted({window or 0 for window in config.windows})

        def buffers(has_chunks: bool, tokens: int) -> dict[int, PlanBuffers]:
            sizes = (dtype.itemsize, capability, (cache_dtype or dtype).itemsize)
            tiles = tiles_for(config.head_size, shape.group, has_chunks, *sizes)
            lanes = lanes_of(shape, processors * tiles.programs_per_multiprocessor or _CPU_PROGRAMS)
            layout = PlanLayout(shape, tiles, PlanCapacity(max_num_seqs, tokens), lanes, has_chunks)
            return {window: PlanBuffers(layout, device) for window in windows}

        self._mixed = buffers(True, max_tokens)
        self._decode = buffers(False, max_num_seqs)
        self._pinned = device.type == "cuda"
        self._decodes_planned = decodes_planned

    def send(self, step: Step) -> None:
        """Plans a mixed step."""
        query_lens = np.array([row.length for row in step.rows], dtype=np.int32)
        context_lens = np.array(step.starts, dtype=np.int32) + query_lens
        for window, buffers in self._mixed.items():
            host = torch.empty(buffers.layout.offsets[-1], dtype=torch.int32, pin_memory=self._pinned)
            used = plan_on_host(buffers.layout, query_lens, context_lens, window, host.numpy()).used
            buffers.packed[:used].copy_(host[:used], non_blocking=True)

    def mixed(self, inputs: BatchInputs) -> Plans:
        """As sent last."""
        return self._of(self._mixed, inputs)

    def decode(self, inputs: BatchInputs) -> Plans:
        plans = self._of(self._decode, inputs)
        if self._decodes_planned:
            for plan in plans.values():
                plan_on_device(plan)
        return plans

    def _of(self, buffers: Mapping[int, PlanBuffers], inputs: BatchInputs) -> Plans:
        return {
            window: of_window.plan(inputs.query_starts, inputs.context_lens, inputs.block_tables, window)
            for window, of_window in buffers.items()
        }
