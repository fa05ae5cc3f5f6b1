"""Which models can be served: the families, what each one's name implies, and what everything else is called.

Owns names and constants that no checkpoint spells out. Reads no file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from poolwright_engine.checkpoint.checkpoint import LoadError
from poolwright_engine.model.model_config import Activation, AttentionKind, ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """`defaults` are those of transformers' config class, for keys that a config.json may leave out.

    `full_attention_every`: each n-th layer sees all keys, those between a window; 0: the files say.
    """

    name: str
    folder_name: str  # in `architectures` of a config.json
    gguf_name: str  # `general.architecture`
    qkv_bias: bool = False
    qk_norm: bool = False
    is_gemma: bool = False  # norms also after attention and MLP, norm weights from 1, scaled embeddings
    full_attention_every: int = 0
    local_rope_theta: float | None = None  # of the layers with a window
    activation: Activation = Activation.SILU
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True, "sliding_window": 4096}

FAMILIES = (
    Family("Llama", "LlamaForCausalLM", "llama"),
    Family("Mistral", "MistralForCausalLM", "llama", defaults={"sliding_window": 4096}),
    Family("Qwen2", "Qwen2ForCausalLM", "qwen2", qkv_bias=True, defaults={"sliding_window": 4096}),
    Family("Qwen3", "Qwen3ForCausalLM", "qwen3", qk_norm=True, defaults={"head_dim": 128, "sliding_window": 4096}),
    Family(
        "Gemma 2",
        "Gemma2ForCausalLM",
        "gemma2",
        is_gemma=True,
        full_attention_every=2,
        activation=Activation.GELU_TANH,
        defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    Family(
        "Gemma 3",
        "Gemma3ForCausalLM",
        "gemma3",
        qk_norm=True,
        is_gemma=True,
        full_attention_every=6,
        local_rope_theta=10_000.0,
        activation=Activation.GELU_TANH,
        defaults=_GEMMA | {"rope_theta": 1_000_000.0},
    ),
)

_KINDS = (  # first match of a fragment of the architecture's name says what kind it is
    (
        "mixture of experts",
        ("moe", "mixtral", "dbrx", "grok", "arctic", "gptoss", "gpt-oss", "llama4", "jamba", "kimi"),
    ),
    ("multi-head latent attention", ("deepseek", "minicpm3", "glm_dsa", "glm-dsa")),
    ("state-space model", ("mamba", "rwkv", "nemotronh", "nemotron_h", "plamo2", "falconh1", "falcon-h1", "lfm2")),
    (
        "vision model",
        ("llava", "clip", "vit", "vl", "vision", "mllama", "paligemma", "gemma3for", "gemma3n", "mistral3"),
    ),
    ("encoder-decoder model", ("t5", "bart", "whisper", "pegasus", "conditionalgeneration", "mbart", "marian")),
    ("encoder model", ("bert", "roberta", "deberta", "electra", "eurobert")),
)


def family_of_folder(path: Path, name: str) -> Family:
    return next((f for f in FAMILIES if f.folder_name == name), None) or refuse_architecture(path, name)


def family_of_gguf(path: Path, name: str) -> Family:
    return next((f for f in FAMILIES if f.gguf_name == name), None) or refuse_architecture(path, name)


def refuse_architecture(path: Path, name: str) -> NoReturn:
    flat = name.lower()
    kind = next((kind for kind, marks in _KINDS if any(mark in flat for mark in marks)), None)
    described = f"architecture {name}" + (f" ({kind})" if kind else "")
    supported = ", ".join(family.name for family in FAMILIES)
    raise LoadError(f"{path}: {described} is not supported (supported: {supported})")


def checked(path: Path, config: ModelConfig) -> ModelConfig:
    """The config, if its numbers can be a model's."""
    numbers = {
        "vocabulary size": config.vocab_size,
        "hidden size": config.hidden_size,
        "intermediate size": config.intermediate_size,
        "head count": config.heads,
        "kv head count": config.kv_heads,
        "head size": config.head_size,
        "context length": config.context_length,
    }
    for name, value in numbers.items():
        if not 1 <= value < 2**31:
            raise LoadError(f"{path}: {name} is {value}")
    if not 0 <= config.rms_norm_epsilon < 1:
        raise LoadError(f"{path}: the epsilon of its norms is {config.rms_norm_epsilon}")
    if config.heads % config.kv_heads or config.head_size % 2:
        raise LoadError(
            f"{path}: {config.heads} heads over {config.kv_heads} kv heads of size {config.head_size} do not divide"
        )
    return config


def layer_count(path: Path, count: int) -> int:
    if not 1 <= count <= 10_000:
        raise LoadError(f"{path}: layer count is {count}")
    return count


def local_layers(family: Family, layers: int, window: int | None, every: int | None = None) -> list[bool]:
    """Which layers are those with a window: by the family's pattern, or `every` where the files give it."""
    period = family.full_attention_every if every is None else every
    if period < 1:
        return [window is not None] * layers
    return [(index + 1) % period != 0 for index in range(layers)]


def attention_of_layers(
    path: Path, is_local: Sequence[bool], full: Tensor, local: Tensor, window: int | None, context_length: int
) -> tuple[tuple[AttentionKind, ...], tuple[int, ...]]:
    """The distinct kinds, and the kind of each layer, from the frequencies of both. A window as long as the context
    hides nothing, and is left out."""
    if window is not None and window < 1:
        raise LoadError(f"{path}: the attention window is {window} tokens")
    hides = window if window is not None and window < context_length else None
    whole, part = AttentionKind(tuple(full.tolist())), AttentionKind(tuple(local.tolist()), hides)
    kinds = [part if of_layer else whole for of_layer in is_local]
    distinct = [kind for kind in (whole, part) if kind in kinds]
    if whole == part:
        distinct = [whole]
    return tuple(distinct), tuple(distinct.index(kind) for kind in kinds)
