"""Sampling under the interpreter: the same noise, the same tokens left, the same token as a full sort in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_kernels.jit import jit, tl
from poolwright_kernels.noise import gumbel_noise, gumbel_noise_of, noise_bits, noise_bits_of
from poolwright_kernels.sampling import sample_tokens_reference, sample_tokens_triton, threshold_kernel


@jit
def noise_kernel(seeds, positions, words, noise, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, token = tl.program_id(0), tl.arange(0, SIZE)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    tl.store(words + row * SIZE + token, noise_bits_of(seed, position, token).to(tl.int32, bitcast=True))
    tl.store(noise + row * SIZE + token, gumbel_noise_of(seed, position, token))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31)), min_size=1, max_size=4))
def test_a_kernel_makes_the_same_noise(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = [seed for seed, _ in pairs], [position for _, position in pairs]
    size = 512
    words = torch.empty(len(pairs), size, dtype=torch.int32)
    noise = torch.empty(len(pairs), size)
    noise_kernel[(len(pairs),)](torch.tensor(seeds), torch.tensor(positions), words, noise, SIZE=size)
    assert torch.equal(words, noise_bits(seeds, positions, size))
    # The bits are the same; two libraries' logarithms differ in the last place.
    torch.testing.assert_close(noise, gumbel_noise(seeds, positions, size), rtol=2e-6, atol=2e-7)


def test_noise_is_exact_at_its_ends() -> None:
    """The smallest and largest uniforms, where a logarithm of 1 - u would lose all digits."""

    @jit
    def ends_kernel(noise, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(
            noise + tl.arange(0, SIZE),
            gumbel_noise_of(tl.full((1,), 7, tl.int64), tl.full((1,), 9, tl.int64), tl.arange(0, SIZE)),
        )

    size = 1 << 18
    noise = torch.empty(size)
    ends_kernel[(1,)](noise, SIZE=size)
    uniform = ((noise_bits([7], [9], size)[0].long() & 0xFFFFFFFF).double() + 0.5) / 2**32
    truth = -torch.log(-torch.log1p(-uniform))
    assert noise.isfinite().all()
    largest = truth.abs().topk(200).indices
    torch.testing.assert_close(noise[largest].double(), truth[largest], rtol=3e-6, atol=0)


def columns(rows: int, temperature, top_k, top_p, min_p, seed: int = 5) -> list[Tensor]:  # type: ignore[no-untyped-def]
    def column(value, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
        return torch.tensor([value] * rows if not isinstance(value, list) else value, dtype=dtype)

    return [
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        torch.arange(rows) + seed,
        torch.arange(rows) * 3,
    ]


row_params = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 7, 40, 10**6]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)


@settings(max_examples=40, deadline=None)
@given(
    vocab=st.integers(1, 300) | st.sampled_from([2048, 2500]),
    params=st.lists(row_params, min_size=1, max_size=4),
    spread=st.sampled_from([0.5, 4.0, 30.0]),
    rounded=st.booleans(),
    masked=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_tokens_equal_those_of_a_full_sort_in_float64(vocab, params, spread, rounded, masked, dtype, seed) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    rows = len(params)
    storage = torch.full((rows, vocab + 5), torch.nan)
    logits = (torch.randn(rows, vocab) * spread).to(dtype).float()
    if rounded:
        logits = logits.round()  # many ties, and both zeros
    if masked:
        logits[:, 1::2] = -torch.inf
    storage[:, :vocab] = logits
    given_logits = storage.to(dtype)[:, :vocab]
    settings_of_rows = columns(rows, *(list(values) for values in zip(*params, strict=True)), seed=seed)

    kernel = sample_tokens_triton(given_logits, *settings_of_rows)

    truth = sample_tokens_reference(given_logits.double(), *settings_of_rows)
    for row in (kernel != truth).nonzero().flatten().tolist():
        assert is_a_close_call(given_logits[row].double(), [column[row] for column in settings_of_rows], kernel[row])


def is_a_close_call(logits: Tensor, params: list[Tensor], token: Tensor) -> bool:
    """Whether float32 may choose this token: if the limits move by one part in 10⁵, or noisy logits nearly tie."""
    temperature, top_k, top_p, min_p, seed, position = params
    for p_factor in (1 - 1e-5, 1.0, 1 + 1e-5):
        for m_factor in (1 - 1e-5, 1.0, 1 + 1e-5):
            nudged = [temperature, top_k, (top_p * p_factor).clamp(max=1.0) if top_p < 1 else top_p, min_p * m_factor]
            if token == sample_tokens_reference(logits[None], *(x[None] for x in (*nudged, seed, position)))[0]:
                return True
    noisy = logits / temperature.double() + gumbel_noise([int(seed)], [int(position)], len(logits))[0].double()
    chosen = sample_tokens_reference(logits[None], *(x[None] for x in params))[0]
    return bool((noisy[chosen] - noisy[token]).abs() < 1e-4)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (200, 0.8, 0.001), (0, 0.999999, 0.0)]
)
def test_the_threshold_leaves_exactly_what_a_sort_leaves(top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(top_k)
    vocab, temperature = 5000, 0.8
    logits = torch.randn(1, vocab) * 3
    thresholds = torch.empty(1)
    threshold_kernel[(1,)](
        logits, *columns(1, temperature, top_k, top_p, min_p)[:4], thresholds, vocab, VOCAB=vocab, BLOCK=1024
    )
    ordered = (logits[0].double() / temperature).sort(descending=True).values
    kept = ordered >= ordered[0] + torch.tensor(min_p, dtype=torch.float64).log()
    if top_k:
        kept[top_k:] = False
    probability = torch.where(kept, ordered, -torch.inf).softmax(0)
    before = probability.cumsum(0) - probability
    kept &= before < top_p
    expected = int(kept.sum())
    left = int((logits[0] >= thresholds[0]).sum())
    unsure = int(((before - top_p).abs() < 1e-6).sum())  # where float32 cannot tell
    assert abs(left - expected) <= unsure, (left, expected)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).log_softmax(0)
    rows = 1000
    tokens = sample_tokens_triton(logits.expand(rows, -1), *columns(rows, 1.0, 0, 1.0, 0.0))
    shares = torch.bincount(tokens, minlength=4) / rows
    torch.testing.assert_close(shares, logits.exp(), rtol=0, atol=0.05)


def test_numbers_that_do_not_fit_the_rows_are_refused() -> None:
    arguments = columns(2, 1.0, 0, 1.0, 0.0)
    arguments[1] = arguments[1][:1]
    with pytest.raises(ValueError, match="top_k"):
        sample_tokens_triton(torch.zeros(2, 8), *arguments)
    with pytest.raises(ValueError, match="logits"):
        sample_tokens_triton(torch.zeros(8), *columns(2, 1.0, 0, 1.0, 0.0))
