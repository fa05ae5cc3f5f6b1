"""The Llama family over a paged KV cache, in PyTorch: weights, cache and one forward pass of a mixed batch.

Owns the arithmetic. Knows nothing of files, sequences, sampling or scheduling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from poolwright_engine.vml import settle
from poolwright_kernels.kv_write import kv_write
from poolwright_kernels.paged_attention import AttentionRow, paged_attention, plan_attention
from poolwright_protocol.kv import KVShape

settle(torch.cos, torch.sin, torch.exp, torch.sqrt, torch.rsqrt)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama. `context_length` is what the model was made for; the engine may serve less."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    context_length: int
    rms_norm_epsilon: float
    inverse_frequencies: tuple[float, ...]  # of the rotary embedding, scaling applied: head_size / 2 of them
    tied_embeddings: bool

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_size, dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Linear:
    """(out, in) weight and an optional bias."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """`qkv` is query, key and value rows in that order; `gate_up` gate then up: one product each instead of five."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """`lm_head` is the very tensor of `embedding` when embeddings are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear


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
        self._inverse_frequencies = torch.tensor(config.inverse_frequencies, dtype=torch.float32)

    def forward(
        self, token_ids: Tensor, rows: Sequence[AttentionRow], cache: KVCache, logits_at: Sequence[int]
    ) -> Tensor:
        """Computes the rows' tokens, writes their KV, and returns float32 logits (len(logits_at), vocab_size).

        token_ids: (tokens,) int64, the rows' tokens in row order. logits_at: indices into those tokens.
        """
        with torch.inference_mode():
            hidden = self._hidden(token_ids, rows, cache)
            if len(logits_at) == 0:
                return torch.empty(0, self.config.vocab_size)
            picked = self._norm(hidden[torch.tensor(logits_at)], self.weights.norm)
            return self.weights.lm_head(picked).float()

    def _hidden(self, token_ids: Tensor, rows: Sequence[AttentionRow], cache: KVCache) -> Tensor:
        config, weights = self.config, self.weights
        plan = plan_attention(rows, cache.block_size, self.dtype)
        cos, sin = self._rotation(rows)
        scale = config.head_size**-0.5
        rotated_heads = config.heads + config.kv_heads
        hidden = F.embedding(token_ids, weights.embedding)
        for index, layer in enumerate(weights.layers):
            keys, values = cache.data[0, index], cache.data[1, index]
            qkv = layer.qkv(self._norm(hidden, layer.attention_norm)).unflatten(1, (-1, config.head_size))
            rotated = _rotate(qkv[:, :rotated_heads], cos, sin)
            kv_write(rotated[:, config.heads :], qkv[:, rotated_heads:], keys, values, plan.write_slots)
            attended = paged_attention(rotated[:, : config.heads], keys, values, plan, scale)
            hidden = hidden + layer.output(attended.flatten(1))
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return hidden

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_epsilon)

    def _rotation(self, rows: Sequence[AttentionRow]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rows' positions, (tokens, 1, head_size / 2), in the model's dtype."""
        positions = torch.cat([torch.arange(row.start, row.start + row.length) for row in rows])
        angles = positions[:, None, None].float() * self._inverse_frequencies
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves paired as Hugging Face pairs them: element i with i + head_size / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
