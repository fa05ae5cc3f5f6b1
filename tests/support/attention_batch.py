"""A random batch over a paged cache, poisoned wherever no token lies, and its attention in float64 from dense keys."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poolwright_kernels.attention_plan import (
    AttentionPlan,
    AttentionShape,
    PlanBuffers,
    PlanCapacity,
    PlanLayout,
    plan_on_host,
)
from poolwright_kernels.attention_tiles import Tiles

SMALL_TILES = Tiles(32, 32, 3, 16, 32, 5, warps=4, programs_per_multiprocessor=1)  # the interpreter pays by the tile


@dataclass(frozen=True)
class AttentionBatch:
    shape: AttentionShape
    query_lens: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    query: Tensor
    keys: list[Tensor]  # of each sequence, (context, kv_heads, head_size)
    values: list[Tensor]
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor

    @property
    def scale(self) -> float:
        return float(self.shape.head_size**-0.5)

    def layout(
        self, lanes: int, tiles: Tiles = SMALL_TILES, has_chunks: bool = True, capacity: PlanCapacity | None = None
    ) -> PlanLayout:
        """As large as this batch, where no capacity is given."""
        capacity = capacity or PlanCapacity(len(self.query_lens), int(self.query_lens.sum()))
        return PlanLayout(self.shape, tiles, capacity, lanes, has_chunks)

    def buffers(self, layout: PlanLayout, window: int = 0) -> tuple[PlanBuffers, AttentionPlan]:
        """Both the plan and the workspace hold rubbish."""
        buffers = PlanBuffers(layout, "cpu")
        buffers.packed.fill_(10**9)
        buffers.partial_output.fill_(torch.nan)
        buffers.partial_lse.fill_(torch.nan)
        starts = torch.from_numpy(np.concatenate(([0], self.query_lens.cumsum())).astype(np.int32))
        return buffers, buffers.plan(starts, torch.from_numpy(self.context_lens), self.block_tables, window)

    def planned(self, layout: PlanLayout, window: int = 0) -> AttentionPlan:
        buffers, plan = self.buffers(layout, window)
        buffers.upload(plan_on_host(layout, self.query_lens, self.context_lens, window))
        return plan

    def truth(self, window: int = 0, soft_cap: float = 0.0) -> Tensor:
        """(tokens, heads, head_size) float64, token by token."""
        rows = []
        first = 0
        for query_len, context, keys, values in zip(
            self.query_lens, self.context_lens, self.keys, self.values, strict=True
        ):
            for token in range(query_len):
                position = int(context - query_len + token)
                seen = slice(max(0, position - window + 1) if window else 0, position + 1)
                q = self.query[first + token].double()
                k = keys[seen].double().repeat_interleave(self.shape.group, 1)
                v = values[seen].double().repeat_interleave(self.shape.group, 1)
                scores = (q * k).sum(-1) * self.scale
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                rows.append((scores.softmax(0)[..., None] * v).sum(0))
            first += int(query_len)
        return torch.stack(rows)


def attention_batch(
    lens: Sequence[tuple[int, int]],
    group: int = 2,
    kv_heads: int = 2,
    head_size: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> AttentionBatch:
    """lens: query and context length of each sequence. Block 0 and every slot without a token hold NaN; block tables
    are wider than any sequence, and what they hold past its end is out of bounds."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    query_lens, context_lens = (np.array([pair[i] for pair in lens], np.int32) for i in (0, 1))
    pages = -(-context_lens // page_size)
    ids = torch.randperm(int(pages.sum()), generator=generator) + 1
    cache = torch.full((2, len(ids) + 1, page_size, kv_heads, head_size), torch.nan, dtype=dtype)
    tables = torch.full((len(lens), int(pages.max()) + 3), 2**30, dtype=torch.int32)[:, :-1]
    keys, values = [], []
    taken = 0
    for sequence, count in enumerate(pages):
        mine = ids[taken : taken + count]
        taken += count
        tables[sequence, :count] = mine.int()
        context = int(context_lens[sequence])
        for kind, dense in ((0, keys), (1, values)):
            dense.append(noise(context, kv_heads, head_size))
            filled = torch.full((int(count) * page_size, kv_heads, head_size), torch.nan, dtype=dtype)
            filled[:context] = dense[-1]
            cache[kind, mine] = filled.unflatten(0, (int(count), page_size))
    heads = group * kv_heads
    # Queries as they come out of one product: rows with a gap between them.
    query = noise(int(query_lens.sum()), heads + 2, head_size)[:, :heads]
    shape = AttentionShape(heads, kv_heads, head_size, page_size)
    return AttentionBatch(shape, query_lens, context_lens, query, keys, values, cache[0], cache[1], tables)
