"""Draws follow the distribution asked for, and depend on seed and position alone."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_engine import sampler
from poolwright_engine.sampler import gumbel_noise, sample
from poolwright_engine.sequence import SamplingParams

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **changes)  # type: ignore[arg-type]


def draws(logits: Tensor, count: int, **changes: object) -> Counter[int]:
    """Tokens drawn from one row of logits at `count` positions."""
    rows = sample(logits.expand(count, -1), [params(**changes)] * count, range(count))
    return Counter(row.token_id for row in rows)


def test_temperature_zero_is_the_most_likely_token() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    found = sample(logits, [params(temperature=0.0, seed=i) for i in range(5)], range(5))
    assert [row.token_id for row in found] == logits.argmax(1).tolist()
    assert all(row.logprobs is None for row in found)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits, count = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0]), 20_000
    expected = (logits / temperature).softmax(0) * count
    found = draws(logits, count, temperature=temperature, seed=7)
    chi_square = sum((found[i] - float(e)) ** 2 / float(e) for i, e in enumerate(expected))
    assert chi_square < 20.5  # 5 degrees of freedom, one in a thousand; the draw is fixed by its seed


def test_noise_is_standard_gumbel_and_uncorrelated_over_tokens_positions_and_seeds() -> None:
    noise = gumbel_noise([0, 0, 1], [5, 6, 5], 49_152)
    euler = 0.577216
    assert noise.mean(1).sub(euler).abs().max() < 0.02
    assert noise.var(1).sub(math.pi**2 / 6).abs().max() < 0.05
    together = torch.corrcoef(torch.cat((noise, noise.roll(1, 1))))
    assert (together - torch.eye(6)).abs().max() < 0.02


def test_the_noise_never_changes_between_versions() -> None:
    """A stream resumed on a machine of another version must draw the same tokens."""
    noise = gumbel_noise([0, 123_456_789_012_345], [0, 17], 4)
    assert noise[0].tolist() == pytest.approx([1.2471991, 1.8150781, 0.0040593, -0.9545729], abs=1e-5)
    assert noise[1].tolist() == pytest.approx([1.7080483, 0.4685752, 0.9577147, 0.3992696], abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seeds=st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=6),
    positions=st.lists(st.integers(0, 2**31), min_size=6, max_size=6),
    others=st.integers(0, 5),
)
def test_a_draw_does_not_depend_on_the_batch_it_is_made_in(seeds: list[int], positions: list[int], others: int) -> None:
    logits = torch.randn(len(seeds), 500, generator=torch.Generator().manual_seed(3))
    settings_of = [params(seed=seed, temperature=0.9, top_k=(0, 50)[i % 2]) for i, seed in enumerate(seeds)]
    together = [row.token_id for row in sample(logits, settings_of, positions[: len(seeds)])]
    alone = [sample(logits[i : i + 1], [settings_of[i]], [positions[i]])[0].token_id for i in range(len(seeds))]
    assert together == alone
    padded = sample(
        torch.cat((torch.zeros(others, 500), logits)),
        [params()] * others + settings_of,
        [*range(others), *positions[: len(seeds)]],
    )
    assert [row.token_id for row in padded[others:]] == together


def test_noise_is_finite_for_every_word() -> None:
    extremes = torch.tensor([0, 1, -1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    noise = sampler._gumbel(extremes)
    assert noise.isfinite().all()
    assert noise[0] == noise.max()
    assert noise[2] == noise.min()


def test_another_seed_or_position_is_another_draw() -> None:
    logits = torch.zeros(1, 10_000)
    tokens = {sample(logits, [params(seed=s)], [p])[0].token_id for s in range(4) for p in range(4)}
    assert len(tokens) == 16


def test_top_k_draws_only_the_k_most_likely_and_keeps_ties() -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0])
    assert set(draws(logits, 500, top_k=1, temperature=5.0)) == {0}
    assert set(draws(logits, 500, top_k=2, temperature=5.0)) == {0, 2, 3}
    assert set(draws(logits, 500, top_k=99, temperature=5.0)) == {0, 1, 2, 3, 4}


def test_top_p_draws_the_smallest_set_that_reaches_p() -> None:
    logits = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()
    assert set(draws(logits, 500, top_p=0.4)) == {0}
    assert set(draws(logits, 500, top_p=0.6)) == {0, 2}
    assert set(draws(logits, 500, top_p=0.8)) == {0, 2, 3}
    assert set(draws(logits, 500, top_p=1e-9)) == {0}
    assert set(draws(logits, 500, top_p=0.999)) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draws(logits, 500, top_k=2, top_p=0.5)) == {0}  # 0.4 / 0.7 is more than a half


def test_a_nucleus_of_thousands_of_tokens_is_whole() -> None:
    logits = torch.linspace(0.0, 1e-3, 5000)
    kept = draws(logits, 400, top_p=0.5, seed=11)
    assert 2490 <= min(kept) < 2600
    assert max(kept) > 4900


def test_log_probabilities_are_of_raw_logits_whatever_the_sampling() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(5))
    hot, greedy = sample(
        logits, [params(temperature=3.0, top_k=5, logprobs=3), params(temperature=0.0, logprobs=0)], [0, 0]
    )
    expected = logits.double().log_softmax(1)
    assert hot.logprobs is not None
    assert hot.logprobs.token_id == hot.token_id
    assert hot.logprobs.logprob == pytest.approx(float(expected[0, hot.token_id]), abs=1e-5)
    assert [token_id for token_id, _ in hot.logprobs.top] == logits[0].topk(3).indices.tolist()
    assert [value for _, value in hot.logprobs.top] == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-5)
    assert greedy.logprobs is not None
    assert greedy.logprobs.top == ()
    assert greedy.logprobs.logprob == pytest.approx(float(expected[1].max()), abs=1e-5)
