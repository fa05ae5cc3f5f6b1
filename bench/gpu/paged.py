"""Batches over a paged cache for the sections that measure attention, and the call of each peer."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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
from poolwright_kernels.hybrid_attention import hybrid_attention

_VLLM_GRID, _VLLM_SEGMENTS = 128, 16
LLAMA_8B = AttentionShape(heads=32, kv_heads=8, head_size=128, page_size=16)


@dataclass
class PagedBatch:
    """lens: query and context length of each sequence."""

    shape: AttentionShape
    lens: Sequence[tuple[int, int]]
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    tables: Tensor  # (sequences, pages) int32

    @property
    def scale(self) -> float:
        return float(self.shape.head_size**-0.5)

    @property
    def is_decode(self) -> bool:
        return all(query == 1 for query, _ in self.lens)

    @property
    def device(self) -> torch.device:
        return self.query.device

    def cumulative(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=self.device)

    @property
    def starts(self) -> Tensor:
        return self.cumulative([query for query, _ in self.lens])

    @property
    def contexts(self) -> Tensor:
        return torch.tensor([context for _, context in self.lens], dtype=torch.int32, device=self.device)

    @property
    def pages(self) -> list[int]:
        return [-(-context // self.shape.page_size) for _, context in self.lens]

    def part(self, chosen: Sequence[int]) -> "PagedBatch":
        """Of some adjacent sequences, over the same cache."""
        first = sum(query for query, _ in self.lens[: chosen[0]])
        lens = [self.lens[i] for i in chosen]
        query = self.query[first : first + sum(length for length, _ in lens)]
        return PagedBatch(self.shape, lens, query, self.key_cache, self.value_cache, self.tables[list(chosen)])

    def needs(self) -> tuple[float, float]:
        """Bytes that must move, and operations."""
        shape, size = self.shape, self.key_cache.element_size()
        kv_tokens = sum(context for _, context in self.lens)
        moved = 2 * kv_tokens * shape.kv_heads * shape.head_size * size + 2 * self.query.numel() * 2
        pairs = sum(query * context - query * (query - 1) / 2 for query, context in self.lens)
        return float(moved), 4.0 * shape.heads * shape.head_size * pairs

    def plan(self, has_chunks: bool) -> AttentionPlan:
        """Planned as in serving: decodes on the device, where that has a kernel."""
        capability, processors = 90, 0
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            capability, processors = properties.major * 10 + properties.minor, properties.multi_processor_count
        sizes = (self.query.element_size(), capability, self.key_cache.element_size())
        tiles = tiles_for(self.shape.head_size, self.shape.group, has_chunks, *sizes)
        lanes = lanes_of(self.shape, processors * tiles.programs_per_multiprocessor or 8)
        capacity = PlanCapacity(len(self.lens), sum(query for query, _ in self.lens))
        buffers = PlanBuffers(PlanLayout(self.shape, tiles, capacity, lanes, has_chunks), self.device)
        plan = buffers.plan(self.starts, self.contexts, self.tables)
        if has_chunks:
            query_lens, context_lens = (np.array([pair[i] for pair in self.lens]) for i in (0, 1))
            buffers.upload(plan_on_host(buffers.layout, query_lens, context_lens))
        elif self.device.type == "cuda":
            plan_on_device(plan)
        return plan

    def ours(self) -> Callable[[], Tensor]:
        """Without planning: it is done once for all layers."""
        plan, output = self.plan(not self.is_decode), torch.empty_like(self.query)
        return lambda: hybrid_attention(self.query, self.key_cache, self.value_cache, plan, self.scale, output=output)


def paged_batch(
    shape: AttentionShape,
    lens: Sequence[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> PagedBatch:
    """Block 0 and every slot without a token hold NaN, in dtypes that have it."""
    pages = [-(-context // shape.page_size) for _, context in lens]
    ids = torch.randperm(sum(pages)).int() + 1
    size = (len(ids) + 1, shape.page_size, shape.kv_heads, shape.head_size)
    caches: list[Tensor] = [torch.randn(size, dtype=dtype, device=device).to(kv_dtype or dtype) for _ in range(2)]
    tables = torch.zeros(len(lens), max(pages), dtype=torch.int32)
    taken = 0
    for sequence, (count, (_, context)) in enumerate(zip(pages, lens, strict=True)):
        tables[sequence, :count] = ids[taken : taken + count]
        taken += count
        if context % shape.page_size and kv_dtype is None:
            for cache in caches:
                cache[int(ids[taken - 1]), context % shape.page_size :] = torch.nan
    if kv_dtype is None:
        for cache in caches:
            cache[0] = torch.nan
    tokens = sum(query for query, _ in lens)
    query = torch.randn(tokens, shape.heads, shape.head_size, dtype=dtype, device=device)
    return PagedBatch(shape, lens, query, caches[0], caches[1], tables.to(device))


def sdpa(batch: PagedBatch) -> Callable[[], Tensor]:
    """PyTorch's, over keys that lie together, not in pages; one call for all sequences of one shape."""
    calls: list[Callable[[], Tensor]] = []
    shape = batch.shape
    for lens in dict.fromkeys(batch.lens):
        length, context = lens
        count = sum(each == lens for each in batch.lens)
        query = torch.randn(count, shape.heads, length, shape.head_size, dtype=batch.query.dtype, device=batch.device)
        keys, values = (
            torch.randn(count, shape.kv_heads, context, shape.head_size, dtype=batch.query.dtype, device=batch.device)
            for _ in range(2)
        )
        if length == 1:
            # The heads of a group as queries: or PyTorch reads each key once for each of them.
            query = query.unflatten(1, (shape.kv_heads, shape.group)).squeeze(3)
            calls.append(lambda q=query, k=keys, v=values: F.scaled_dot_product_attention(q, k, v))  # type: ignore[misc]
        elif length == context:
            calls.append(
                lambda q=query, k=keys, v=values: F.scaled_dot_product_attention(  # type: ignore[misc]
                    q, k, v, is_causal=True, enable_gqa=True
                )
            )
        else:
            raise ValueError("a chunk after cached context is left to the other peers")
    return lambda: [call() for call in calls][-1]


def flashinfer(batch: PagedBatch) -> Callable[[], Tensor]:
    """Raises ImportError, and what it raises itself where it cannot run here."""
    library = importlib.import_module("flashinfer")
    shape = batch.shape
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=batch.device)
    pages = batch.pages
    indices = torch.cat([batch.tables[i, :count] for i, count in enumerate(pages)])
    last = torch.tensor(
        [context - (count - 1) * shape.page_size for (_, context), count in zip(batch.lens, pages, strict=True)],
        dtype=torch.int32,
        device=batch.device,
    )
    sizes = (shape.heads, shape.kv_heads, shape.head_size, shape.page_size)
    dtypes = {"q_data_type": batch.query.dtype, "kv_data_type": batch.key_cache.dtype}
    if batch.is_decode:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(batch.cumulative(pages), indices, last, *sizes, **dtypes)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(batch.starts, batch.cumulative(pages), indices, last, *sizes, causal=True, **dtypes)
    caches = (batch.key_cache, batch.value_cache)
    return lambda: wrapper.run(batch.query, caches)


def vllm(batch: PagedBatch) -> Callable[[], Tensor]:
    """Its unified Triton kernel, as its Triton backend of 0.32 calls it. Raises ImportError, and what it raises."""
    unified = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
    output = torch.empty_like(batch.query)
    options: dict[str, Any] = {
        "q": batch.query,
        "k": batch.key_cache,
        "v": batch.value_cache,
        "out": output,
        "cu_seqlens_q": batch.starts,
        "max_seqlen_q": max(query for query, _ in batch.lens),
        "seqused_k": batch.contexts,
        "max_seqlen_k": max(context for _, context in batch.lens),
        "softmax_scale": batch.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": batch.tables,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        # Of TritonAttentionMetadataBuilder: decodes of few sequences are split into segments of keys.
        "seq_threshold_3D": _VLLM_GRID // batch.shape.kv_heads,
        "num_par_softmax_segments": _VLLM_SEGMENTS,
    }
    rows = (_VLLM_GRID // batch.shape.kv_heads, batch.shape.heads, _VLLM_SEGMENTS)
    padded = 1 << (batch.shape.head_size - 1).bit_length()
    for name, size in (("output", (*rows, padded)), ("max", rows), ("expsum", rows)):
        options[f"softmax_segm_{name}"] = torch.empty(size, dtype=torch.float32, device=batch.device)

    def call() -> Tensor:
        unified.unified_attention(**options)
        return output

    return call


PEERS = {"sdpa": sdpa, "flashinfer": flashinfer, "vllm": vllm}
