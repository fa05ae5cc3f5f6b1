"""The forward pass of the Llama family over the operations of `poolwright_kernels`: what `model.llama` computes.

On CUDA the operations are Triton kernels, on a CPU their references. Residual sums are fused into the norms after them.
Owns the weights on the device. Knows nothing of files, sequences, sampling or scheduling.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from poolwright_engine.cuda.batch import BatchInputs
from poolwright_engine.cuda.plans import Plans
from poolwright_engine.model.linear import Linear
from poolwright_engine.model.llama import LayerWeights, Weights
from poolwright_engine.model.model_config import Activation, ModelConfig
from poolwright_kernels.gated_unit import gelu_mul, silu_mul
from poolwright_kernels.hybrid_attention import hybrid_attention
from poolwright_kernels.rms_norm import add_rms_norm, rms_norm
from poolwright_kernels.rotary_write import rotary_write


@dataclass(frozen=True, slots=True)
class _Product:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: _Product
    output: _Product
    mlp_norm: Tensor
    gate_up: _Product
    down: _Product
    query_norm: Tensor | None
    key_norm: Tensor | None
    after_attention_norm: Tensor | None
    after_mlp_norm: Tensor | None


class CudaModel:
    """Immutable. Weights must not be quantized or packed for a CPU; those on the device already are not copied."""

    def __init__(self, config: ModelConfig, weights: Weights, max_positions: int, device: torch.device) -> None:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        def maybe(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else moved(tensor)

        def product(linear: Linear) -> _Product:
            return _Product(moved(linear.weight), maybe(linear.bias))

        def layer(of: LayerWeights) -> _Layer:
            return _Layer(
                attention_norm=moved(of.attention_norm),
                qkv=product(of.qkv),
                output=product(of.output),
                mlp_norm=moved(of.mlp_norm),
                gate_up=product(of.gate_up),
                down=product(of.down),
                # The first query head's and the first key head's: all heads of a kind have the same.
                query_norm=None if of.qk_norm is None else moved(of.qk_norm[0].contiguous()),
                key_norm=None if of.qk_norm is None else moved(of.qk_norm[config.heads].contiguous()),
                after_attention_norm=maybe(of.after_attention_norm),
                after_mlp_norm=maybe(of.after_mlp_norm),
            )

        with torch.inference_mode():
            self.config = config
            self.dtype: torch.dtype = weights.embedding.dtype
            self.device = device
            self._embedding = moved(weights.embedding)
            tied = weights.lm_head.weight is weights.embedding
            self._head = _Product(self._embedding, maybe(weights.lm_head.bias)) if tied else product(weights.lm_head)
            self._layers = tuple(layer(of) for of in weights.layers)
            self._norm = moved(weights.norm)
            self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
            self._one = torch.ones(1, dtype=torch.float32, device=device)
            positions = torch.arange(max_positions, dtype=torch.float32, device=device)
            self._angles = tuple(
                _angles(positions, torch.tensor(kind.inverse_frequencies, device=device))
                for kind in config.attention_kinds
            )
        self._gated = gelu_mul if config.activation is Activation.GELU_TANH else silu_mul

    def hidden(self, inputs: BatchInputs, plans: Plans, cache: Tensor) -> Tensor:
        """Computes the tokens and writes their KV: what `logits` makes logits of, (tokens, hidden_size).

        cache: (2, layers, blocks, block_size, kv_heads, head_size); one of 8 bits holds numbers at a scale of 1"""
        config, epsilon = self.config, self.config.rms_norm_epsilon
        scale = self._one if cache.dtype.itemsize == 1 else None
        heads, kv_heads = config.heads, config.kv_heads
        residual = F.embedding(inputs.token_ids, self._embedding)
        if config.embedding_scale != 1:
            residual = residual * self._embedding_scale
        added: Tensor | None = None  # not yet in the residual
        for index, (layer, kind) in enumerate(zip(self._layers, config.kind_of_layer, strict=True)):
            window = config.attention_kinds[kind].window or 0
            qkv = layer.qkv(self._summed(added, residual, layer.attention_norm)).unflatten(1, (-1, config.head_size))
            query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
            keys, values = cache[0, index], cache[1, index]
            rotated = rotary_write(
                query, key, value, self._angles[kind], inputs.positions, inputs.kv_slots, keys, values,
                layer.query_norm, layer.key_norm, epsilon, key_scale=scale, value_scale=scale,
            )  # fmt: skip
            attended = hybrid_attention(
                rotated, keys, values, plans[window], config.attention_scale, window, config.attention_soft_cap or 0.0,
                key_scale=scale, value_scale=scale,
            )  # fmt: skip
            added = self._normed(layer.output(attended.flatten(1)), layer.after_attention_norm)
            inner = self._gated(layer.gate_up(self._summed(added, residual, layer.mlp_norm)))
            added = self._normed(layer.down(inner), layer.after_mlp_norm)
        return residual if added is None else residual.add_(added)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits of some tokens' hidden states, (tokens, vocab_size). The caller bounds how many at once."""
        logits = self._head(rms_norm(hidden, self._norm, self.config.rms_norm_epsilon)).float()
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _summed(self, added: Tensor | None, residual: Tensor, weight: Tensor) -> Tensor:
        """residual += added, and its norm."""
        if added is None:
            return rms_norm(residual, weight, self.config.rms_norm_epsilon)
        return add_rms_norm(added, residual, weight, self.config.rms_norm_epsilon)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self.config.rms_norm_epsilon)


def _angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    angles = positions[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
