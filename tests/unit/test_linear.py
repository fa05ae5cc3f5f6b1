"""Every form of a product gives the product; how it is chosen; what fewer bits cost."""

import itertools
import logging
import platform
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from poolwright_engine.model.linear import (
    AUTO,
    ROW_BOUNDS,
    Form,
    Int4Linear,
    Int8Linear,
    Linear,
    Quantization,
    _by_shape,
    _parts,
    choose_forms,
    fastest,
    give_back_freed_memory,
    joined,
    quantized,
    use_huge_pages,
)
from poolwright_engine.native.library import CpuOperations

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def _fine(weight: Tensor, bias: Tensor | None = None) -> Linear:
    return Int8Linear(weight, bias, fine=True)


ROWS = [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 128, 129, 512, 600]


def linear(
    out_features: int = 96, in_features: int = 64, bias: bool = False, dtype: torch.dtype = torch.float32
) -> Linear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).mul_(0.05).to(dtype)
    return Linear(weight, torch.randn(out_features, generator=generator).to(dtype) if bias else None)


@pytest.mark.parametrize(("form", "bias"), list(itertools.product(Form, [False, True])))
def test_every_form_gives_the_product_for_every_number_of_rows(form: Form, bias: bool) -> None:
    product = linear(bias=bias)
    weight = product.weight.double()
    choose_forms([product], form)
    for rows in ROWS:
        x = torch.randn(rows, 64)
        expected = x.double() @ weight.T + (0 if product.bias is None else product.bias.double())
        torch.testing.assert_close(product(x).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", list(Form))
def test_every_form_gives_the_product_in_bfloat16(form: Form) -> None:
    product = linear(bias=True, dtype=torch.bfloat16)
    weight, bias = product.weight.double(), product.bias
    choose_forms([product], form)
    assert bias is not None
    for rows in ROWS:
        x = torch.randn(rows, 64).bfloat16()
        found = product(x)
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.double(), x.double() @ weight.T + bias.double(), atol=2e-2, rtol=2e-2)


def test_an_input_by_columns_gives_the_same() -> None:
    x = torch.randn(64, 7).t()
    for form in Form:
        product = linear()
        expected = product(x.contiguous())
        choose_forms([product], form)
        torch.testing.assert_close(product(x), expected, atol=1e-5, rtol=1e-5)


def test_a_choice_is_made_once_for_each_shape_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    products = [linear(), linear(32, 64), linear()]
    choices = choose_forms(products, AUTO, limit_seconds=0.5)
    assert [(choice.out_features, choice.in_features) for choice in choices] == [(96, 64), (32, 64)]
    assert all(len(choice.forms) == len(ROW_BOUNDS) for choice in choices)
    assert any(choice.microseconds[0] for choice in choices)
    assert "Product 96×64" in caplog.text


def test_without_time_to_measure_products_stay_as_they_are_stored() -> None:
    product = linear()
    (choice,) = choose_forms([product], AUTO, limit_seconds=0.0)
    assert set(choice.forms) == {Form.ROWS}
    assert product.weight.shape == (96, 64)


def test_packed_is_chosen_for_all_buckets_or_none() -> None:
    slower_once = [{Form.ROWS: 1.0, Form.COLUMNS: 2.0, Form.PACKED: 1.2}] + 4 * [
        {Form.ROWS: 2.0, Form.COLUMNS: 3.0, Form.PACKED: 1.0}
    ]
    assert fastest(slower_once) == (Form.PACKED,) * 5
    not_worth_it = 5 * [{Form.ROWS: 2.0, Form.COLUMNS: 1.0, Form.PACKED: 0.99}]
    assert fastest(not_worth_it) == (Form.COLUMNS,) * 5
    assert fastest([{Form.ROWS: 2.0, Form.COLUMNS: 1.0}, {}]) == (Form.COLUMNS, Form.ROWS)
    known_of_one_row_only = [{Form.ROWS: 2.0, Form.PACKED: 0.1}, {}, {}, {}]
    assert fastest(known_of_one_row_only) == (Form.ROWS,) * 4


def test_packing_lets_go_of_the_weight_and_an_unknown_form_is_refused() -> None:
    product = linear()
    choose_forms([product], Form.PACKED)
    with pytest.raises(RuntimeError, match="was packed"):
        _ = product.weight
    with pytest.raises(ValueError, match="'fast' is none of auto, rows, columns, filled, blocks, packed"):
        choose_forms([linear()], "fast")


@pytest.mark.parametrize(("kind", "most"), [(Int8Linear, 0.02), (_fine, 0.01), (Int4Linear, 0.12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fewer_bits_cost_a_bounded_part_of_the_result(
    kind: Callable[[Tensor, Tensor | None], Linear], most: float, dtype: torch.dtype
) -> None:
    plain = linear(bias=True, dtype=dtype)
    before = plain.weight.clone()
    small = kind(plain.weight, plain.bias)
    assert torch.equal(plain.weight, before)
    for rows in ROWS:
        x = torch.randn(rows, 64).to(dtype)
        found, expected = small(x), plain(x)
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        assert (found.float() - expected.float()).norm() <= most * expected.float().norm()


def test_fine_inputs_keep_small_elements_beside_a_large_one() -> None:
    weight, x = linear().weight, torch.randn(3, 64)
    x[:, 7] = 500.0
    weight[:, 7] = 0.0
    expected = x @ weight.T
    assert (Int8Linear(weight, fine=True)(x) - expected).norm() < 0.02 * expected.norm()
    assert (Int8Linear(weight)(x) - expected).norm() > 0.2 * expected.norm()


@pytest.mark.parametrize("kind", [Int8Linear, _fine, Int4Linear])
def test_a_row_in_fewer_bits_does_not_depend_on_the_rows_beside_it(kind: Callable[[Tensor], Linear]) -> None:
    product = kind(linear().weight)
    x = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    alone = torch.cat([product(row[None]) for row in x])
    differences = (product(x) - alone).norm(dim=1) / alone.norm(dim=1)
    assert differences.max() < (1e-2 if kind is Int4Linear else 1e-6)


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_zeros_stay_zeros_in_fewer_bits(kind: type[Linear]) -> None:
    assert not kind(torch.zeros(32, 64))(torch.randn(3, 64)).any()
    assert not kind(linear().weight)(torch.zeros(3, 64)).any()


def test_weights_that_were_made_in_groups_of_4_bits_come_back_nearly_as_they_were() -> None:
    levels = torch.randint(0, 16, (32, 2, 32))
    levels[..., 0], levels[..., 1] = 0, 15
    weight = (levels * 0.0078125 - 0.0625).flatten(1)
    x = torch.eye(64)
    torch.testing.assert_close(Int4Linear(weight)(x).T, weight, atol=1e-3, rtol=1e-2)


def test_the_head_and_shapes_that_do_not_fit_are_not_made_4_bits() -> None:
    weight = torch.randn(32, 64)
    assert isinstance(
        quantized(Quantization.INT4, CpuOperations.TORCH, "model.layers.0.mlp.down_proj", weight, None), Int4Linear
    )
    assert isinstance(quantized(Quantization.INT4, CpuOperations.TORCH, "lm_head", weight, None), Int8Linear)
    assert isinstance(
        quantized(Quantization.INT4, CpuOperations.TORCH, "model.layers.0.mlp.down_proj", torch.randn(40, 64), None),
        Int8Linear,
    )
    assert isinstance(quantized(Quantization.INT8, CpuOperations.TORCH, "lm_head", weight, None), Int8Linear)


def test_choosing_leaves_products_of_fewer_bits_alone() -> None:
    small, x = Int8Linear(linear().weight), torch.randn(2, 64)
    before = small(x)
    assert choose_forms([small], AUTO) == ()
    assert torch.equal(small(x), before)


def test_huge_pages_are_asked_for_whole_ones_only_and_leave_memory_as_it_was() -> None:
    assert use_huge_pages([(4096, 100)]) == 0
    tensor = torch.arange(6 * 2**20, dtype=torch.int32)
    asked = use_huge_pages([(tensor.data_ptr(), tensor.nbytes)])
    assert asked in range(0, tensor.nbytes + 1, 2**21)
    assert torch.equal(tensor, torch.arange(6 * 2**20, dtype=torch.int32))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc, which keeps what was freed")
def test_what_weights_leave_behind_goes_back_to_the_system() -> None:
    weights = [torch.ones(25_000) for _ in range(1000)]  # small enough for the heap
    kept = weights[-1]  # above all others, so that the heap cannot shrink by itself
    del weights
    before = resident_bytes()
    give_back_freed_memory()
    assert resident_bytes() < before - 50 * 2**20
    assert kept.sum() == 25_000


def test_neighbours_in_memory_arejoined() -> None:
    assert joined([(1000, 100), (1116, 50), (2**20, 10)]) == [(1000, 1166), (2**20, 2**20 + 10)]


def test_parts_of_a_model_have_every_shape_and_nothing_is_lost() -> None:
    layers = [product for _ in range(10) for product in (linear(), linear(32, 64))]
    head = linear(128, 64)
    parts = _parts([*layers, head], _by_shape([*layers, head]))
    assert len(parts) > 1
    assert {id(product) for part in parts for product in part} == {id(product) for product in [*layers, head]}
    for part in parts:
        assert {product.out_features for product in part} == {96, 32, 128}
        assert part[-1] is head
