"""The Llama family over a paged KV cache, in PyTorch: weights, cache and one forward pass of a mixed batch.

Owns the arithmetic; what differs between models of the family is a value of `ModelConfig` or a weight that is there or
not. Knows nothing of files, sequences, sampling or scheduling.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from poolwright_engine.model.cpu_attention import AttentionPlan, AttentionRow, paged_attention, plan_attention
from poolwright_engine.model.linear import Linear
from poolwright_engine.model.model_config import Activation, ModelConfig
from poolwright_engine.model.vml import settle
from poolwright_kernels.kv_write import kv_write
from poolwright_protocol.kv import KVShape

settle(torch.cos, torch.sin, torch.exp, torch.sqrt, torch.rsqrt, torch.tanh)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """`qkv` is query, key and value rows in that order; `gate_up` gate then up: one product each instead of five."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    qk_norm: Tensor | None = None  # (heads + kv_heads, head_size): of the query heads, then of the key heads
    after_attention_norm: Tensor | None = None
    after_mlp_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """`lm_head` is the very tensor of `embedding` when embeddings are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear

    def products(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        yield self.lm_head


class KVCache:
    """Keys and values of all layers: (2, layers, blocks, block_size, kv_heads, head_size), zero at first.

    The pages come from the operating system when they are first written, so a large cache costs what is used of it.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        if num_blocks < 2:
            raise ValueError(f"a KV cache of {num_blocks} blocks has none beside the null block")
        sizes = (2, shape.layers, num_blocks, block_size, shape.kv_heads, shape.head_size)
        words = np.zeros(sizes, dtype=np.int32 if dtype.itemsize == 4 else np.int16)
        self.data: Tensor = torch.from_numpy(words).view(dtype)
        self.block_size = block_size


class LlamaModel:
    """Immutable; any number of caches may be used with it, one forward pass at a time per cache."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.dtype: torch.dtype = weights.embedding.dtype
        self._epsilon = torch.tensor(config.rms_norm_epsilon)
        self._windows = tuple({kind.window: None for kind in config.attention_kinds})
        self._frequencies = [torch.tensor(kind.inverse_frequencies) for kind in config.attention_kinds]

    def forward(
        self, token_ids: Tensor, rows: Sequence[AttentionRow], cache: KVCache, logits_at: Sequence[int]
    ) -> Tensor:
        """Computes the rows' tokens, writes their KV, and returns float32 logits (len(logits_at), vocab_size).

        token_ids: (tokens,) int64, the rows' tokens in row order. logits_at: indices into those tokens.
        """
        return self.logits(self.hidden(token_ids, rows, cache)[torch.tensor(logits_at, dtype=torch.int64)])

    def hidden(self, token_ids: Tensor, rows: Sequence[AttentionRow], cache: KVCache) -> Tensor:
        """Computes the rows' tokens and writes their KV: what `logits` makes logits of, (tokens, hidden_size)."""
        with torch.inference_mode():
            return self._hidden(token_ids, rows, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits of some tokens' hidden states, (tokens, vocab_size). The caller bounds how many at once."""
        with torch.inference_mode():
            return self._capped(self.weights.lm_head(self._norm(hidden, self.weights.norm)).float())

    def _hidden(self, token_ids: Tensor, rows: Sequence[AttentionRow], cache: KVCache) -> Tensor:
        config, weights = self.config, self.weights
        plan = self._plan(rows, cache.block_size)
        rotations = self._rotations(plan.positions)
        rotated_heads = config.heads + config.kv_heads
        hidden = F.embedding(token_ids, weights.embedding)
        if config.embedding_scale != 1:
            hidden = hidden * torch.tensor(config.embedding_scale, dtype=self.dtype)
        for index, (layer, kind) in enumerate(zip(weights.layers, config.kind_of_layer, strict=True)):
            keys, values = cache.data[0, index], cache.data[1, index]
            # A product's columns may be what is contiguous, and PyTorch's fused attention reads heads in one piece.
            qkv = layer.qkv(self._norm(hidden, layer.attention_norm)).contiguous().unflatten(1, (-1, config.head_size))
            rotated = qkv[:, :rotated_heads]
            if layer.qk_norm is not None:
                rotated = F.rms_norm(rotated, (config.head_size,), None, config.rms_norm_epsilon) * layer.qk_norm
            rotated = _rotate(rotated, *rotations[kind])
            kv_write(rotated[:, config.heads :], qkv[:, rotated_heads:], keys, values, plan.write_slots)
            attended = paged_attention(
                rotated[:, : config.heads],
                keys,
                values,
                plan,
                config.attention_scale,
                config.attention_kinds[kind].window,
                config.attention_soft_cap,
            )
            hidden.add_(self._norm_after(layer.output(attended.flatten(1)), layer.after_attention_norm))
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=1)
            hidden.add_(self._norm_after(layer.down(self._activated(gate).mul_(up)), layer.after_mlp_norm))
        return hidden

    def _plan(self, rows: Sequence[AttentionRow], block_size: int) -> AttentionPlan:
        return plan_attention(rows, block_size, self.dtype, self._windows)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in fewer passes than PyTorch's own takes on a CPU; sums and scales in float32."""
        wide = x.float()  # x itself in float32
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        scale = torch.addcmul(self._epsilon, length, length, value=1 / x.shape[1]).rsqrt_()
        return (wide * scale).to(self.dtype).mul_(weight)

    def _norm_after(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._norm(x, weight)

    def _activated(self, gate: Tensor) -> Tensor:
        if self.config.activation is Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh")
        return F.silu(gate)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _rotations(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each kind of attention, cosines and signed sines of those positions, for both halves of a head:
        (tokens, 1, head_size), in the model's dtype."""
        rotations = []
        for frequencies in self._frequencies:
            angles = positions[:, None, None].float() * frequencies
            cos, sin = angles.cos(), angles.sin()
            rotations.append((torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)))
        return rotations


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves paired as Hugging Face pairs them: element i with i + head_size / 2."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
