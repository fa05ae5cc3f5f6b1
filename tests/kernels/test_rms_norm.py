"""RMSNorm under the interpreter against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_kernels.rms_norm import (
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm_reference,
    rms_norm_triton,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def rows_apart(tokens: int, hidden: int, gap: int, dtype: torch.dtype) -> Tensor:
    """Random rows that lie `gap` NaNs apart."""
    storage = torch.full((tokens, hidden + gap), torch.nan, dtype=dtype)
    storage[:, :hidden] = torch.randn(tokens, hidden).to(dtype)
    return storage[:, :hidden]


def in_float64(x: Tensor, weight: Tensor, epsilon: float, plus_one: bool) -> Tensor:
    return rms_norm_reference(x.double(), weight.double(), epsilon, plus_one)


def assert_near(result: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(result.double(), truth, rtol=TOLERANCE[result.dtype], atol=TOLERANCE[result.dtype] / 10)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 5),
    hidden=st.integers(1, 300) | st.sampled_from([512, 576, 1152]),
    gap=st.sampled_from([0, 1, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    plus_one=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_norm_and_residual_equal_float64(
    tokens: int, hidden: int, gap: int, dtype: torch.dtype, plus_one: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, residual = rows_apart(tokens, hidden, gap, dtype), rows_apart(tokens, hidden, 2 * gap, dtype)
    weight = torch.randn(hidden).to(dtype)

    assert_near(rms_norm_triton(x, weight, 1e-5, plus_one), in_float64(x, weight, 1e-5, plus_one))

    summed = (x.float() + residual.float()).to(dtype)
    result = add_rms_norm_triton(x, residual, weight, 1e-5, plus_one)
    torch.testing.assert_close(residual, summed, rtol=0, atol=0)
    assert_near(result, in_float64(summed, weight, 1e-5, plus_one))


@pytest.mark.parametrize("plus_one", [False, True])
def test_the_kernel_rounds_where_the_reference_does(plus_one: bool) -> None:
    x, weight = torch.randn(64, 96).half(), torch.randn(96).half()
    kernel, reference = rms_norm_triton(x, weight, 1e-6, plus_one), rms_norm_reference(x, weight, 1e-6, plus_one)
    assert (kernel == reference).float().mean() > 0.99  # another order of summing moves a few by one unit

    residuals = torch.randn(64, 96).half()
    first, second = residuals.clone(), residuals.clone()
    kernel = add_rms_norm_triton(x, first, weight, 1e-6, plus_one)
    reference = add_rms_norm_reference(x, second, weight, 1e-6, plus_one)
    assert torch.equal(first, second)
    assert (kernel == reference).float().mean() > 0.99


@pytest.mark.parametrize("norm", [rms_norm_triton, rms_norm_reference])
def test_a_weight_of_another_size_is_refused(norm) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="hidden"):
        norm(torch.zeros(2, 8), torch.zeros(9), 1e-5)
    with pytest.raises(ValueError, match="adjacent"):
        norm(torch.zeros(8, 2).t(), torch.zeros(8), 1e-5)
