"""From files to a model that runs: `load_model` is the one way in.

Owns which format a path is, the layout of the weights in memory, and that nothing in the files is left out silently.
The formats are `gguf` and `folder`; what is supported, `architectures`.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from poolwright_engine.checkpoint.checkpoint import Checkpoint, LoadError, Progress, Shape, one_line
from poolwright_engine.checkpoint.folder import read_folder
from poolwright_engine.checkpoint.gguf import read_gguf
from poolwright_engine.checkpoint.weight_digest import WeightDigest
from poolwright_engine.model.batch_invariant import BatchInvariantModel
from poolwright_engine.model.linear import Linear
from poolwright_engine.model.llama import LayerWeights, LlamaModel, Weights
from poolwright_engine.model.model_config import ModelConfig
from poolwright_engine.model.operations import operations
from poolwright_engine.model.rope import RopeScalingUnsupported
from poolwright_engine.native.library import CpuOperations
from poolwright_engine.text.tokenizer import Tokenizer, TokenizerUnsupported

__all__ = ["DTYPES", "LoadError", "LoadedModel", "load_model", "stored_dtype"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

MakeLinear = Callable[[str, Tensor, Tensor | None], Linear]
"""Makes a product from its Hugging Face name, (out, in) weight and bias. Fused ones are `self_attn.qkv_proj` and
`mlp.gate_up_proj` of their layer; a tied head has the very tensor of the embedding."""

_DERIVED = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias)$")  # buffers that old checkpoints store


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`dtype` is a name of DTYPES, as asked for. `weights_digest`: equal where the weights are, at that precision and
    before any quantization."""

    path: Path
    config: ModelConfig
    model: LlamaModel
    tokenizer: Tokenizer
    dtype: str
    weights_digest: str


def stored_dtype(path: Path) -> str:
    """The name in DTYPES that config.json says the weights have; float32 where it says none, and for a GGUF file, most
    of whose tensors have fewer bits. Raises LoadError."""
    path = _file_or_folder(path)
    if not path.is_dir():
        return "float32"
    try:
        said = json.loads((path / "config.json").read_text(encoding="utf-8"))
        said = said.get("text_config", said)
        name = said.get("dtype") or said.get("torch_dtype")
    except (OSError, ValueError, AttributeError) as error:
        raise LoadError(f"{path / 'config.json'} cannot be read: {one_line(error)}") from error
    return name if name in DTYPES else "float32"


def load_model(
    path: Path,
    dtype: str = "float32",
    progress: Progress | None = None,
    make_linear: MakeLinear | None = None,
    cpu_operations: CpuOperations = CpuOperations.AUTO,
    batch_invariant: bool = False,
) -> LoadedModel:
    """Load a `.gguf` file, or a folder that holds one, or a folder with config.json, safetensors and tokenizer.json.

    Takes seconds (the whole model is read and converted); `progress` is called after each tensor. What a CPU computes
    with is settled here. Raises LoadError, whose message is one line, and NoLibrary where native operations must be.
    """
    if dtype not in DTYPES:
        raise LoadError(f"dtype {dtype!r} is not supported (supported: {', '.join(DTYPES)})")
    try:
        with ExitStack() as stack:
            path = _file_or_folder(path)
            checkpoint = read_folder(path, stack) if path.is_dir() else read_gguf(path)
            config, tokenizer = checkpoint.config, checkpoint.tokenizer
            if progress is not None:
                checkpoint.tensors.report_to(progress)
            digest = WeightDigest()
            weights = _assemble(checkpoint, DTYPES[dtype], make_linear or _plain, digest)
            _nothing_left(path, checkpoint)
            if tokenizer.vocab_size > config.vocab_size:
                raise LoadError(f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}")
    except (TokenizerUnsupported, RopeScalingUnsupported) as error:
        raise LoadError(f"{path}: {error}") from error
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (MemoryError, RuntimeError) as error:
        raise LoadError(f"{path}: its weights do not fit into memory: {one_line(error)}") from error
    make_model = BatchInvariantModel if batch_invariant else LlamaModel
    chosen = operations(cpu_operations, config, DTYPES[dtype], batch_invariant)
    return LoadedModel(path, config, make_model(config, weights, chosen), tokenizer, dtype, digest.hex())


def _file_or_folder(path: Path) -> Path:
    if not path.exists():
        raise LoadError(f"model path {path} does not exist")
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        if (path / "adapter_config.json").is_file():
            raise LoadError(f"{path} is a LoRA adapter, which is not supported")
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise LoadError(f"{path} holds neither config.json nor exactly one .gguf file ({len(found)} found)")
        path = found[0]
    if path.suffix != ".gguf":
        raise LoadError(f"{path} is neither a .gguf file nor a folder")
    return path


def _plain(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
    return Linear(weight, bias)


def _assemble(checkpoint: Checkpoint, dtype: torch.dtype, make_linear: MakeLinear, digest: WeightDigest) -> Weights:
    """Each tensor is converted as it is taken and fused in place, so no weight is ever held twice."""
    config, tensors = checkpoint.config, checkpoint.tensors
    hidden, inner, head_size = config.hidden_size, config.intermediate_size, config.head_size

    def matrix(name: str, shape: Shape) -> Tensor:
        tensors.require(name, shape)
        target = torch.empty(shape, dtype=dtype)
        tensors.copy(name, target)
        digest.add(name, target)
        return target

    def norm(name: str, size: int = hidden) -> Tensor:
        tensors.require(name, (size,))
        target = torch.empty(size, dtype=torch.float32)
        tensors.copy(name, target)
        digest.add(name, target)
        return (target + checkpoint.norm_offset).to(dtype)

    def linear(prefix: str, name: str, parts: Mapping[str, int], inputs: int, has_bias: bool) -> Linear:
        for part, rows in parts.items():
            tensors.require(f"{prefix}.{part}.weight", (rows, inputs))
            if has_bias:
                tensors.require(f"{prefix}.{part}.bias", (rows,))
        weight = torch.empty(sum(parts.values()), inputs, dtype=dtype)
        bias = torch.empty(sum(parts.values()), dtype=dtype) if has_bias else None
        first = 0
        for part, rows in parts.items():
            tensors.copy(f"{prefix}.{part}.weight", weight[first : first + rows])
            if bias is not None:
                tensors.copy(f"{prefix}.{part}.bias", bias[first : first + rows])
            first += rows
        digest.add(f"{prefix}.{name}.weight", weight)
        if bias is not None:
            digest.add(f"{prefix}.{name}.bias", bias)
        return make_linear(f"{prefix}.{name}", weight, bias)

    def layer(index: int) -> LayerWeights:
        at = f"model.layers.{index}"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        queries, keys = config.heads * head_size, config.kv_heads * head_size
        projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        qk_norm = None
        if config.qk_norm:
            of_query = norm(f"{attention}.q_norm.weight", head_size).expand(config.heads, -1)
            of_key = norm(f"{attention}.k_norm.weight", head_size).expand(config.kv_heads, -1)
            qk_norm = torch.cat((of_query, of_key))
        return LayerWeights(
            attention_norm=norm(f"{at}.input_layernorm.weight"),
            qkv=linear(attention, "qkv_proj", projections, hidden, config.qkv_bias),
            output=linear(attention, "o_proj", {"o_proj": hidden}, queries, config.output_bias),
            mlp_norm=norm(f"{at}.{mlp_norm}.weight"),
            gate_up=linear(mlp, "gate_up_proj", {"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias),
            down=linear(mlp, "down_proj", {"down_proj": hidden}, inner, config.mlp_bias),
            qk_norm=qk_norm,
            after_attention_norm=norm(f"{at}.post_attention_layernorm.weight") if config.post_norms else None,
            after_mlp_norm=norm(f"{at}.post_feedforward_layernorm.weight") if config.post_norms else None,
        )

    with torch.inference_mode():
        embedding = matrix("model.embed_tokens.weight", (config.vocab_size, hidden))
        head = embedding if config.tied_embeddings else matrix("lm_head.weight", (config.vocab_size, hidden))
        return Weights(
            embedding=embedding,
            layers=tuple(layer(index) for index in range(config.layers)),
            norm=norm("model.norm.weight"),
            lm_head=make_linear("lm_head", head, None),
        )


def _nothing_left(path: Path, checkpoint: Checkpoint) -> None:
    """A tensor without a place means another model than the one that was understood."""
    left = [name for name in checkpoint.tensors.unread() if not _DERIVED.search(name)]
    if checkpoint.config.tied_embeddings:  # some files store the head all the same
        left = [name for name in left if name != "lm_head.weight"]
    if left:
        raise LoadError(
            f"{path}: tensor {left[0]} has no place in architecture {checkpoint.config.architecture}, "
            f"nor have {len(left) - 1} others"
        )
