"""The runner on a GPU, in float32 with graphs, gives over random work what the CPU's runner gives."""

import os
import random
from pathlib import Path

import pytest
import torch

from poolwright_engine.checkpoint.loader import LoadedModel, load_model
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.cuda.graphs import NO_GRAPHS, graph_sizes
from poolwright_engine.cuda.model import CudaModel
from poolwright_engine.cuda.runner import CudaRunner, measured_cache_bytes
from poolwright_engine.sampling.guide import Guides
from support.runner_pair import RunnerPair
from support.tiny_llama import write_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted: TRITON_INTERPRET=0"),
]

MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.backends.cuda.matmul.allow_tf32 = False
    return load_model(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_work_gets_the_answers_of_the_cpu(loaded: LoadedModel, seed: int, with_graphs: bool) -> None:
    eos_ids, guides = loaded.tokenizer.eos_ids, Guides(loaded.tokenizer, loaded.config.vocab_size)
    one = CpuRunner(loaded.model, 40, 16, 4, num_host_blocks=16, eos_token_ids=eos_ids, guides=guides)
    other = CudaRunner(
        CudaModel(loaded.config, loaded.model.weights, MAX_MODEL_LEN, torch.device("cuda")),
        num_blocks=40,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=200,
        max_model_len=MAX_MODEL_LEN,
        num_host_blocks=16,
        eos_token_ids=eos_ids,
        guides=guides,
        sizes=graph_sizes(4, 200) if with_graphs else NO_GRAPHS,
    )
    other._cache.fill_(torch.nan)
    pair = RunnerPair(one, other, 4, random.Random(seed))
    try:
        pair.run(60)
    finally:
        one.close()
        other.close()
    assert pair.tokens > 50


def test_the_cache_is_measured_and_fits(loaded: LoadedModel, tmp_path: Path) -> None:
    model = CudaModel(loaded.config, loaded.model.weights, 512, torch.device("cuda"))
    _, total = torch.cuda.mem_get_info()
    left = measured_cache_bytes(model, 16, 64, 1024, 512, 0.5)
    assert 0 < left < total / 2
    runner = CudaRunner(model, loaded.config.kv_shape(torch.float32).blocks_in(left, 16), 16, 64, 1024, 512)
    runner.close()
