"""The element-wise C operations beside PyTorch's, for any sizes and any way a product lets its result lie."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_engine.model.operations import Turns
from poolwright_engine.native.elementwise import Elementwise
from poolwright_engine.native.library import CpuOperations, is_native
from poolwright_kernels.rms_norm import add_rms_norm_reference

pytestmark = pytest.mark.skipif(not is_native(CpuOperations.AUTO), reason="no library of C operations")

DTYPES = [torch.float32, torch.bfloat16]
# Two roundings to the type may fall to two sides, and what follows rounds once more.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
LAYOUTS = ["tokens", "features", "padded features", "apart"]


def laid(x: Tensor, layout: str) -> Tensor:
    """The same numbers: elements of a token adjacent, tokens adjacent, those with a gap, or nothing adjacent."""
    tokens, size = x.shape
    if layout == "tokens":
        return x.clone()
    if layout == "features":
        return x.t().contiguous().t()
    if layout == "padded features":
        padded = torch.full((size, tokens + 5), torch.nan, dtype=x.dtype).t()[:tokens]
    else:
        padded = torch.full((tokens, 2 * size), torch.nan, dtype=x.dtype)[:, ::2]
    return padded.copy_(x)


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.float(), expected.float(), rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype] / 4)


drawn = given(
    tokens=st.sampled_from([1, 2, 7, 16, 17, 64, 65, 257]),
    size=st.sampled_from([1, 2, 31, 64, 65, 576]),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)


@settings(max_examples=60, deadline=None)
@drawn
def test_add_norm(tokens: int, size: int, layout: str, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, added = (torch.randn(tokens, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(size, generator=generator).to(dtype)
    expected_sum = hidden.clone()
    expected = add_rms_norm_reference(added, expected_sum, weight, 1e-5)
    found = Elementwise(dtype).add_norm(hidden, laid(added, layout), weight, 1e-5)
    assert torch.equal(hidden, expected_sum)
    assert close(found, expected)
    alone = Elementwise(dtype).add_norm(hidden, None, weight, 1e-5)
    assert torch.equal(alone, found)


@settings(max_examples=60, deadline=None)
@drawn
@pytest.mark.parametrize("is_gelu", [False, True])
def test_gated_unit(tokens: int, size: int, layout: str, dtype: torch.dtype, seed: int, is_gelu: bool) -> None:
    gate_up = (4 * torch.randn(tokens, 2 * size, generator=torch.Generator().manual_seed(seed))).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)  # PyTorch's tanh form in float32 loses what little is left far out
    activated = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
    expected = activated.to(dtype) * up.to(dtype)
    assert close(Elementwise(dtype).gated_unit(laid(gate_up, layout), is_gelu), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_or_far_out_is_as_in_pytorch(dtype: torch.dtype) -> None:
    gate = torch.tensor([[torch.nan, torch.inf, 1e4, -1e4, 88.5, -88.5, 0.0, -0.0, 3e38]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), 1).to(dtype)
    found = Elementwise(dtype).gated_unit(gate_up, is_gelu=False).float()
    expected = F.silu(gate_up[:, :9].float()).to(dtype).float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.allclose(found.nan_to_num(0), expected.nan_to_num(0), rtol=1e-2, atol=1e-30)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.sampled_from([1, 5, 16, 70, 300]),
    heads=st.sampled_from([(1, 1), (4, 1), (9, 3), (8, 8)]),
    size=st.sampled_from([2, 32, 64, 80, 256]),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    is_normed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rotate_write(
    tokens: int, heads: tuple[int, int], size: int, layout: str, dtype: torch.dtype, is_normed: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    of_queries, of_keys = heads
    qkv = torch.randn(tokens, (of_queries + 2 * of_keys) * size, generator=generator).to(dtype)
    norm = torch.rand(of_queries + of_keys, size, generator=generator).to(dtype) if is_normed else None
    positions = torch.randint(0, 3000, (tokens,), generator=generator)
    slots = torch.randperm(512, generator=generator)[:tokens]
    frequencies = [10_000 ** (-i / (size // 2)) for i in range(size // 2)]
    keys, values = (torch.full((32, 16, of_keys, size), torch.nan, dtype=dtype) for _ in range(2))
    query = Elementwise(dtype).rotate_write(
        laid(qkv, layout), norm, 1e-6, Turns(frequencies, dtype).up_to(3000), positions, slots, keys, values
    )

    wide = qkv.float().unflatten(1, (-1, size))
    turned = wide[:, : of_queries + of_keys]
    if norm is not None:
        scale = (turned.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        turned = ((turned * scale).to(dtype) * norm).float()
    angles = positions[:, None, None].float() * torch.tensor(frequencies)
    cosines, sines = angles.cos().to(dtype).float(), angles.sin().to(dtype).float()
    first, second = turned.chunk(2, -1)
    expected = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1).to(dtype)
    assert close(query, expected[:, :of_queries])
    assert close(keys.flatten(0, 1)[slots], expected[:, of_queries:])
    assert torch.equal(values.flatten(0, 1)[slots], qkv.unflatten(1, (-1, size))[:, -of_keys:])
    for cache in (keys, values):
        assert int(cache.flatten(0, 1).isnan().any(-1).any(-1).sum()) == 512 - tokens, "a slot of nobody was written"


def test_turns_grow_and_stay_what_they_were() -> None:
    turns = Turns([1.0, 0.1], torch.bfloat16)
    few = turns.up_to(3).clone()
    more = turns.up_to(5000)
    assert len(more) >= 5000
    assert torch.equal(more[: len(few)], few)
    assert torch.equal(more, Turns([1.0, 0.1], torch.bfloat16).up_to(5000)[: len(more)])
