"""Reading a model from disk: a GGUF file, or a Hugging Face folder of safetensors. `load_model` is the one way in.

Owns file formats, tensor names and what is supported; everything else is refused by name. It never unpickles and never
runs code that comes with a model.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from poolwright_engine.model import LayerWeights, Linear, LlamaModel, ModelConfig, Weights
from poolwright_engine.rope import RopeScalingUnsupported, inverse_frequencies, parse_scaling
from poolwright_engine.tokenizer import Tokenizer, TokenizerUnsupported

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Shape = tuple[int, ...]
Take = Callable[[str, Shape], Tensor]
"""Gives the tensor of a Hugging Face name in the file's own dtype or float32, or raises LoadError."""


class LoadError(Exception):
    """One line that says which path cannot be served and why."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`dtype` is "float32" or "bfloat16", as asked for."""

    path: Path
    config: ModelConfig
    model: LlamaModel
    tokenizer: Tokenizer
    dtype: str


def load_model(path: Path, dtype: str = "float32") -> LoadedModel:
    """Load a `.gguf` file, or a folder that holds one, or a folder with config.json, safetensors and tokenizer.json.

    Takes seconds (the whole model is read and converted). Raises LoadError, whose message is one line.
    """
    if dtype not in DTYPES:
        raise LoadError(f"dtype {dtype!r} is not supported (supported: {', '.join(DTYPES)})")
    try:
        return _load(path, dtype)
    except (TokenizerUnsupported, RopeScalingUnsupported) as error:
        raise LoadError(f"{path}: {error}") from error
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error


def _load(path: Path, dtype: str) -> LoadedModel:
    if not path.exists():
        raise LoadError(f"model path {path} does not exist")
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise LoadError(f"{path} holds neither config.json nor exactly one .gguf file ({len(found)} found)")
        path = found[0]
    if path.is_dir():
        config, weights, tokenizer = _from_folder(path, DTYPES[dtype])
    else:
        config, weights, tokenizer = _from_gguf(path, DTYPES[dtype])
    if tokenizer.vocab_size > config.vocab_size:
        raise LoadError(f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}")
    return LoadedModel(path, config, LlamaModel(config, weights), tokenizer, dtype)


# --- what is supported -------------------------------------------------------------------------------------------

_KINDS = (  # first match of a fragment of the architecture's name says what kind it is
    (
        "mixture of experts",
        ("moe", "mixtral", "dbrx", "grok", "arctic", "gptoss", "gpt-oss", "llama4", "jamba", "kimi"),
    ),
    ("multi-head latent attention", ("deepseek", "minicpm3", "glm_dsa", "glm-dsa")),
    ("state-space model", ("mamba", "rwkv", "nemotronh", "nemotron_h", "plamo2", "falconh1", "falcon-h1", "lfm2")),
    ("encoder-decoder model", ("t5", "bart", "whisper", "pegasus", "conditionalgeneration", "mbart", "marian")),
    ("encoder model", ("bert", "roberta", "deberta", "electra", "eurobert")),
    ("vision model", ("llava", "clip", "vit", "vl", "vision", "mllama", "paligemma")),
)


def _refuse_architecture(path: Path, name: str) -> NoReturn:
    flat = name.lower()
    kind = next((kind for kind, marks in _KINDS if any(mark in flat for mark in marks)), None)
    described = f"architecture {name}" + (f" ({kind})" if kind else "")
    raise LoadError(f"{path}: {described} is not supported (supported: the Llama family)")


def _positive(path: Path, values: Mapping[str, int]) -> None:
    for name, value in values.items():
        if value < 1:
            raise LoadError(f"{path}: {name} is {value}")


def _checked(path: Path, config: ModelConfig) -> ModelConfig:
    _positive(
        path,
        {
            "vocabulary size": config.vocab_size,
            "hidden size": config.hidden_size,
            "intermediate size": config.intermediate_size,
            "layer count": config.layers,
            "head count": config.heads,
            "kv head count": config.kv_heads,
            "head size": config.head_size,
            "context length": config.context_length,
        },
    )
    if config.heads % config.kv_heads or config.head_size % 2:
        raise LoadError(
            f"{path}: {config.heads} heads over {config.kv_heads} kv heads of size {config.head_size} do not divide"
        )
    return config


# --- weights -----------------------------------------------------------------------------------------------------


def _assemble(config: ModelConfig, take: Take, dtype: torch.dtype, attention_bias: bool, mlp_bias: bool) -> Weights:
    """Each tensor is converted as it is taken and fused in place, so no weight is ever held twice."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size

    def one(name: str, shape: Shape) -> Tensor:
        return torch.empty(shape, dtype=dtype).copy_(take(name, shape))

    def fused(prefix: str, parts: Mapping[str, int], inputs: int, has_bias: bool) -> Linear:
        weight = torch.empty(sum(parts.values()), inputs, dtype=dtype)
        bias = torch.empty(sum(parts.values()), dtype=dtype) if has_bias else None
        first = 0
        for part, rows in parts.items():
            weight[first : first + rows] = take(f"{prefix}.{part}.weight", (rows, inputs))
            if bias is not None:
                bias[first : first + rows] = take(f"{prefix}.{part}.bias", (rows,))
            first += rows
        return Linear(weight, bias)

    def layer(index: int) -> LayerWeights:
        at = f"model.layers.{index}"
        attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        return LayerWeights(
            attention_norm=one(f"{at}.input_layernorm.weight", (hidden,)),
            qkv=fused(f"{at}.self_attn", attention, hidden, attention_bias),
            output=fused(f"{at}.self_attn", {"o_proj": hidden}, queries, attention_bias),
            mlp_norm=one(f"{at}.post_attention_layernorm.weight", (hidden,)),
            gate_up=fused(f"{at}.mlp", {"gate_proj": inner, "up_proj": inner}, hidden, mlp_bias),
            down=fused(f"{at}.mlp", {"down_proj": hidden}, inner, mlp_bias),
        )

    with torch.inference_mode():
        embedding = one("model.embed_tokens.weight", (config.vocab_size, hidden))
        lm_head = embedding if config.tied_embeddings else one("lm_head.weight", (config.vocab_size, hidden))
        return Weights(
            embedding=embedding,
            layers=tuple(layer(index) for index in range(config.layers)),
            norm=one("model.norm.weight", (hidden,)),
            lm_head=Linear(lm_head),
        )


# --- GGUF --------------------------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class _Reader(gguf.GGUFReader):
    """Reads through a plain view of the mapped file: slicing a `memmap` object, as the library does for each of the
    vocabulary's strings, costs many times more than slicing the array below it."""

    @property
    def data(self) -> np.ndarray:
        return self._view

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._view = np.asarray(mapped)


def _from_gguf(path: Path, dtype: torch.dtype) -> tuple[ModelConfig, Weights, Tokenizer]:
    if path.suffix != ".gguf":
        raise LoadError(f"{path} is neither a .gguf file nor a folder")
    try:
        reader = _Reader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise LoadError(f"{path} is not a readable GGUF file: {_one_line(error)}") from error
    fields = reader.fields
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def field(name: str, default: Any = None) -> Any:
        if name in fields:
            return fields[name].contents()
        if default is None:
            raise LoadError(f"{path}: metadata {name} is missing")
        return default

    architecture = str(field("general.architecture"))
    if architecture != "llama":
        _refuse_architecture(path, architecture)
    if int(field("llama.expert_count", 0)):
        raise LoadError(f"{path}: architecture llama with experts (mixture of experts) is not supported")
    config = _checked(path, _gguf_config(path, field, tensors))
    tokenizer = Tokenizer.from_gguf({name: fields[name].contents() for name in fields if name.startswith("tokenizer.")})

    def take(name: str, shape: Shape) -> Tensor:
        stored = _gguf_name(name)
        if stored not in tensors:
            raise LoadError(f"{path}: tensor {stored} is missing")
        tensor = tensors[stored]
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            raise LoadError(f"{path}: tensor {stored} has shape {found}, expected {shape}")
        try:
            values = _tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        except NotImplementedError as error:
            raise LoadError(f"{path}: tensor {stored} has type {tensor.tensor_type.name}, unsupported") from error
        if name.endswith("q_proj.weight"):
            return _unpermuted(values, config.heads)
        if name.endswith("k_proj.weight"):
            return _unpermuted(values, config.kv_heads)
        return values

    return config, _assemble(config, take, dtype, attention_bias=False, mlp_bias=False), tokenizer


def _gguf_config(path: Path, field: Callable[..., Any], tensors: Mapping[str, Any]) -> ModelConfig:
    heads, hidden = int(field("llama.attention.head_count")), int(field("llama.embedding_length"))
    head_size = int(field("llama.attention.key_length", hidden // max(heads, 1)))
    rotated = int(field("llama.rope.dimension_count", head_size))
    if rotated != head_size:
        raise LoadError(f"{path}: rotary embedding over {rotated} of {head_size} elements is not supported")
    biases = sorted(name for name in tensors if name.endswith(".bias"))
    if biases:
        raise LoadError(f"{path}: biases in GGUF ({biases[0]}) are not supported")
    scaling_type = str(field("llama.rope.scaling.type", "none"))
    scaling = None
    if scaling_type != "none":
        scaling = parse_scaling({"rope_type": scaling_type, "factor": field("llama.rope.scaling.factor", 1.0)})
    frequencies = inverse_frequencies(float(field("llama.rope.freq_base", 10_000.0)), head_size, scaling)
    if "rope_freqs.weight" in tensors:  # Llama 3 scaling, which converters store as one divisor per frequency
        divisors = _tensor(tensors["rope_freqs.weight"].data)
        if divisors.shape != frequencies.shape:
            raise LoadError(f"{path}: tensor rope_freqs.weight has shape {tuple(divisors.shape)}")
        frequencies = frequencies / divisors
    return ModelConfig(
        architecture="llama",
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=int(field("llama.feed_forward_length")),
        layers=int(field("llama.block_count")),
        heads=heads,
        kv_heads=int(field("llama.attention.head_count_kv", heads)),
        head_size=head_size,
        context_length=int(field("llama.context_length")),
        rms_norm_epsilon=float(field("llama.attention.layer_norm_rms_epsilon")),
        inverse_frequencies=tuple(frequencies.tolist()),
        tied_embeddings="output.weight" not in tensors,
    )


def _tensor(values: Any) -> Tensor:
    """A copy only where the array is a window on the read-only file."""
    return torch.from_numpy(np.require(values, dtype=np.float32, requirements="W"))


def _gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, index, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{index}.{_GGUF_LAYER_NAMES[part]}.{kind}"


def _unpermuted(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each rotary head; Hugging Face, and this model, keep them apart."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


# --- Hugging Face folder -----------------------------------------------------------------------------------------

_FOLDER_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def _from_folder(path: Path, dtype: torch.dtype) -> tuple[ModelConfig, Weights, Tokenizer]:
    raw = read_json(path / "config.json")
    architectures = raw.get("architectures") or [raw.get("model_type", "unnamed")]
    if architectures[0] not in _FOLDER_ARCHITECTURES:
        _refuse_architecture(path, str(architectures[0]))
    config = _checked(path, _folder_config(path, raw, str(architectures[0])))
    tokenizer = Tokenizer.from_folder(path)
    with ExitStack() as stack:
        take = _safetensors(path, stack)
        weights = _assemble(config, take, dtype, bool(raw.get("attention_bias")), bool(raw.get("mlp_bias")))
    return config, weights, tokenizer


def _folder_config(path: Path, raw: Mapping[str, Any], architecture: str) -> ModelConfig:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise LoadError(f"{path}: {method} quantization is not supported in a safetensors folder")
    if raw.get("sliding_window"):
        raise LoadError(f"{path}: sliding-window attention is not supported")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise LoadError(f"{path}: activation {raw['hidden_act']} is not supported (supported: silu)")

    def number(name: str, default: float | None = None) -> float:
        value = raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise LoadError(f"{path}: {name} in config.json is missing or not a number")
        return value

    hidden, heads = int(number("hidden_size")), int(number("num_attention_heads"))
    head_size = int(number("head_dim", hidden // max(heads, 1)))
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    context_length = int(number("max_position_embeddings"))
    scaling = parse_scaling(rope, context_length)
    theta = float(rope.get("rope_theta") or number("rope_theta", 10_000.0))
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(number("vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(number("intermediate_size")),
        layers=int(number("num_hidden_layers")),
        heads=heads,
        kv_heads=int(number("num_key_value_heads", heads)),
        head_size=head_size,
        context_length=context_length,
        rms_norm_epsilon=float(number("rms_norm_eps", 1e-6)),
        inverse_frequencies=tuple(inverse_frequencies(theta, head_size, scaling).tolist()),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def _safetensors(path: Path, stack: ExitStack) -> Take:
    """Where each tensor lies, files opened once and closed with the stack."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt*"))
        also = f" ({pickled[0].name} is a pickle, which is never read)" if pickled else ""
        raise LoadError(f"{path}: no .safetensors file{also}")
    holders: dict[str, Any] = {}
    for file in files:
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except SafetensorError as error:
            raise LoadError(f"{file} is not a readable safetensors file: {_one_line(error)}") from error
        holders.update(dict.fromkeys(opened.keys(), opened))

    def take(name: str, shape: Shape) -> Tensor:
        if name not in holders:
            raise LoadError(f"{path}: tensor {name} is missing")
        tensor = holders[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise LoadError(f"{path}: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise LoadError(f"{path}: tensor {name} has dtype {tensor.dtype}, unsupported")
        return tensor

    return take


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is not valid JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} is not a JSON object")
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
