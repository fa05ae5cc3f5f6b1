"""What a model is, in numbers and flags: one value that the forward pass, the loader and the cache share.

Owns the shape of every model of the family. Knows nothing of files, and holds no tensor.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

from poolwright_protocol.flops import ComputeShape
from poolwright_protocol.kv import KVShape


class Activation(StrEnum):
    """Of the gate of the MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What may differ between layers. A query sees the last `window` keys, itself included; None: all of them."""

    inverse_frequencies: tuple[float, ...]  # of the rotary embedding, scaling applied: head_size / 2 of them
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. `context_length` is what the model was made for; the engine may serve less.

    `attention_kinds` are the distinct ones, `kind_of_layer` an index into them for each layer. Logits and attention
    scores are bounded to ±cap by `cap · tanh(x / cap)` where a soft cap is given.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    context_length: int
    rms_norm_epsilon: float
    attention_kinds: tuple[AttentionKind, ...]
    kind_of_layer: tuple[int, ...]
    attention_scale: float  # of query · key
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head, before the rotary embedding
    post_norms: bool = False  # RMS norm also of what attention and MLP give, before it is added
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    @property
    def layers(self) -> int:
        return len(self.kind_of_layer)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer."""
        return tuple(self.attention_kinds[kind].window for kind in self.kind_of_layer)

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_size, dtype.itemsize)

    def compute_shape(self) -> ComputeShape:
        return ComputeShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            vocab_size=self.vocab_size,
            windows=self.windows,
        )
