"""Penalties, biases and masks under the interpreter against the references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_kernels import penalties


def rows_of(storage: Tensor, vocab: int) -> Tensor:
    return storage[:, :vocab]


@settings(max_examples=30, deadline=None)
@given(
    vocab=st.integers(1, 150) | st.sampled_from([1024, 1500]),
    seats=st.lists(st.integers(-1, 5), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_penalties_follow_what_was_remembered(vocab: int, seats: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    words = -(-vocab // 32)
    prompts = [torch.randint(vocab, (7,)) for _ in range(6)]
    outputs = [torch.randint(vocab, (9,)) for _ in range(6)]
    state = torch.zeros(6, words, dtype=torch.int32), torch.zeros(6, vocab, dtype=torch.int32)
    reference_state = tuple(part.clone() for part in state)
    for is_prompt, tokens in ((True, prompts), (False, outputs)):
        of_seat = torch.arange(6).repeat_interleave(len(tokens[0]))
        of_seat[1] = -1  # padding
        penalties.remember_tokens_triton(of_seat, torch.cat(tokens), is_prompt, *state)
        penalties.remember_tokens_reference(of_seat, torch.cat(tokens), is_prompt, *reference_state)
    for part, expected in zip(state, reference_state, strict=True):
        assert torch.equal(part, expected)

    rows = len(seats)
    storage = torch.randn(rows, vocab + 3) * 3
    logits, before = rows_of(storage, vocab), storage.clone()
    repetition, presence, frequency = torch.rand(rows) + 0.5, torch.rand(rows) * 2, torch.rand(rows) - 0.5
    penalties.penalize_triton(logits, torch.tensor(seats), *state, repetition, presence, frequency)

    assert torch.equal(storage[:, vocab:], before[:, vocab:]), "written past the vocabulary"
    for row, seat in enumerate(seats):
        expected = before[row, :vocab].double()
        if seat >= 0:
            kept = torch.arange(9) != 1 if seat == 0 else torch.arange(9) >= 0  # that padding
            counts = torch.bincount(outputs[seat][kept], minlength=vocab)
            in_prompt = torch.bincount(prompts[seat][kept[:7]], minlength=vocab)
            seen = (counts + in_prompt) > 0
            factor = repetition[row].double()
            expected = torch.where(seen, torch.where(expected > 0, expected / factor, expected * factor), expected)
            expected = expected - frequency[row].double() * counts - presence[row].double() * (counts > 0)
        torch.testing.assert_close(logits[row].double(), expected, rtol=1e-5, atol=1e-5)

    again = before.clone()
    penalties.penalize_reference(rows_of(again, vocab), torch.tensor(seats), *state, repetition, presence, frequency)
    torch.testing.assert_close(storage, again, rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    vocab=st.integers(1, 100) | st.just(1100),
    pairs=st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 10**6)), max_size=12),
    bias=st.sampled_from([penalties.bias_logits_triton, penalties.bias_logits_reference]),
    mask=st.sampled_from([penalties.mask_logits_triton, penalties.mask_logits_reference]),
    seed=st.integers(0, 2**31),
)
def test_biases_and_masks_reach_their_tokens_only(vocab, pairs, bias, mask, seed) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    pairs = list({(row, token % vocab) for row, token in pairs})
    values = [(-1.0) ** index * index for index in range(len(pairs))]
    if values:
        values[0] = -torch.inf
    storage = torch.randn(4, vocab + 2)
    expected = storage.clone()
    for (row, token), value in zip(pairs, values, strict=True):
        if row >= 0:
            expected[row, token] += value
    numbers = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    bias(storage[:, :vocab], numbers[:, 0].contiguous(), numbers[:, 1].contiguous(), torch.tensor(values))
    assert torch.equal(storage, expected)

    allowed = torch.rand(4, vocab) < 0.5
    padded = torch.zeros(4, -(-vocab // 32) * 32, dtype=torch.int64)
    padded[:, :vocab] = allowed.long()
    words = (padded.view(4, -1, 32) << torch.arange(32)).sum(-1).to(torch.int32)  # wraps as bits do
    mask(storage[:, :vocab], words)
    expected[:, :vocab] = expected[:, :vocab].masked_fill(~allowed, -torch.inf)
    assert torch.equal(storage, expected)


def test_state_of_another_vocabulary_is_refused() -> None:
    ones = torch.ones(1)
    with pytest.raises(ValueError, match="do not fit"):
        penalties.penalize_triton(
            torch.zeros(1, 40), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32),
            torch.zeros(1, 40, dtype=torch.int32), ones, ones, ones,
        )  # fmt: skip
    with pytest.raises(ValueError, match="bits"):
        penalties.mask_logits_triton(torch.zeros(1, 40), torch.zeros(1, 1, dtype=torch.int32))
