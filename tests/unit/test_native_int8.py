"""The product of 8 bits in C: exact sums, every row by itself, the same on every kind of CPU."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_engine.model.linear import Int8Linear
from poolwright_engine.native import int8_product
from poolwright_engine.native.int8_product import MOST_INPUTS, Int8Product, packed
from poolwright_engine.native.library import LEVELS, NoLibrary, compile_into, level, library

pytestmark = pytest.mark.usefixtures("one_torch_thread")

try:
    library()
except NoLibrary as e:
    pytest.skip(f"no C library: {e}", allow_module_level=True)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def weights(out_features: int, in_features: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(-127, 128, (out_features, in_features), generator=generator, dtype=torch.int8)
    return levels, torch.rand(out_features, generator=generator).add_(0.5).div_(100)


def rows(count: int, in_features: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Some large, some small, as rows of a model are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, in_features, generator=generator)
    return (x * torch.logspace(-2, 2, count)[:, None]).to(dtype)


def product(out_features: int, in_features: int, fine: bool = False, bias: Tensor | None = None) -> Int8Product:
    return Int8Product(*weights(out_features, in_features), bias, fine)


def reference(levels: Tensor, scales: Tensor, x: Tensor, fine: bool) -> Tensor:
    """Levels by true division, sums in int64, then one rounding for each of the steps to float32."""
    steps = x.float().abs().amax(1, keepdim=True).clamp_min(1e-12).div(127)
    exact = x.float() / steps
    rounded = exact.round()
    sums = rounded.long() @ levels.long().T
    if fine:
        sums = 254 * sums + ((exact - rounded) * 254).round().long() @ levels.long().T
        steps = steps / 254
    return (sums.float() * scales * steps).to(x.dtype)


@settings(max_examples=80, deadline=None)
@given(
    out_features=st.integers(1, 140),
    in_features=st.integers(1, 300) | st.sampled_from([1040, 1041, 1600]),  # sums of up to 1040 are float32
    count=st.integers(1, 70),
    fine=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 2**32 - 1),
)
@example(1, 1040, 24, True, torch.float32, 466287)  # a fine level that ties only once its product is rounded
def test_sums_are_exact_for_every_shape(
    out_features: int, in_features: int, count: int, fine: bool, dtype: torch.dtype, seed: int
) -> None:
    levels, scales = weights(out_features, in_features, seed)
    x = rows(count, in_features, dtype, seed + 1)
    found = Int8Product(levels, scales, None, fine)(x)
    assert found.is_contiguous()
    assert found.dtype is dtype
    assert torch.equal(found, reference(levels, scales, x, fine))


@pytest.mark.parametrize("fine", [False, True])
def test_the_largest_sums_do_not_overflow(fine: bool) -> None:
    levels = torch.full((33, MOST_INPUTS), 127, dtype=torch.int8)
    levels[1] = -127
    scales = torch.ones(33)
    x = torch.ones(9, MOST_INPUTS)
    assert torch.equal(Int8Product(levels, scales, None, fine)(x), reference(levels, scales, x, fine))
    with pytest.raises(ValueError, match="65537 inputs are more than 65536"):
        Int8Product(torch.zeros(1, MOST_INPUTS + 1, dtype=torch.int8), torch.ones(1))


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_gives_what_the_product_of_single_operations_gives(fine: bool, dtype: torch.dtype) -> None:
    weight = torch.randn(100, 200).mul_(0.05).to(dtype)
    bias = torch.randn(100).to(dtype)
    scales = weight.float().abs().amax(1).div_(127)
    levels = (weight.float() / scales[:, None]).round_().to(torch.int8)
    before, now = Int8Linear(weight, bias, fine), Int8Product(levels, scales, bias, fine)
    for count in (1, 2, 5, 16, 33, 300):
        x = rows(count, 200, dtype)
        found, expected = now(x).double(), before(x).double()
        bound = expected.abs().amax(1, keepdim=True) * (2e-6 if dtype is torch.float32 else 2**-7)
        assert ((found - expected).abs() <= bound).all()


@settings(max_examples=40, deadline=None)
@given(count=st.integers(2, 100), in_features=st.integers(1, 200), fine=st.booleans(), dtype=DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    count: int, in_features: int, fine: bool, dtype: torch.dtype
) -> None:
    multiply = product(70, in_features, fine, torch.randn(70))
    x = rows(count, in_features, dtype)
    together = multiply(x)
    assert torch.equal(together, torch.cat([multiply(row[None]) for row in x]))
    assert torch.equal(together[1:], multiply(x[1:]))


@pytest.mark.parametrize("fine", [False, True])
def test_results_do_not_depend_on_the_number_of_threads(fine: bool) -> None:
    multiply = product(330, 700, fine, torch.randn(330))
    for count in (1, 4, 40, 700):
        x = rows(count, 700)
        alone = multiply(x)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(multiply(x), alone)
        torch.set_num_threads(1)


def test_rows_may_lie_anywhere() -> None:
    multiply = product(40, 50)
    wide = rows(12, 200, torch.bfloat16)
    expected = multiply(wide[:, 50:100].contiguous())
    assert torch.equal(multiply(wide[:, 50:100]), expected)
    assert torch.equal(multiply(wide[:, 50:100].t().contiguous().t()), expected)
    assert torch.equal(multiply(wide[:, 50:100][::3]), expected[::3])
    assert torch.equal(multiply(wide[:1, 50:100].expand(4, -1)), expected[:1].expand(4, -1))


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_not_finite_has_no_result_and_the_others_keep_theirs(fine: bool, dtype: torch.dtype) -> None:
    multiply = product(40, 50, fine)
    for count in (6, 40):
        x = rows(count, 50, dtype)
        expected = multiply(x)
        for row, bad in ((1, torch.nan), (2, torch.inf), (4, -torch.inf)):
            x[row, 7 * row] = bad
            expected[row] = torch.nan
        torch.testing.assert_close(multiply(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fine", [False, True])
def test_zeros_give_the_bias_and_no_rows_give_none(fine: bool) -> None:
    bias = torch.randn(40)
    multiply = product(40, 50, fine, bias)
    assert torch.equal(multiply(torch.zeros(3, 50)), bias.expand(3, -1))
    assert multiply(torch.zeros(0, 50)).shape == (0, 40)
    assert not product(40, 50, fine)(torch.zeros(9, 50)).any()


@pytest.mark.parametrize("fine", [False, True])
def test_the_largest_and_smallest_elements_keep_their_levels(fine: bool) -> None:
    levels, scales = weights(40, 64)
    for size in (3.3e38, 1e30, 1e-9, 1e-12, 1e-14, 1e-40):
        x = rows(1, 64) * 0.05 * size
        x[0, 3] = size
        found, expected = Int8Product(levels, scales, None, fine)(x), reference(levels, scales, x, fine)
        assert torch.equal(found, expected), size


def test_another_type_of_element_comes_back_and_other_sizes_are_refused() -> None:
    multiply, x = product(40, 50), rows(3, 50)
    assert torch.equal(multiply(x.half()), multiply(x.half().float()).half())
    with pytest.raises(ValueError, match="rows of 49 for a weight with 50 inputs"):
        multiply(x[:, 1:])


def test_a_packed_weight_has_four_inputs_of_32_outputs_side_by_side() -> None:
    levels, _ = weights(70, 130)
    panels = packed(levels)
    assert panels.shape == (3, 48, 32, 4)
    assert panels.is_contiguous()
    for out, into in ((0, 0), (31, 129), (69, 66), (33, 5)):
        assert panels[out // 32, into // 4, out % 32, into % 4] == levels[out, into].int() + 128
    assert (panels[2, :, 6:] == 128).all()
    assert (panels[:, 33:] == 128).all()


def test_weights_made_one_after_the_other_lie_side_by_side_and_live_as_long_as_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int8_product, "_shelves", int8_product._Shelves())
    first, second, large = product(40, 50), product(70, 130), product(2**15, 2**11 + 1)
    assert second.packed.data_ptr() - first.packed.data_ptr() == first.packed.nbytes
    assert large.packed.nbytes > 2**26
    x = rows(2, 130)
    expected = second(x)
    del first, large
    assert torch.equal(second(x), expected)


def test_weights_may_be_made_in_inference_mode_and_out_of_it() -> None:
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            multiply = product(40, 50)
            assert multiply(rows(2, 50)).shape == (2, 40)


WORSE = [kind for kind in LEVELS if list(LEVELS).index(kind) > list(LEVELS).index(level())]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    folder: Path = tmp_path_factory.mktemp("native")
    return lambda kind: ctypes.CDLL(str(compile_into(folder, kind)))


@pytest.mark.parametrize("kind", WORSE)
def test_other_kinds_of_cpu_give_the_same_bits(
    kind: str, compiled: Callable[[str], ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(45, 200, False), (45, 200, True), (70, 1100, True)]
    here = [product(*shape) for shape in shapes]
    other = compiled(kind)
    monkeypatch.setattr(int8_product, "library", lambda: other)
    for shape, multiply in zip(shapes, here, strict=True):
        there = product(*shape)
        for count in (1, 2, 3, 8, 40):
            x = rows(count, multiply.in_features, torch.bfloat16)
            assert torch.equal(there(x), multiply(x))
