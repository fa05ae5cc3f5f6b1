"""A model from a Hugging Face folder: config.json, safetensors in one file or in shards, tokenizer.json.

Owns the keys of config.json, as transformers reads them. It never unpickles and never runs code that lies beside a
model.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from poolwright_engine.checkpoint.architectures import (
    Family,
    attention_of_layers,
    checked,
    family_of_folder,
    layer_count,
    local_layers,
)
from poolwright_engine.checkpoint.checkpoint import Checkpoint, LoadError, Settings, Shape, TensorSource, one_line
from poolwright_engine.model.model_config import Activation, AttentionKind, ModelConfig
from poolwright_engine.model.rope import inverse_frequencies, parse_scaling
from poolwright_engine.text.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def read_folder(path: Path, stack: ExitStack) -> Checkpoint:
    """The files stay open as long as the stack. Raises LoadError, TokenizerUnsupported, RopeScalingUnsupported."""
    raw = read_json(path / "config.json")
    names = raw.get("architectures") or [raw.get("model_type", "unnamed")]
    family = family_of_folder(path, str(names[0] if isinstance(names, list) else names))
    config = checked(path, _config(path, family, dict(family.defaults) | raw))
    tokenizer = Tokenizer.from_folder(path, config.vocab_size)
    tensors = _SafeTensors(path, stack)
    return Checkpoint(config, tokenizer, tensors, norm_offset=1.0 if family.is_gemma else 0.0)


def _config(path: Path, family: Family, raw: Mapping[str, Any]) -> ModelConfig:
    values = Settings(path, "config.json", raw)
    if quantization := values.mapping("quantization_config"):
        method = quantization.get("quant_method", "unnamed")
        raise LoadError(f"{path}: {method} quantization is not supported in a safetensors folder")
    activation = family.activation
    if name := values.text("hidden_activation", values.text("hidden_act", "")):
        if name not in _ACTIVATIONS:
            raise LoadError(f"{path}: activation {name} is not supported (supported: {', '.join(_ACTIVATIONS)})")
        activation = _ACTIVATIONS[name]
    if values.flag("use_bidirectional_attention"):
        raise LoadError(f"{path}: bidirectional attention is not supported")
    hidden, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    head_size = values.integer("head_dim", hidden // max(heads, 1))
    layers = layer_count(path, values.integer("num_hidden_layers"))
    context_length = values.integer("max_position_embeddings")
    kinds, kind_of_layer = _attention(path, family, raw, layers, head_size, context_length)
    scaled_by = values.number("query_pre_attn_scalar", head_size) if family.is_gemma else head_size
    if scaled_by <= 0:
        raise LoadError(f"{path}: query_pre_attn_scalar is {scaled_by}")
    attention_bias = values.flag("attention_bias") and not family.qkv_bias
    return ModelConfig(
        architecture=family.folder_name,
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=values.integer("intermediate_size"),
        heads=heads,
        kv_heads=values.integer("num_key_value_heads", heads),
        head_size=head_size,
        context_length=context_length,
        rms_norm_epsilon=values.number("rms_norm_eps", 1e-6),
        attention_kinds=kinds,
        kind_of_layer=kind_of_layer,
        attention_scale=scaled_by**-0.5,
        tied_embeddings=values.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or family.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=values.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        post_norms=family.is_gemma,
        activation=activation,
        embedding_scale=hidden**0.5 if family.is_gemma else 1.0,
        attention_soft_cap=values.optional("attn_logit_softcapping"),
        logit_soft_cap=values.optional("final_logit_softcapping"),
    )


def _attention(
    path: Path, family: Family, raw: Mapping[str, Any], layers: int, head_size: int, context_length: int
) -> tuple[tuple[AttentionKind, ...], tuple[int, ...]]:
    values = Settings(path, "config.json", raw)
    window = values.integer("sliding_window", 0) or None
    if window is not None and family.name == "Llama":
        raise LoadError(f"{path}: sliding-window attention is not supported for {family.name}")
    is_local = _local_layers(path, family, raw, layers, window)
    rope = values.mapping("rope_parameters") or values.mapping("rope_scaling")
    theta = values.number("rope_theta", 10_000.0)
    local_theta = values.number("rope_local_base_freq", family.local_rope_theta or theta)
    full, local = rope, rope if family.local_rope_theta is None else {}
    if _FULL in rope or _SLIDING in rope:  # parameters by the type of layer
        by_type = Settings(path, "the rope parameters of config.json", rope)
        full, local = by_type.mapping(_FULL), by_type.mapping(_SLIDING)

    def frequencies(own: Mapping[str, Any], default_theta: float) -> Tensor:
        numbers = Settings(path, "the rope parameters of config.json", own)
        if numbers.number("partial_rotary_factor", values.number("partial_rotary_factor", 1.0)) != 1:
            raise LoadError(f"{path}: rotary embedding over a part of each head is not supported")
        return inverse_frequencies(
            numbers.number("rope_theta", default_theta), head_size, parse_scaling(own, context_length)
        )

    return attention_of_layers(
        path, is_local, frequencies(full, theta), frequencies(local, local_theta), window, context_length
    )


def _local_layers(path: Path, family: Family, raw: Mapping[str, Any], layers: int, window: int | None) -> list[bool]:
    values = Settings(path, "config.json", raw)
    if family.name in ("Qwen2", "Qwen3"):
        if window is None or not values.flag("use_sliding_window"):
            return [False] * layers
        first = values.integer("max_window_layers", 28)
        by_rule = [index >= first for index in range(layers)]
    else:
        every = raw.get("sliding_window_pattern")
        by_rule = local_layers(family, layers, window, every if isinstance(every, int) else None)
    named = raw.get("layer_types")
    if not isinstance(named, list) or family.name == "Mistral":  # whose layers are all alike, whatever it lists
        return by_rule
    unknown = sorted({str(name) for name in named} - {_FULL, _SLIDING})
    if unknown or len(named) != layers:
        what = f"layers of type {unknown[0]} are" if unknown else f"{len(named)} layer_types for {layers} layers are"
        raise LoadError(f"{path}: {what} not supported")
    return [name == _SLIDING for name in named]


class _SafeTensors(TensorSource):
    """Files are opened once, mapped, and closed with the stack."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._holders: dict[str, Any] = {}
        for file in _files(path):
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise LoadError(f"{file} is not a readable safetensors file: {one_line(error)}") from error
            self._holders.update(dict.fromkeys(opened.keys(), opened))
        self._slices = {name: holder.get_slice(name) for name, holder in self._holders.items()}
        sizes = {
            name: prod(part.get_shape()) * _DTYPE_BYTES.get(part.get_dtype(), 1) for name, part in self._slices.items()
        }
        super().__init__(path, sizes)

    def _stored_name(self, name: str) -> str:
        return name

    def _shape(self, stored: str) -> Shape | None:
        part = self._slices.get(stored)
        if part is None:
            return None
        if part.get_dtype() not in _DTYPE_BYTES:
            raise LoadError(f"{self._path}: tensor {stored} has dtype {part.get_dtype()}, unsupported")
        return tuple(part.get_shape())

    def _copy(self, stored: str, target: Tensor) -> None:
        target.copy_(self._holders[stored].get_tensor(stored))


def _files(path: Path) -> list[Path]:
    """Those that the index names, else the one file, else all there are."""
    if (path / _INDEX).is_file():
        places = read_json(path / _INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise LoadError(f"{path / _INDEX} has no weight_map")
        files = [path / Path(str(name)).name for name in sorted({str(place) for place in places.values()})]
        for file in files:
            if not file.is_file():
                raise LoadError(f"{path}: {file.name} is missing, which {_INDEX} names")
        return files
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt*"))
        also = f" ({pickled[0].name} is a pickle, which is never read)" if pickled else ""
        raise LoadError(f"{path}: no .safetensors file{also}")
    return files


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is not valid JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} is not a JSON object")
    return value
