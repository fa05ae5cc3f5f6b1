"""A batch-invariant model gives a token the same bits in any step."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from poolwright_engine.checkpoint.loader import load_model
from poolwright_engine.model.batch_invariant import BatchInvariantModel
from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_engine.model.llama import KVCache, LlamaModel
from poolwright_engine.native.library import CpuOperations
from support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(autouse=True)
def threads_as_before(one_torch_thread: None) -> Iterator[None]:
    yield
    torch.set_num_threads(1)


TOKENS = 45
WHOLE = (0, TOKENS)
WAYS = {
    "again": (WHOLE, 0),
    "with a neighbour that decodes": (WHOLE, 1),
    "with a neighbour's chunk": (WHOLE, 21),
    "in chunks": ((0, 7, 23, TOKENS), 0),
    "in chunks with a neighbour": ((0, 7, 23, TOKENS), 3),
    "then decoded": ((0, 20, *range(21, TOKENS + 1)), 0),
    "then decoded with a neighbour": ((0, 20, *range(21, TOKENS + 1)), 2),
    "token by token": (tuple(range(TOKENS + 1)), 0),
}


def logits_of(model: LlamaModel, cuts: Sequence[int], neighbour: int, blocks: Sequence[int]) -> Tensor:
    """Of every token of one sequence, computed from cut to cut beside `neighbour` tokens of another in each step."""
    generator = torch.Generator().manual_seed(7)
    vocab_size = model.config.vocab_size
    own = torch.randint(0, vocab_size, (TOKENS,), generator=generator)
    others = torch.randint(0, vocab_size, (neighbour * len(cuts),), generator=generator)
    cache = KVCache(model.config.kv_shape(model.dtype), 48, 4, model.dtype)
    logits, done = [], 0
    for start, stop in itertools.pairwise(cuts):
        rows, ids = [AttentionRow(start, stop - start, tuple(blocks))], own[start:stop]
        if neighbour:
            rows.insert(0, AttentionRow(done, neighbour, tuple(range(1, 30))))
            ids = torch.cat((others[done : done + neighbour], ids))
            done += neighbour
        logits.append(model.logits(model.hidden(ids, rows, cache)[neighbour:]))
    return torch.cat(logits)


@pytest.mark.parametrize("computing", [CpuOperations.AUTO, CpuOperations.TORCH])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 2600, "num_hidden_layers": 1}])
def test_a_tokens_logits_are_the_same_bits_in_any_step(
    tmp_path: Path, dtype: str, sizes: dict[str, int], computing: CpuOperations
) -> None:
    """Also where element-wise functions are wide enough to be split between threads; blocks in a run and scattered."""
    path = write_tiny_llama(tmp_path / "tiny", **sizes)
    model = load_model(path, dtype, cpu_operations=computing, batch_invariant=True).model
    assert isinstance(model, BatchInvariantModel)
    run, scattered = tuple(range(32, 46)), (47, *range(32, 45))
    expected = logits_of(model, *WAYS["again"], run)
    assert expected.isfinite().all()
    different = [name for name, way in WAYS.items() if not torch.equal(logits_of(model, *way, scattered), expected)]
    assert different == []
    plain = logits_of(load_model(path, dtype).model, *WAYS["again"], run)
    assert (plain - expected).abs().max() < (0.5 if dtype == "bfloat16" else 1e-3)


def test_threads_that_share_an_operation_change_nothing(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_llama(tmp_path / "tiny", intermediate_size=2600, num_hidden_layers=1), "bfloat16")
    model = BatchInvariantModel(loaded.config, loaded.model.weights)
    torch.set_num_threads(2)
    expected = logits_of(model, *WAYS["again"], range(32, 46))
    assert torch.equal(logits_of(model, *WAYS["in chunks with a neighbour"], range(32, 46)), expected)


@pytest.mark.model
def test_a_real_model_in_bfloat16_is_invariant(smollm2_path: Path) -> None:
    model = load_model(smollm2_path, "bfloat16", batch_invariant=True).model
    expected = logits_of(model, *WAYS["again"], range(32, 46))
    assert torch.equal(logits_of(model, (0, 7, 41, 42, 43, 44, TOKENS), 3, range(32, 46)), expected)


def test_no_logits_of_no_tokens(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_llama(tmp_path / "tiny"))
    model = BatchInvariantModel(loaded.config, loaded.model.weights)
    assert model.logits(torch.empty(0, loaded.config.hidden_size)).shape == (0, loaded.config.vocab_size)
