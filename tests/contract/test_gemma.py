"""Gemma 3 270M against transformers: windows of 512 tokens in 15 of 18 layers, two rotary bases, heads of 256, one KV
head, a SentencePiece vocabulary of 262,144, and five kinds of quantized tensors."""

import random
from pathlib import Path
from typing import Any

import pytest

from poolwright_engine.checkpoint.loader import LoadedModel, load_model
from support.gemma_model import ensure_gemma
from support.parity import (
    TIE,
    Expected,
    ask_transformers,
    assert_same_tokens,
    forced_logits,
    generate,
    transformers_of_gguf,
)

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(900)]

TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "The lighthouse keeper wrote in his journal every evening. " * 60,  # longer than a window
    "def fibonacci(n):\n    ",
]
TEXTS = [
    "Hello, world!",
    "In 2024 there were 1,234,567 of them — “quoted”, naïve, Straße.",
    "def f(x):\n    return x ** 2\n\n\n# done\t\n",
    "日本語のテキスト、한국어, العربية, हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b 𓀀 𝔘𝔫𝔦 \U0010ffff\x00\x01",
    "   leading and trailing   ",
    "<start_of_turn>user\nhi<end_of_turn>\n<unused5>[multimodal]",
    "<table><tr>  <td>x</td>",
    " " * 33 + "x" + " " * 70 + "\n" * 40,
    "\r\n\t\t x\u00a0y\u2028z",
    "a" * 300,
    "",
]


@pytest.fixture(scope="module")
def path() -> Path:
    return ensure_gemma()


@pytest.fixture(scope="module")
def gemma(path: Path) -> LoadedModel:
    return load_model(path)


@pytest.fixture(scope="module")
def answers(path: Path, gemma: LoadedModel) -> list[Expected]:
    """transformers' copy is gone once it has answered."""
    prompts = [gemma.tokenizer.encode(text) for text in PROMPTS]
    assert len(prompts[1]) > 512 + TOKENS
    return ask_transformers(transformers_of_gguf(path), prompts, TOKENS, keep_logits=TOKENS + 1)


def test_its_shape_is_read(gemma: LoadedModel) -> None:
    config = gemma.config
    assert (config.layers, config.heads, config.kv_heads, config.head_size) == (18, 4, 1, 256)
    assert [index for index, window in enumerate(config.windows) if window is None] == [5, 11, 17]
    assert set(config.windows) == {None, 512}
    assert (config.vocab_size, config.tied_embeddings, gemma.tokenizer.bos_id) == (262_144, True, 2)


@pytest.mark.parametrize("chunk", [16, 100, 10_000])
def test_logits_are_transformers(gemma: LoadedModel, answers: list[Expected], chunk: int) -> None:
    for expected in answers:
        assert (forced_logits(gemma, expected, chunk, block_size=16) - expected.logits).abs().max() < TIE


@pytest.mark.parametrize(("chunk", "block_size"), [(64, 16), (10_000, 32)])
def test_tokens_are_transformers(gemma: LoadedModel, answers: list[Expected], chunk: int, block_size: int) -> None:
    outputs = generate(gemma, [expected.prompt_ids for expected in answers], TOKENS, chunk, block_size)
    for found, expected in zip(outputs, answers, strict=True):
        assert_same_tokens(found, expected)


def test_its_tokenizer_gives_transformers_ids_and_gives_the_text_back(path: Path, gemma: LoadedModel) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    chance = random.Random(0)
    letters = [chr(c) for c in (*range(32, 127), *range(0xA0, 0x250), *range(0x400, 0x500), *range(0x4E00, 0x4F00))]
    pieces = [*letters, *" \n\t▁👨\u200d", "  ", "the ", "ing", "<b>", "</b>"]
    for text in [*TEXTS, *("".join(chance.choices(pieces, k=chance.randint(1, 40))) for _ in range(500))]:
        ids = gemma.tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"], repr(text)
        if "▁" not in text:
            assert gemma.tokenizer.decode(ids[1:], skip_special_tokens=False) == text
