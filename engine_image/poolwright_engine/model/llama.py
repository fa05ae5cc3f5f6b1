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

from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_engine.model.linear import Linear
from poolwright_engine.model.model_config import ModelConfig
from poolwright_engine.model.operations import Operations, TorchOperations
from poolwright_protocol.kv import KVShape


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

    def __init__(self, config: ModelConfig, weights: Weights, operations: Operations | None = None) -> None:
        self.config = config
        self.weights = weights
        self.dtype: torch.dtype = weights.embedding.dtype
        self._operations = operations or TorchOperations(config, self.dtype)

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
            normed = self._operations.add_norm(hidden, None, self.weights.norm)
            return self._capped(self.weights.lm_head(normed).float())

    def _hidden(self, token_ids: Tensor, rows: Sequence[AttentionRow], cache: KVCache) -> Tensor:
        config, weights = self.config, self.weights
        operations = self._operations
        step = operations.step(rows, cache.block_size)
        hidden = F.embedding(token_ids, weights.embedding)
        if config.embedding_scale != 1:
            hidden = hidden * torch.tensor(config.embedding_scale, dtype=self.dtype)
        added = None
        for index, (layer, kind) in enumerate(zip(weights.layers, config.kind_of_layer, strict=True)):
            keys, values = cache.data[0, index], cache.data[1, index]
            normed = operations.add_norm(hidden, added, layer.attention_norm)
            added = layer.output(step.attend(layer.qkv(normed), layer.qk_norm, kind, keys, values))
            if layer.after_attention_norm is not None:
                added = operations.add_norm(added.contiguous(), None, layer.after_attention_norm)
            normed = operations.add_norm(hidden, added, layer.mlp_norm)
            added = layer.down(operations.gated_unit(layer.gate_up(normed)))
            if layer.after_mlp_norm is not None:
                added = operations.add_norm(added.contiguous(), None, layer.after_mlp_norm)
        if added is not None:
            operations.add(hidden, added)
        return hidden

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)
