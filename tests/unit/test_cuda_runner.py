"""The runner of a GPU, run on a CPU through the references: over random work it answers what the CPU's own answers."""

import asyncio
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from poolwright_engine.checkpoint.loader import LoadedModel, load_model
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.cuda import batch as device_batch
from poolwright_engine.cuda import plans as device_plans
from poolwright_engine.cuda import runner as cuda_runner
from poolwright_engine.cuda.batch import DeviceBatch, StepShape
from poolwright_engine.cuda.graphs import NO_GRAPHS, GraphSizes, graph_sizes
from poolwright_engine.cuda.model import CudaModel
from poolwright_engine.cuda.plans import AttentionPlans
from poolwright_engine.cuda.runner import CudaRunner, cache_bytes_left, largest_steps
from poolwright_engine.cuda.sampler import DeviceSampler
from poolwright_engine.process import assembly
from poolwright_engine.process.config import ConfigError, Device, EngineConfig
from poolwright_engine.process.first_steps import measure_swap
from poolwright_engine.sampling.guide import Guides
from poolwright_engine.scheduling.runner import Seat
from poolwright_kernels import (
    block_copy,
    gated_unit,
    hybrid_attention,
    penalties,
    rms_norm,
    rotary_write,
    sampling,
)
from poolwright_kernels.ops import register_cpu, unregister_cpu
from support.engine_bed import machine, request, tokens
from support.placed import placed, step_of
from support.runner_pair import PARAMS, RunnerPair, assert_same
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CPU = torch.device("cpu")
MAX_MODEL_LEN = 64
PADDED = GraphSizes(decode_rows=(1, 2, 4), mixed_tokens=(8, 32))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def guides(loaded: LoadedModel) -> Guides:
    return Guides(loaded.tokenizer, loaded.config.vocab_size)


def on_device(
    loaded: LoadedModel, guides: Guides | None, sizes: GraphSizes = NO_GRAPHS, decodes_planned: bool = False
) -> CudaRunner:
    """Its cache holds NaN wherever nothing was written."""
    runner = CudaRunner(
        CudaModel(loaded.config, loaded.model.weights, MAX_MODEL_LEN, CPU),
        num_blocks=40,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=200,
        max_model_len=MAX_MODEL_LEN,
        num_host_blocks=16,
        eos_token_ids=loaded.tokenizer.eos_ids,
        guides=guides,
        sizes=sizes,
        decodes_planned=decodes_planned,
    )
    runner._cache.fill_(torch.nan)
    return runner


def on_cpu(loaded: LoadedModel, guides: Guides | None) -> CpuRunner:
    eos_ids = loaded.tokenizer.eos_ids
    return CpuRunner(loaded.model, 40, 4, 4, cpu_threads=1, num_host_blocks=16, eos_token_ids=eos_ids, guides=guides)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), padded=st.booleans())
def test_random_work_gets_the_answers_of_the_cpu(loaded: LoadedModel, guides: Guides, seed: int, padded: bool) -> None:
    one, other = on_cpu(loaded, guides), on_device(loaded, guides, PADDED if padded else NO_GRAPHS)
    try:
        RunnerPair(one, other, 4, random.Random(seed)).run(40)
    finally:
        one.close()
        other.close()


@pytest.mark.parametrize("architecture", ["qwen2-window", "qwen3", "gemma2", "gemma3"])
def test_every_kind_of_model_gets_the_answers_of_the_cpu(tmp_path: Path, architecture: str) -> None:
    write_tiny_model(tmp_path, architecture)
    loaded = load_model(tmp_path)
    guides = Guides(loaded.tokenizer, loaded.config.vocab_size)
    one, other = on_cpu(loaded, guides), on_device(loaded, guides)
    pair = RunnerPair(one, other, 4, random.Random(3))
    try:
        pair.run(30)
    finally:
        one.close()
        other.close()
    assert pair.tokens > 30


def test_interpreted_kernels_give_the_answers_of_the_cpu(loaded: LoadedModel) -> None:
    """All operations by their kernels, work lists included: chunks and decodes together, then decodes planned as on a
    device, penalties, a draw, and a block copied out and in."""
    pytest.importorskip("triton")
    kernels = {
        "rms_norm": rms_norm.rms_norm_triton,
        "add_rms_norm": rms_norm.add_rms_norm_triton,
        "silu_mul": gated_unit.silu_mul_triton,
        "rotary_write": rotary_write.rotary_write_triton,
        "hybrid_attention": hybrid_attention.hybrid_attention_triton,
        "sample_tokens": sampling.sample_tokens_triton,
        "penalize": penalties.penalize_triton,
        "bias_logits": penalties.bias_logits_triton,
        "remember_tokens": penalties.remember_tokens_triton,
        "copy_blocks": block_copy.copy_blocks_triton,
        "gather_blocks": block_copy.gather_blocks_triton,
        "scatter_blocks": block_copy.scatter_blocks_triton,
    }
    one, other = on_cpu(loaded, None), on_device(loaded, None, PADDED, decodes_planned=True)
    wanted = [PARAMS[0], PARAMS[3], PARAMS[4]]
    prompts = [tuple(range(3, 24)), (7, 100, 42), (250, 3)]
    tables = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11]]
    for name, kernel in kernels.items():
        register_cpu(name, kernel)
    try:
        with np.errstate(all="ignore"):
            last = list(prompts)
            for number in range(3):
                rows = tuple(
                    placed(slot, len(ids) - 1, 1, (), table, True, each, use_last_sampled=True)
                    if number
                    else placed(slot, 0, len(ids), ids, table, True, each, seat=Seat(ids, ()))
                    for slot, (ids, table, each) in enumerate(zip(last, tables, wanted, strict=True))
                )
                results = [runner.submit(step_of(number, rows)).result() for runner in (one, other)]
                assert_same(*results)
                last = [(*ids, *new) for ids, new in zip(last, results[0].token_ids, strict=True)]
            whole = (range(3), range(2))
            read = other.read_blocks(*whole, (2,)).result()
            other.write_blocks(*whole, (20,), read)
            other.swap_out((20,), (3,))
            other.swap_in((3,), (21,))
            assert other.read_blocks(*whole, (21,)).result() == read
    finally:
        for name in kernels:
            unregister_cpu(name)
        one.close()
        other.close()


@pytest.mark.parametrize("architecture", ["qwen2-window", "gemma3"])
@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_a_forward_pass_of_fake_tensors_has_the_shapes_of_a_real_one(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    """In bfloat16, which is traced and not computed: no operation needs to look at data, nor, on another device, at a
    tensor that stayed on the CPU."""
    write_tiny_model(tmp_path, architecture)
    loaded = load_model(tmp_path, "bfloat16")
    config = loaded.config
    device = CPU if kind == "fake" else torch.device("meta")
    mode = FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else nullcontext()
    with mode, torch.inference_mode():
        model = CudaModel(config, loaded.model.weights, MAX_MODEL_LEN, device)
        batch = DeviceBatch(4, 64, 16, 4, device)
        plans = AttentionPlans(config, 4, 4, 64, torch.bfloat16, device, decodes_planned=False)
        cache = torch.empty(2, config.layers, 8, 4, config.kv_heads, config.head_size, dtype=torch.bfloat16)
        cache = cache.to(device)
        sampler = DeviceSampler(batch, config.vocab_size, frozenset(), None)
        for shape in (StepShape(48, 4, False), StepShape(4, 4, True)):
            inputs = batch.inputs(shape)
            hidden = model.hidden(inputs, plans.decode(inputs) if shape.decodes else plans.mixed(inputs), cache)
            logits = model.logits(hidden)
            assert (hidden.shape, hidden.dtype) == ((shape.tokens, config.hidden_size), torch.bfloat16)
            assert (logits.shape, logits.dtype) == ((shape.tokens, config.vocab_size), torch.float32)
            assert inputs.block_tables.shape == (shape.rows, 16)
        words = sampler.draw_plainly(logits, inputs.row_slots, inputs.context_lens.long())
        assert (words.shape, words.dtype) == ((2 * shape.rows,), torch.int32)


def test_a_cache_of_eight_bits_takes_half_the_memory_of_sixteen_and_costs_three_bits(loaded: LoadedModel) -> None:
    """A prompt in chunks, then decodes: the first layer's keys and values are those of a whole cache, rounded; log
    probabilities are near, not equal. Blocks keep their bits when they travel."""
    runners = [
        CudaRunner(
            CudaModel(loaded.config, loaded.model.weights, MAX_MODEL_LEN, CPU), 8, 4, 2, 32, MAX_MODEL_LEN,
            num_host_blocks=2, cache_dtype=cache_dtype,
        )
        for cache_dtype in (torch.float32, torch.float8_e4m3fn)
    ]  # fmt: skip
    whole, small = runners
    assert whole.kv_shape.bytes_per_token == 4 * small.kv_shape.bytes_per_token
    ids, table, errors = tuple(range(3, 24)), [3, 1, 7, 2, 5, 4], []
    for number, (start, stop) in enumerate(((0, 10), (10, 19), (19, 20), (20, 21))):
        row = placed(0, start, stop - start, ids[start:stop], table, stop > 18, PARAMS[1])
        results = [runner.submit(step_of(number, (row,))).result() for runner in runners]
        if row.row.samples:
            most = [max(each.logprobs[0][0].top, key=lambda pair: pair[1]) for each in results]
            errors.append(abs(most[0][1] - most[1][1]))
    assert all(0 < error < 1 for error in errors)
    rounded = whole._cache[:, 0].clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(rounded.view(torch.uint8), small._cache[:, 0].view(torch.uint8))

    part = (range(1, 2), range(1))
    read = small.read_blocks(*part, (3, 7)).result()
    assert len(read) == 2 * 2 * 4 * small.kv_shape.head_size
    small.write_blocks(*part, (6, 1), read)
    small.swap_out((6,), (1,))
    small.swap_in((1,), (2,))
    assert small.read_blocks(*part, (2, 1)).result() == read


async def test_an_engine_runs_on_it_as_on_a_cpus(loaded: LoadedModel) -> None:
    """With too little memory: requests are preempted, and swapped out and in, a step ahead of what was read."""
    heard = []
    for runner in (on_cpu(loaded, None), on_device(loaded, None, PADDED)):
        runner.num_blocks = 24
        async with machine(runner=runner, max_model_len=MAX_MODEL_LEN, max_num_seqs=4, preemption="swap", eos=256) as m:
            prompts = [tuple(range(3 * i, 3 * i + 9 + i)) for i in range(6)]
            wanted = [request(prompt, 30, temperature=0.5 * (i % 2), seed=i) for i, prompt in enumerate(prompts)]
            heard.append(await asyncio.gather(*(tokens(m.engine, each) for each in wanted)))
            assert m.seen.preemptions
    assert heard[0] == heard[1]


def test_a_device_is_chosen_by_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="m", served_model_names=("m",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert assembly.device_of(config).kind == "cpu"
    with pytest.raises(ConfigError, match="--device: cuda was asked for"):
        assembly.device_of(replace(config, device="cuda"))


def test_the_cache_of_a_gpu_takes_what_its_steps_leave(loaded: LoadedModel) -> None:
    config = EngineConfig(model="m", served_model_names=("m",), max_num_seqs=4, max_num_batched_tokens=32, block_size=4)
    block_bytes = loaded.config.kv_shape(torch.float32).bytes_per_block(4)
    asked: list[tuple[object, ...]] = []

    def measure(model: CudaModel, *sizes: object) -> int:
        asked.append(sizes)
        return 50 * block_bytes

    device = Device("cpu", "a GPU", 2**37)
    runner, planned = assembly._on_gpu(config, device, loaded, loaded.tokenizer, Guides(loaded.tokenizer, 320), measure)
    try:
        assert runner.num_blocks == 50
        assert planned.max_model_len == 49 * 4  # of the model's 512, what the cache holds
        assert asked == [(4, 4, 32, 512, 0.92, torch.float32)]
        assembly._first_token(runner)
    finally:
        runner.close()
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization: 0.5 of a GPU leaves 0 MiB"):
        assembly._on_gpu(
            replace(config, gpu_memory_utilization=0.5), device, loaded, loaded.tokenizer,
            Guides(loaded.tokenizer, 320), lambda *sizes: -1,
        )  # fmt: skip


def test_the_cache_of_a_gpu_may_be_asked_for_within_what_its_steps_leave(loaded: LoadedModel) -> None:
    config = EngineConfig(model="m", served_model_names=("m",), max_num_seqs=4, max_num_batched_tokens=32, block_size=4)
    guides = Guides(loaded.tokenizer, 320)
    device, left = Device("cpu", "a GPU", 2**37), lambda *sizes: 8 << 20
    asked = replace(config, kv_cache_mebibytes=1)
    runner, _ = assembly._on_gpu(asked, device, loaded, loaded.tokenizer, guides, left)
    runner.close()
    assert runner.num_blocks == loaded.config.kv_shape(torch.float32).blocks_in(1 << 20, 4)
    with pytest.raises(ConfigError, match=r"--kv-cache-mebibytes: 9 MiB do not fit; .* leaves 8 MiB"):
        assembly._on_gpu(replace(config, kv_cache_mebibytes=9), device, loaded, loaded.tokenizer, guides, left)


def test_eight_bits_of_kv_are_an_option_and_hold_four_times_the_tokens_of_32(loaded: LoadedModel) -> None:
    config = EngineConfig(model="m", served_model_names=("m",), max_num_seqs=4, max_num_batched_tokens=32, block_size=4)
    guides = Guides(loaded.tokenizer, 320)
    measured: list[object] = []

    def measure(model: CudaModel, *sizes: object) -> int:
        measured.append(sizes[-1])
        return 40 * loaded.config.kv_shape(torch.float32).bytes_per_block(4)

    made = []
    for kv_cache_dtype in ("auto", "fp8"):
        asked = replace(config, kv_cache_dtype=kv_cache_dtype)
        runner, _ = assembly._on_gpu(asked, Device("cpu"), loaded, loaded.tokenizer, guides, measure)
        assembly._first_token(runner)
        runner.close()
        made.append(runner)
    assert [runner.num_blocks for runner in made] == [40, 160]
    assert made[1].kv_shape.dtype_bytes == 1
    assert measured == [torch.float32, torch.float8_e4m3fn]


def test_what_a_swap_takes_is_measured_where_it_runs(loaded: LoadedModel) -> None:
    runner = CudaRunner(
        CudaModel(loaded.config, loaded.model.weights, MAX_MODEL_LEN, CPU), 8, 4, 2, 32, MAX_MODEL_LEN,
        num_host_blocks=2,
    )  # fmt: skip
    shape = runner.kv_shape
    try:
        assembly._first_token(runner, length=8)
        before = runner.read_blocks(range(shape.layers), range(shape.kv_heads), [1, 2]).result()
        speed = measure_swap(runner)
        assert runner.read_blocks(range(shape.layers), range(shape.kv_heads), [1, 2]).result() == before
    finally:
        runner.close()
    assert speed is not None
    assert speed > 0


def test_engines_that_keep_kv_differently_do_not_exchange_it(loaded: LoadedModel) -> None:
    """Nor does one find what the other computed by its prefix: both go by the fingerprint."""
    kinds = [assembly._fingerprint(loaded, 16, "none", kv_dtype) for kv_dtype in ("float32", "fp8", "fp8")]
    assert kinds[0] != kinds[1] == kinds[2]


def test_on_a_gpu_pages_are_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="m", served_model_names=("m",), block_size=24)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(assembly, "triton_is_there", True)
    with pytest.raises(ConfigError, match="--block-size: on a GPU a power of 2 is needed, not 24"):
        assembly.device_of(config)
    assert assembly.device_of(replace(config, device="cpu")) == Device("cpu")


@pytest.mark.parametrize("eager", [False, True])
def test_eager_means_steps_without_graphs(loaded: LoadedModel, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="m", served_model_names=("m",), max_num_seqs=4, enforce_eager=eager, block_size=4)
    made: list[GraphSizes] = []
    monkeypatch.setattr(assembly, "CudaRunner", lambda model, **options: made.append(options["sizes"]))
    assembly._on_gpu(
        config, Device("cpu"), loaded, loaded.tokenizer, Guides(loaded.tokenizer, 320), lambda *sizes: 8 << 20
    )
    assert bool(made[0].decode_rows) is bool(made[0].mixed_tokens) is not eager


def test_the_largest_steps_run(loaded: LoadedModel) -> None:
    runner = on_device(loaded, None)
    for step in largest_steps(4, 200, MAX_MODEL_LEN, 4):
        assert len(runner.submit(step).result().token_ids) == len(step.rows)
    assert [row.length for row in largest_steps(4, 200, 64, 4)[0].rows] == [64, 64, 64, 8]


def test_what_is_left_for_the_cache() -> None:
    assert cache_bytes_left(total=100 * 2**30, in_use=20 * 2**30, step_peak=5 * 2**30, share=0.9) == 59.5 * 2**30


def test_graph_sizes_hold_every_step_up_to_the_largest() -> None:
    sizes = graph_sizes(100, 512)
    assert sizes.decode_rows[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes.decode_rows[-1] == 100
    assert sizes.shape(65, 65, True, 100) == StepShape(72, 72, True)
    assert sizes.shape(3, 129, False, 100) == StepShape(192, 100, False)
    assert sizes.mixed_tokens[-1] == 512
    assert sizes.shape(3, 513, False, 100) == StepShape(513, 100, False)
    assert graph_sizes(1024, 8192).mixed_tokens[-1] == 2048
    shapes = sizes.shapes(100)
    assert [shape.tokens for shape in shapes] == sorted((shape.tokens for shape in shapes), reverse=True)


def test_a_step_that_cannot_be_changes_nothing(loaded: LoadedModel) -> None:
    runner = on_device(loaded, None)
    short = placed(0, 0, 7, (1,) * 7, (1,), True, PARAMS[0])
    good = short.replaced(block_ids=(1, 2))
    for bad, says in (
        (short, "7 tokens need 2 blocks of 4, the table has 1"),
        (good.replaced(token_ids=(1,)), "a row of 7 tokens came with 1 ids"),
        (good.replaced(slot=4), "slot 4 is outside"),
    ):
        with pytest.raises(ValueError, match=says):
            runner.submit(step_of(0, (bad,))).result()
    assert len(runner.submit(step_of(1, (good,))).result().token_ids[0]) == 1


def test_only_blocks_that_were_appended_are_sent(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    plain = device_batch.to_device

    def counted(array: np.ndarray, device: torch.device) -> torch.Tensor:
        if array.ndim == 2 and array.dtype == np.int64:
            sent.append(array.shape[1])
        return plain(array, device)

    monkeypatch.setattr(device_batch, "to_device", counted)
    runner = on_device(loaded, None)
    table = [1, 2]
    runner.submit(step_of(0, (placed(0, 0, 7, (1,) * 7, table, True, PARAMS[0]),))).result()
    params_and_table = sent.pop()
    for position in (7, 8, 9):
        if position == 8:
            table.append(3)
        row = placed(0, position, 1, (), table, True, PARAMS[0], use_last_sampled=True)
        runner.submit(step_of(0, (row,))).result()
    assert sent == [1]
    runner.submit(step_of(0, (placed(0, 0, 7, (1,) * 7, [5, 6], True, PARAMS[2]),))).result()
    assert sent == [1, params_and_table]


def test_the_host_plans_no_decodes_and_a_step_comes_back_in_one_copy(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(plain: Callable[..., object], *given: object) -> object:
        calls.append(plain.__name__)
        return plain(*given)

    for module, name in ((device_plans, "plan_on_host"), (cuda_runner, "_Copy")):
        monkeypatch.setattr(module, name, partial(counted, getattr(module, name)))
    runner = on_device(loaded, None)
    prompts = [(slot, params) for slot, params in enumerate((PARAMS[0], PARAMS[1], PARAMS[3], PARAMS[4]))]
    steps = [
        [placed(slot, 0, 7, (1,) * 7, [1 + 3 * slot, 2 + 3 * slot], True, params, seat=Seat((1,) * 7, ()))
         for slot, params in prompts],
        [placed(slot, 7, 1, (), [1 + 3 * slot, 2 + 3 * slot], True, params, use_last_sampled=True)
         for slot, params in prompts],
        [placed(0, 8, 1, (), [1, 2, 3], True, PARAMS[0], use_last_sampled=True)],
    ]  # fmt: skip
    for number, rows in enumerate(steps):
        calls.clear()
        result = runner.submit(step_of(number, tuple(rows))).result()
        assert calls == (["_Copy"] if number else ["plan_on_host", "_Copy"])
        assert all(len(tokens) == 1 for tokens in result.token_ids)


def test_a_step_of_nothing_writes_nothing(loaded: LoadedModel) -> None:
    """What graphs are made on, and what fills a step up to a graph's size."""
    runner = on_device(loaded, None)
    before = runner._batch.last_sampled.clone()
    with torch.inference_mode():
        for shape in (StepShape(4, 4, True), StepShape(32, 4, False)):
            runner._plans.send(device_batch.NOTHING)
            runner._batch.load(device_batch.NOTHING, shape)
            runner._forward(shape)
    assert runner._cache.isnan().all()
    assert torch.equal(runner._batch.last_sampled[:-1], before[:-1])


def test_columns_of_parameters_are_aligned_for_any_number_of_rows(loaded: LoadedModel) -> None:
    batch = on_device(loaded, None)._batch
    for count in range(1, 6):
        drawn = batch.params(torch.arange(count) % 4)
        for column in (drawn.temperature, drawn.top_p, drawn.min_p, drawn.repetition, drawn.presence, drawn.top_k):
            assert column.is_contiguous()
            assert column.shape == (count,)
            assert column.storage_offset() * column.itemsize % 16 == 0


def test_a_token_id_stays_in_the_vocabulary_where_there_are_no_numbers(loaded: LoadedModel) -> None:
    runner = on_device(loaded, None)
    row = placed(0, 4, 1, (5,), (1, 2), True, PARAMS[2])  # the first four were never written
    assert runner.submit(step_of(0, (row,))).result().errors == ((0, "the model's output is not finite"),)
    assert 0 <= int(runner._batch.last_sampled[0]) < loaded.config.vocab_size
