"""Gated units under the interpreter against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poolwright_kernels.gated_unit import gelu_mul_reference, gelu_mul_triton, silu_mul_reference, silu_mul_triton

PAIRS = [(silu_mul_triton, silu_mul_reference), (gelu_mul_triton, gelu_mul_reference)]


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 4),
    width=st.integers(1, 200) | st.sampled_from([1024, 1025, 1536]),
    gap=st.sampled_from([0, 3]),
    pair=st.sampled_from(PAIRS),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_gated_units_equal_float64(tokens: int, width: int, gap: int, pair, dtype: torch.dtype, seed: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    storage = torch.full((tokens, 2 * width + gap), torch.nan, dtype=dtype)
    storage[:, : 2 * width] = (4 * torch.randn(tokens, 2 * width)).to(dtype)
    kernel, reference = pair
    gate_up = storage[:, : 2 * width]
    result, truth = kernel(gate_up), reference(gate_up.double())
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(result.double(), truth, rtol=tolerance, atol=tolerance / 10)
    # PyTorch's own 1 + tanh cancels where the gate is far below 0.
    torch.testing.assert_close(reference(gate_up).double(), truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kernel", "reference"), PAIRS)
def test_large_gates_neither_overflow_nor_vanish(kernel, reference) -> None:  # type: ignore[no-untyped-def]
    gate_up = torch.tensor([[-1e4, -300.0, -90.0, 0.0, 90.0, 1e4, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]])
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 180.0, 2e4]])
    torch.testing.assert_close(kernel(gate_up), expected)
    torch.testing.assert_close(reference(gate_up), expected)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="2 · width"):
        silu_mul_triton(torch.zeros(2, 5))
