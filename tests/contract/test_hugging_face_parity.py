"""Greedy output equals transformers' token for token in float32, however a prompt is cut, batched and paged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from poolwright_engine.checkpoint.loader import LoadedModel, load_model
from poolwright_engine.native.library import CpuOperations
from support.gguf_writer import write_gguf
from support.parity import (
    TIE,
    Expected,
    ask_transformers,
    assert_same_tokens,
    forced_logits,
    generate,
    transformers_of_gguf,
)
from support.tiny_llama import write_tiny_llama
from support.tiny_models import ARCHITECTURES, WINDOW, write_tiny_model

CHUNKS = [1, 7, 16, 33, 64, 10_000]


# --- tiny checkpoints --------------------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-head-per-kv-head": {"num_key_value_heads": 4},
    "one-kv-head": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "llama3-scaling": {"rope_scaling": LLAMA3, "rope_theta": 500_000.0},
    "llama3-scaling-in-rope-parameters": {"rope_parameters": LLAMA3 | {"rope_theta": 500_000.0}},
    "linear-scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "three-shards": {"shards": 3},
}
TINY_PROMPTS = [
    [(7 * i * i + 3 * i) % 256 for i in range(90)],
    [11, 200, 3],
    [(91 * i + 5) % 256 for i in range(40)],
    [42],
]
TINY_TOKENS = 16


@pytest.fixture(scope="module", params=[*LLAMAS, *ARCHITECTURES])
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_torch_thread: None
) -> tuple[LoadedModel, list[Expected]]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    if request.param in LLAMAS:
        write_tiny_llama(folder, **LLAMAS[request.param])
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    else:
        theirs = write_tiny_model(folder, request.param)
    return load_model(folder), ask_transformers(theirs, TINY_PROMPTS, TINY_TOKENS)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_logits_of_a_checkpoint_are_transformers(tiny: tuple[LoadedModel, list[Expected]], chunk: int) -> None:
    loaded, answers = tiny
    for expected in answers:
        found = forced_logits(loaded, expected, chunk, block_size=16)
        assert (found - expected.logits).abs().max() < TIE


def test_logits_by_pytorchs_operations_are_the_same(tiny: tuple[LoadedModel, list[Expected]]) -> None:
    """The others compute by C operations where this machine has a compiler."""
    loaded, answers = tiny
    by_torch = load_model(loaded.path, cpu_operations=CpuOperations.TORCH)
    for expected in answers:
        for chunk in (1, 33):
            assert (forced_logits(by_torch, expected, chunk, block_size=16) - expected.logits).abs().max() < TIE


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 16), (7, 4), (16, 16), (33, 1), (64, 32), (10_000, 8)])
def test_a_checkpoint_gives_transformers_tokens(
    tiny: tuple[LoadedModel, list[Expected]], chunk: int, block_size: int
) -> None:
    loaded, answers = tiny
    outputs = generate(loaded, [expected.prompt_ids for expected in answers], TINY_TOKENS, chunk, block_size)
    for found, expected in zip(outputs, answers, strict=True):
        assert_same_tokens(found, expected)


IN_GGUF: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # by the name of the tiny model: GGUF's architecture, its own metadata, and what GGUF cannot say otherwise
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "gemma2": (
        "gemma2",
        {
            "gemma2.attention.sliding_window": WINDOW,
            "gemma2.attn_logit_softcapping": 2.0,
            "gemma2.final_logit_softcapping": 3.0,
        },
        {"query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "gemma3",
        {
            "gemma3.attention.sliding_window": WINDOW,
            "gemma3.attention.sliding_window_pattern": [True, False, True, False],
            "gemma3.rope.freq_base": 1_000_000.0,
        },
        {"query_pre_attn_scalar": 16},
    ),
    "gemma3-of-six-layers": (
        "gemma3",
        {
            "gemma3.attention.sliding_window": WINDOW,
            "gemma3.rope.freq_base": 1_000_000.0,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
        {
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
}


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", IN_GGUF)
def test_logits_of_a_gguf_file_are_transformers(tmp_path: Path, name: str) -> None:
    """The weights are transformers', stored as llama.cpp's converter stores them."""
    architecture, metadata, changes = IN_GGUF[name]
    theirs = write_tiny_model(tmp_path / "folder", name.partition("-of-")[0], **changes)
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    config = theirs.config.to_dict()
    path = write_gguf(tmp_path / "tiny.gguf", tensors, config, architecture=architecture, metadata=metadata)
    loaded = load_model(path)
    for expected in ask_transformers(theirs, TINY_PROMPTS[:2], 1):
        assert (forced_logits(loaded, expected, 33, 16) - expected.logits).abs().max() < TIE


# --- the real model ----------------------------------------------------------------------------------------------

REAL_PROMPTS = [
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who finds a bottle with a letter in it. " * 4,
    "def fibonacci(n):",
]
REAL_TOKENS = 24


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> tuple[LoadedModel, list[Expected]]:
    """Loaded by both."""
    loaded = load_model(smollm2_path)
    prompts = [
        loaded.tokenizer.encode(loaded.tokenizer.render_chat([{"role": "user", "content": text}]), False)
        for text in REAL_PROMPTS
    ]
    return loaded, ask_transformers(transformers_of_gguf(smollm2_path), prompts, REAL_TOKENS)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", [7, 33, 10_000])
def test_logits_of_the_real_model_are_transformers(smollm2: tuple[LoadedModel, list[Expected]], chunk: int) -> None:
    loaded, answers = smollm2
    expected = answers[0] if chunk < 16 else answers[1]
    found = forced_logits(loaded, expected, chunk, block_size=16)
    assert (found - expected.logits).abs().max() < TIE


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("chunk", "block_size"), [(7, 32), (64, 16), (10_000, 4)])
def test_the_real_model_gives_transformers_tokens(
    smollm2: tuple[LoadedModel, list[Expected]], chunk: int, block_size: int
) -> None:
    loaded, answers = smollm2
    outputs = generate(loaded, [expected.prompt_ids for expected in answers], REAL_TOKENS, chunk, block_size)
    for found, expected in zip(outputs, answers, strict=True):
        assert_same_tokens(found, expected)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_bfloat16_of_the_real_model_is_near_float32(
    smollm2: tuple[LoadedModel, list[Expected]], smollm2_path: Path
) -> None:
    _, answers = smollm2
    found = forced_logits(load_model(smollm2_path, "bfloat16"), answers[1], 64, block_size=16)
    assert (found - answers[1].logits).abs().mean() < 0.3
    agreed = (found.argmax(1) == answers[1].logits.argmax(1)).float().mean()
    assert agreed > 0.9
