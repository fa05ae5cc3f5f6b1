"""A model from a GGUF file: llama.cpp's names for its numbers and tensors, turned into this engine's.

What llama.cpp changes when it converts is undone here: query and key rows of the `llama` architecture are interleaved,
and Llama 3's rotary scaling comes as a tensor of divisors. Norm weights of Gemma have their 1 added already.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poolwright_engine.checkpoint.architectures import (
    Family,
    attention_of_layers,
    checked,
    family_of_gguf,
    layer_count,
    local_layers,
)
from poolwright_engine.checkpoint.checkpoint import Checkpoint, LoadError, Settings, Shape, TensorSource
from poolwright_engine.checkpoint.gguf_file import GgufFile
from poolwright_engine.model.model_config import AttentionKind, ModelConfig
from poolwright_engine.model.rope import RopeScaling, inverse_frequencies, parse_scaling
from poolwright_engine.text.tokenizer import Tokenizer

_DIVISORS = "rope_freqs.weight"
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Of the models whose scores are not scaled by their head size, which GGUF does not say: the 27B ones, known by their
# number of layers (llama.cpp, src/llama-model.cpp).
_SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}


def read_gguf(path: Path) -> Checkpoint:
    """Raises LoadError, TokenizerUnsupported, RopeScalingUnsupported."""
    file = GgufFile(path)
    general = Settings(path, "the metadata", file.metadata)
    kind = general.text("general.type", "model")
    if kind != "model":
        raise LoadError(f"{path}: it holds no model, but a thing of type {kind} (a LoRA adapter or a projector)")
    if general.integer("split.count", 1) > 1:
        raise LoadError(f"{path}: one of {general.integer('split.count')} parts of a model is not supported alone")
    architecture = general.text("general.architecture")
    family = family_of_gguf(path, architecture)
    if general.integer(f"{architecture}.expert_count", 0):
        raise LoadError(f"{path}: architecture {architecture} with experts (mixture of experts) is not supported")
    config = checked(path, _config(file, family))
    tokenizer = Tokenizer.from_gguf(file.metadata)
    return Checkpoint(config, tokenizer, _GgufTensors(file, family, config))


def _config(file: GgufFile, family: Family) -> ModelConfig:
    path, name, tensors = file.path, family.gguf_name, file.tensors
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    values = Settings(path, "the metadata", {prefix + key: value for key, value in own.items()})

    def integer(key: str, default: int | None = None) -> int:
        return values.integer(prefix + key, default)

    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    head_size = integer("attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if integer(key, head_size) != head_size:
            raise LoadError(f"{path}: {prefix}{key} is {integer(key)}, unlike the head size {head_size}")
    layers, context_length = layer_count(path, integer("block_count")), integer("context_length")
    scaled_by = hidden // max(heads, 1) if _SCALED_BY_HIDDEN_SIZE.get(name) == layers else head_size
    kinds, kind_of_layer = _attention(file, family, own, layers, head_size, context_length)
    embedding = tensors.get("token_embd.weight")
    return ModelConfig(
        architecture=name,
        vocab_size=embedding.shape[0] if embedding else 0,
        hidden_size=hidden,
        intermediate_size=integer("feed_forward_length"),
        heads=heads,
        kv_heads=integer("attention.head_count_kv", heads),
        head_size=head_size,
        context_length=context_length,
        rms_norm_epsilon=values.number(prefix + "attention.layer_norm_rms_epsilon"),
        attention_kinds=kinds,
        kind_of_layer=kind_of_layer,
        attention_scale=max(scaled_by, 1) ** -0.5,
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=family.qk_norm,
        post_norms=family.is_gemma,
        activation=family.activation,
        embedding_scale=hidden**0.5 if family.is_gemma else 1.0,
        attention_soft_cap=values.optional(prefix + "attn_logit_softcapping"),
        logit_soft_cap=values.optional(prefix + "final_logit_softcapping"),
    )


def _attention(
    file: GgufFile, family: Family, own: Mapping[str, Any], layers: int, head_size: int, context_length: int
) -> tuple[tuple[AttentionKind, ...], tuple[int, ...]]:
    values = Settings(file.path, f"the metadata of {family.gguf_name}", own)
    window = values.integer("attention.sliding_window", 0) or None
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        is_local = [bool(of_layer) for of_layer in pattern]
        if len(is_local) != layers:
            raise LoadError(f"{file.path}: the window pattern has {len(is_local)} entries for {layers} layers")
    else:
        is_local = local_layers(family, layers, window, pattern if isinstance(pattern, int) else None)
    scaling: RopeScaling | None = None
    scaling_type = values.text("rope.scaling.type", "none")
    if scaling_type != "none":
        scaling = parse_scaling({"rope_type": scaling_type, "factor": values.number("rope.scaling.factor", 1.0)})
    theta = values.number("rope.freq_base", 10_000.0)
    frequencies = inverse_frequencies(theta, head_size, scaling)
    if _DIVISORS in file.tensors:  # Llama 3 scaling, which converters store as one divisor per frequency
        divisors = torch.from_numpy(file.tensors[_DIVISORS].array())
        if divisors.shape != frequencies.shape:
            raise LoadError(f"{file.path}: tensor {_DIVISORS} has shape {tuple(divisors.shape)}")
        frequencies = frequencies / divisors
    local = frequencies
    if family.local_rope_theta is not None:
        local = inverse_frequencies(values.number("rope.freq_base_swa", family.local_rope_theta), head_size)
    return attention_of_layers(file.path, is_local, frequencies, local, window, context_length)


class _GgufTensors(TensorSource):
    def __init__(self, file: GgufFile, family: Family, config: ModelConfig) -> None:
        sizes = {name: tensor.data.nbytes for name, tensor in file.tensors.items() if name != _DIVISORS}
        super().__init__(file.path, sizes)
        self._tensors = file.tensors
        self._layer_names = _GEMMA_LAYER_NAMES if family.is_gemma else _LAYER_NAMES
        self._interleaved = {"attn_q": config.heads, "attn_k": config.kv_heads} if family.gguf_name == "llama" else {}

    def _stored_name(self, name: str) -> str:
        if name in _NAMES:
            return _NAMES[name]
        _, _, index, rest = name.split(".", 3)
        part, _, kind = rest.rpartition(".")
        return f"blk.{index}.{self._layer_names[part]}.{kind}"

    def _shape(self, stored: str) -> Shape | None:
        tensor = self._tensors.get(stored)
        if tensor is None:
            return None
        if not tensor.is_readable:
            raise LoadError(f"{self._path}: tensor {stored} has type {tensor.kind.name}, unsupported")
        return tensor.shape

    def _copy(self, stored: str, target: Tensor) -> None:
        tensor = self._tensors[stored]
        heads = self._interleaved.get(stored.split(".")[-2])
        if heads is not None:
            target.copy_(_parted(torch.from_numpy(tensor.array()), heads))
            return
        rows = target.view(-1, target.shape[-1])
        for first, values in tensor.parts():
            rows[first : first + len(values)] = torch.from_numpy(values)


def _parted(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each rotary head; Hugging Face, and this model, keep them apart."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
