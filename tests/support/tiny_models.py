"""Tiny random models of every supported architecture, written to disk by transformers itself: names, layout and
config.json are then no opinion of this project's."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.tiny_llama import write_byte_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
WINDOW = 24  # shorter than the prompts of the tests, and no multiple of their chunks

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral-window": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {"head_dim": 12}),
    "qwen2-window": (
        "Qwen2Config",
        {"head_dim": 12, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3Config", {"attention_bias": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20},
    ),
    "gemma3-scaled-untied": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
}


def write_tiny_model(folder: Path, architecture: str, seed: int = 0, **changes: Any) -> Any:
    """Writes the checkpoint; returns transformers' own model of it, float32. `changes` go over its config."""
    import transformers

    class_name, own = ARCHITECTURES[architecture]
    config = getattr(transformers, class_name)(**SHAPE | own | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_random(name, weight, generator))
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return model


def _random(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Large enough that greedy choices are not ties; norms around what they begin with, which is 0 or 1."""
    noise = torch.randn(weight.shape, generator=generator)
    if weight.ndim == 1 and name.endswith("norm.weight"):
        return weight.mean().round() + 0.1 * noise
    if weight.ndim == 1 or "embed_tokens" in name:
        return noise
    return noise * 1.5 / weight.shape[1] ** 0.5
