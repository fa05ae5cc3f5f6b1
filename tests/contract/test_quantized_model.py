"""What fewer bits cost the real small model: perplexity and distance from the model in float32, on one text."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from poolwright_engine.checkpoint.loader import load_model
from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_engine.model.linear import Quantization, quantized
from poolwright_engine.model.llama import KVCache
from poolwright_engine.native.library import CpuOperations

pytestmark = [pytest.mark.model, pytest.mark.timeout(300), pytest.mark.usefixtures("one_torch_thread")]

TEXT = """The harbour lay open to the west, and for most of the year the wind came straight in from the sea. Ships that
could not wait for a turn of the weather were warped out along the mole by hand, a slow business that needed sixty men
and a good deal of shouting. In the spring of 1874 the council decided, after eleven years of argument, to build a
second mole to the north. The engineer they chose had worked on railways and had never built anything that stood in
water, but his estimate was the lowest by a third. He began with the foundations, which he made of rubble tipped from
barges, and found within a month that the current carried away at night what had been laid by day. A fisherman told him
to tip the stones at slack water and to begin with the largest. He did so, and the work went on without further trouble
until the autumn, when the first storm showed that the wall was too low. The price of raising it was nearly the price of
building it. When it was finished the harbour was calm in every wind, and within a few years it had filled with sand,
because the current that had plagued the engineer was the same one that had kept the channel clear."""


def log_probabilities(path: Path, quantization: Quantization | None) -> tuple[Tensor, Tensor]:
    """Of the text's tokens after the first, (tokens, vocabulary); and those tokens."""
    make = None if quantization is None else functools.partial(quantized, quantization, CpuOperations.AUTO)
    loaded = load_model(path, "float32", make_linear=make)
    ids = torch.tensor(loaded.tokenizer.encode(TEXT))
    blocks = list(range(1, len(ids) // 16 + 2))
    cache = KVCache(loaded.config.kv_shape(loaded.model.dtype), len(blocks) + 1, 16, loaded.model.dtype)
    logits = loaded.model.forward(ids, [AttentionRow(0, len(ids), blocks)], cache, range(len(ids) - 1))
    return logits.log_softmax(-1), ids[1:]


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> tuple[Tensor, Tensor]:
    return log_probabilities(smollm2_path, None)


@pytest.mark.parametrize("quantization", list(Quantization))
def test_fewer_bits_cost_less_than_three_percent_of_perplexity(
    smollm2_path: Path, plain: tuple[Tensor, Tensor], quantization: Quantization
) -> None:
    expected, ids = plain
    found, _ = log_probabilities(smollm2_path, quantization)
    perplexity_ratio = (expected - found).gather(1, ids[:, None]).mean().exp().item()
    divergence = (expected.exp() * (expected - found)).sum(-1).mean().item()
    same = (expected.argmax(-1) == found.argmax(-1)).float().mean().item()
    figures = f"perplexity ratio {perplexity_ratio:.4f}, KL {divergence:.4f} nats, same best token {same:.3f}"
    assert perplexity_ratio < 1.03, figures
    assert divergence < 0.03, figures
    assert same > 0.85, figures
    assert divergence > 0, "the model in fewer bits is the model itself"
