"""Hybrid attention under the interpreter against float64, over batches poisoned with NaN."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_kernels.attention_plan import AttentionPlan
from poolwright_kernels.attention_reference import hybrid_attention_reference
from poolwright_kernels.attention_tiles import Tiles, tiles_for
from poolwright_kernels.decode_plan import plan_on_device
from poolwright_kernels.hybrid_attention import hybrid_attention, hybrid_attention_triton, reciprocal_of
from support.attention_batch import AttentionBatch, attention_batch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}


def arguments(batch: AttentionBatch, plan: AttentionPlan, output: Tensor, window: int, soft_cap: float) -> tuple:
    return (
        batch.query,
        batch.key_cache,
        batch.value_cache,
        output,
        plan.query_starts,
        plan.context_lens,
        plan.block_tables,
        plan.lane_ranges,
        plan.counts,
        plan.large_items,
        plan.small_items,
        plan.merges,
        plan.partial_output,
        plan.partial_lse,
        plan.layout.tiles.launch,
        plan.layout.has_chunks,
        batch.scale,
        window,
        soft_cap,
        None,
        None,
    )


def attended(
    batch: AttentionBatch, plan: AttentionPlan, window: int = 0, soft_cap: float = 0.0, run=hybrid_attention_triton
) -> Tensor:
    output = torch.full_like(batch.query, torch.nan)
    run(*arguments(batch, plan, output, window, soft_cap))
    return output


def assert_near(output: Tensor, truth: Tensor) -> None:
    error = (output.double() - truth).abs().max() / truth.abs().max()
    assert error < TOLERANCE[output.dtype]  # and so NaN nowhere


@st.composite
def lens_of(draw: st.DrawFn, page_size: int) -> list[tuple[int, int]]:
    lens = []
    for _ in range(draw(st.integers(1, 4))):
        pages = draw(st.integers(0, max(112 // page_size, 2)))
        context = max(1, pages * page_size + draw(st.integers(-1, 1)))
        query = draw(st.just(1) | st.integers(1, min(context, 40)))
        lens.append((query, context))
    return lens


def drawn_batch_equals_float64(data: st.DataObject) -> None:
    draw = data.draw
    page_size = draw(st.sampled_from([16, 32, 64]), "page size")
    batch = attention_batch(
        draw(lens_of(page_size), "queries and contexts"),
        group=draw(st.sampled_from([1, 3, 4, 7, 8]), "group"),
        kv_heads=draw(st.integers(1, 2), "KV heads"),
        head_size=draw(st.sampled_from([16, 32, 48]), "head size"),
        page_size=page_size,
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float16]), "dtype"),
        seed=draw(st.integers(0, 2**31), "seed"),
    )
    keys = draw(st.sampled_from([16, 32]), "keys of a tile")
    tiles = Tiles(32, keys, 3, 16, keys, 5, 4, 1, one_large_loop=draw(st.booleans(), "one large loop"))
    window = draw(st.just(0) | st.integers(1, 70), "window")
    soft_cap = draw(st.just(0.0) | st.sampled_from([3.0, 20.0]), "soft cap")
    layout = batch.layout(draw(st.integers(1, 5), "lanes"), tiles)
    plan = batch.planned(layout, window if draw(st.booleans(), "the plan knows the window") else 0)
    assert_near(attended(batch, plan, window, soft_cap), batch.truth(window, soft_cap))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_kernel_equals_float64(data: st.DataObject) -> None:
    drawn_batch_equals_float64(data)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_kernel_equals_float64_over_many_batches(data: st.DataObject) -> None:
    drawn_batch_equals_float64(data)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("window", [0, 50])
def test_decodes_planned_on_the_device_equal_float64(tokens: int, window: int) -> None:
    batch = attention_batch([(tokens, 300), (tokens, 33), (tokens, tokens), (tokens, 64)], group=4)
    _, plan = batch.buffers(batch.layout(6, has_chunks=False), window)
    plan_on_device(plan, tokens)
    assert (plan.merges[: plan.counts[2], 4] > 1).any() == (window == 0)  # the long sequence was split
    assert_near(attended(batch, plan, window), batch.truth(window))


def test_a_chunk_after_a_long_context_is_split_and_merged() -> None:
    batch = attention_batch([(9, 1200), (1, 40)], group=1, kv_heads=1, head_size=16)
    plan = batch.planned(batch.layout(4))
    assert plan.counts[2] == 9  # a merge for each token of the chunk
    assert_near(attended(batch, plan), batch.truth())


@pytest.mark.parametrize(
    ("head_size", "group", "capability"), [(64, 3, 90), (96, 4, 90), (128, 8, 90), (256, 2, 90), (256, 4, 100)]
)
def test_the_tiles_that_serve_equal_float64(head_size: int, group: int, capability: int) -> None:
    batch = attention_batch([(20, 90), (1, 130), (1, 1)], group, kv_heads=1, head_size=head_size)
    plan = batch.planned(batch.layout(2, tiles_for(head_size, group, has_chunks=True, capability=capability)))
    assert_near(attended(batch, plan), batch.truth())
    decodes = attention_batch([(1, 290), (1, 64)], group, kv_heads=1, head_size=head_size)
    plan = decodes.planned(decodes.layout(3, tiles_for(head_size, group, has_chunks=False), has_chunks=False))
    assert_near(attended(decodes, plan), decodes.truth())


@pytest.mark.parametrize("group", [17, 71, 128])
def test_groups_beyond_the_rows_of_a_small_tile_equal_float64(group: int) -> None:
    """Of which no launch is compiled ahead of time: small tiles grow, and a tile may hold one token alone."""
    batch = attention_batch([(4, 40), (1, 70), (1, 1)], group, kv_heads=1 + (group < 20), head_size=16)
    for has_chunks, window, soft_cap in ((True, 0, 0.0), (True, 33, 5.0)):
        plan = batch.planned(batch.layout(3, tiles_for(16, group, has_chunks)), window)
        assert_near(attended(batch, plan, window, soft_cap), batch.truth(window, soft_cap))
    decodes = attention_batch([(1, 290), (1, 64), (1, 17)], group, kv_heads=1, head_size=16, dtype=torch.float16)
    _, plan = decodes.buffers(decodes.layout(4, tiles_for(16, group, has_chunks=False), has_chunks=False))
    plan_on_device(plan)
    assert (plan.merges[: plan.counts[2], 4] > 1).any()
    assert_near(attended(decodes, plan), decodes.truth())


def test_tiles_hold_a_token_of_every_group_and_share_the_registers_there_are() -> None:
    for head_size in (64, 96, 128, 256):
        for group in range(1, 129):
            for has_chunks in (True, False):
                tiles = tiles_for(head_size, group, has_chunks)
                assert min(tiles.small_tokens(group), tiles.large_tokens(group)) >= 1
                assert tiles.registers * 32 * tiles.warps * tiles.programs_per_multiprocessor <= 65536
    for head_size, group, message in ((257, 1, "head size 257"), (64, 129, "129 query heads")):
        with pytest.raises(ValueError, match=message):
            tiles_for(head_size, group, has_chunks=True)


def test_reference_equals_float64() -> None:
    for window, soft_cap in ((0, 0.0), (21, 0.0), (0, 5.0)):
        batch = attention_batch([(1, 33), (17, 50), (8, 8)], group=3)
        plan = batch.planned(batch.layout(2))
        assert_near(attended(batch, plan, window, soft_cap, hybrid_attention_reference), batch.truth(window, soft_cap))


@pytest.mark.parametrize("run", [hybrid_attention_triton, hybrid_attention_reference])
def test_a_float8_cache_is_multiplied_by_its_scales(run) -> None:  # type: ignore[no-untyped-def]
    batch = attention_batch([(1, 40), (20, 33)], group=2)
    plan = batch.planned(batch.layout(2))
    output = torch.full_like(batch.query, torch.nan)
    key_scale, value_scale = torch.tensor([0.5]), torch.tensor([3.0])
    keys, values = (
        (cache / scale).to(torch.float8_e4m3fn)
        for cache, scale in ((batch.key_cache, key_scale), (batch.value_cache, value_scale))
    )
    rest = arguments(batch, plan, output, 0, 0.0)[4:-2]
    run(batch.query, keys, values, output, *rest, key_scale, value_scale)
    error = (output.double() - batch.truth()).abs().max() / batch.truth().abs().max()
    assert 1e-4 < error < 0.1  # three bits of mantissa
    wide = torch.full_like(batch.query, torch.nan)
    run(batch.query, keys.float(), values.float(), wide, *rest, key_scale, value_scale)
    torch.testing.assert_close(output, wide, rtol=1e-5, atol=1e-6)


def test_padding_is_left_as_it_was() -> None:
    batch = attention_batch([(1, 20), (0, 0), (3, 3), (0, 0)])
    plan = batch.planned(batch.layout(2))
    query = torch.cat([batch.query, torch.full_like(batch.query[:2], torch.nan)])
    for run in (hybrid_attention_triton, hybrid_attention_reference):
        output = torch.full_like(query, 7.0)
        run(query, *arguments(batch, plan, output, 0, 0.0)[1:])
        assert_near(output[:4], batch.truth())
        assert (output[4:] == 7.0).all()


def test_the_operation_obeys_torch_library() -> None:
    batch = attention_batch([(1, 20), (5, 9)])
    plan = batch.planned(batch.layout(2))
    assert_near(hybrid_attention(batch.query, batch.key_cache, batch.value_cache, plan, batch.scale), batch.truth())
    plan.partial_output.zero_()  # opcheck compares arguments, and NaN equals nothing
    plan.partial_lse.zero_()
    output = torch.zeros_like(batch.query)
    torch.library.opcheck(
        torch.ops.poolwright.hybrid_attention.default,
        arguments(batch, plan, output, 0, 0.0),
    )


def test_what_does_not_fit_is_refused() -> None:
    batch = attention_batch([(1, 20), (5, 9)])
    query, keys, values, scale = batch.query, batch.key_cache, batch.value_cache, batch.scale
    plan = batch.planned(batch.layout(2))
    windowed = batch.planned(batch.layout(2), window=8)
    for message, call in {
        "the window is open": lambda: hybrid_attention(query, keys, values, windowed, scale),
        "the window is 9": lambda: hybrid_attention(query, keys, values, windowed, scale, window=9),
        "does not fit": lambda: hybrid_attention(query[..., :16], keys, values, plan, scale),
        "laid out differently": lambda: hybrid_attention(query, keys, values[:-1], plan, scale),
        "go together": lambda: hybrid_attention(query.half(), keys, values, plan, scale),
        "is not like query": lambda: hybrid_attention(query, keys, values, plan, scale, output=query[:1]),
        "the plan is for": lambda: hybrid_attention(query, keys[:, :8], values[:, :8], plan, scale),
        "heads": lambda: hybrid_attention(query[:, :2], keys, values, plan, scale),
        "adjacent": lambda: hybrid_attention(
            query.transpose(1, 2).contiguous().transpose(1, 2), keys, values, plan, scale
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_pages_that_are_no_power_of_two_are_refused() -> None:
    batch = attention_batch([(1, 20)], page_size=12)
    with pytest.raises(ValueError, match="pages of 12 tokens: the kernel needs a power of 2"):
        attended(batch, batch.planned(batch.layout(1)))


def test_a_row_is_divided_by_every_group_exactly() -> None:
    for group in range(1, 129):
        assert [row * reciprocal_of(group) >> 16 for row in range(128)] == [row // group for row in range(128)]


# Triton decides from the arguments of a launch alone for what it is compiled, so no GPU is needed to ask. An
# interpreting process cannot: another launches random batches of models with many numbers of heads, and prints which
# compilations they would have made, and whether each is of exactly what the tables of compiled kernels were made of.
COUNT_COMPILATIONS = """
import random
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton._utils import find_paths_if, get_iterable_path
from poolwright_kernels import decode_plan, hybrid_attention
from poolwright_kernels.attention_cases import ahead_of_time_cases
from poolwright_kernels.attention_plan import PlanCapacity
from poolwright_kernels.attention_tiles import tiles_for
from support.attention_batch import attention_batch
from test_hybrid_attention import arguments

found = {}
cases = {case.label: case for case in ahead_of_time_cases(64, 1, 90, "fp16", window=True)}
def record(name, kernel):
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    case = cases[name]
    def run(*arguments, grid, warmup, **options):
        assert grid[0] > 0
        bound, specialization, _ = bind(*arguments, **options, debug=False)
        types, marks = ([each[i] for each in specialization] for i in (0, 1))
        asked = (
            dict(zip(kernel.arg_names, types)),
            {path: get_iterable_path(list(bound.values()), path)
             for path in find_paths_if(types, lambda _, type: type == "constexpr")},
            {path: backend.parse_attr(get_iterable_path(marks, path))
             for path in find_paths_if(marks, lambda _, mark: isinstance(mark, str))},
            {option: value for option, value in options.items() if option not in kernel.arg_names},
        )
        proven = asked == (case.signature, case.constexprs, case.attrs, case.options)
        found.setdefault(name, set()).add((str(asked), proven))
    kernel.run = run
record("mixed" if HAS_CHUNKS else "decode", hybrid_attention.hybrid_attention_kernel)
record("merge", hybrid_attention.merge_kernel)
record("plan", decode_plan.decode_plan_kernel)

draw = random.Random(0)
capacity = PlanCapacity(1000, 1000)
for _ in range(20):
    group, kv_heads, page_size = draw.choice((1, 3, 4, 7, 8, 16)), draw.choice((1, 2, 5)), draw.choice((4, 16, 32, 64))
    lens = [(q, q + draw.randrange(300)) for q in (draw.choice((1, 1, 16, 17)) for _ in range(draw.randint(1, 32)))]
    batch = attention_batch(lens, group, kv_heads, 64, page_size, torch.float16)
    tiles = tiles_for(64, group, HAS_CHUNKS)
    layout = batch.layout(draw.choice((1, 4, 16)), tiles, HAS_CHUNKS, capacity)
    _, plan = batch.buffers(layout, window=draw.choice((1, 16, 100)))
    if not HAS_CHUNKS:
        decode_plan.plan_on_device(plan)
    output = torch.empty_like(batch.query, memory_format=torch.contiguous_format)
    hybrid_attention.hybrid_attention_triton(*arguments(batch, plan, output, plan.window, 0.0))
print(sorted((name, [proven for _, proven in kinds]) for name, kinds in found.items()))
"""


@pytest.mark.parametrize("has_chunks", [True, False])
def test_no_batch_and_no_number_of_heads_compiles_anew(has_chunks: bool) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", f"HAS_CHUNKS = {has_chunks}\n{COUNT_COMPILATIONS}"],
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{here}:{here.parent}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = ["merge", "mixed"] if has_chunks else ["decode", "merge", "plan"]
    assert done.stdout.strip() == str([(kernel, [True]) for kernel in kernels])
