"""Draws follow the distribution asked for, and depend on the row, its seed and its position alone."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolwright_engine.cpu.sampler import Logits, NoFiniteLogits, gumbel_noise, logprobs_of, noise_bits, sample
from poolwright_engine.sampling.guide import Guides
from poolwright_engine.sampling.slot_memory import SlotMemory, TokenCounts, UnusableParams
from poolwright_engine.scheduling.runner import Seat
from poolwright_engine.scheduling.sequence import Guide, GuideKind, SamplingParams
from poolwright_engine.text.tokenizer import Tokenizer
from poolwright_kernels import noise as kernel_noise
from support.tiny_llama import write_byte_tokenizer

EOS = 3


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, **changes})  # type: ignore[arg-type]


def memory_of(
    wanted: SamplingParams, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), vocab_size: int = 100
) -> SlotMemory:
    return SlotMemory(wanted, Seat(prompt, output), vocab_size, frozenset({EOS}), None)


def row(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def random_logits(seed: int, size: int = 100, scale: float = 1.0) -> Logits:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def draws(logits: Logits, count: int, memory: SlotMemory | None = None, **changes: object) -> Counter[int]:
    """Tokens drawn from one row of logits at `count` positions."""
    wanted = params(**changes)
    return Counter(sample(logits, wanted, position, memory).token_id for position in range(count))


def test_temperature_zero_is_the_most_likely_token() -> None:
    for seed in range(5):
        found = sample(random_logits(seed), params(temperature=0.0, seed=seed), seed)
        assert found.token_id == random_logits(seed).argmax()
        assert found.logprobs is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits, count = row(2.0, 1.0, 0.5, 0.0, -1.0, -3.0), 20_000
    weights = np.exp(logits / temperature)
    expected = weights / weights.sum() * count
    found = draws(logits, count, temperature=temperature, seed=7)
    chi_square = sum((found[i] - float(e)) ** 2 / float(e) for i, e in enumerate(expected))
    assert chi_square < 20.5  # 5 degrees of freedom, one in a thousand; the draw is fixed by its seed


# The noise.


def noise_row(seed: int, position: int, size: int = 49_152) -> Logits:
    return gumbel_noise(seed, position, np.arange(size, dtype=np.uint32))


def test_noise_is_standard_gumbel_and_uncorrelated_over_tokens_positions_and_seeds() -> None:
    noise = np.stack([noise_row(0, 5), noise_row(0, 6), noise_row(1, 5)])
    euler = 0.577216
    assert abs(noise.mean(1) - euler).max() < 0.02
    assert abs(noise.var(1) - math.pi**2 / 6).max() < 0.05
    together = np.corrcoef(np.concatenate((noise, np.roll(noise, 1, 1))))
    assert abs(together - np.eye(6)).max() < 0.02


def test_the_noise_never_changes_between_versions() -> None:
    """A stream resumed on a machine of another version must draw the same tokens."""
    assert noise_row(0, 0, 4).tolist() == pytest.approx([1.2471991, 1.8150781, 0.0040593, -0.9545729], abs=1e-5)
    other = noise_row(123_456_789_012_345, 17, 4)
    assert other.tolist() == pytest.approx([1.7080483, 0.4685752, 0.9577147, 0.3992696], abs=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 2**31), data=st.data())
def test_noise_is_that_of_the_kernels_for_any_choice_of_tokens(seed: int, position: int, data: st.DataObject) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, 2999), min_size=1, max_size=40)), dtype=np.uint32)
    bits = kernel_noise.noise_bits([seed], [position], 3000)[0].numpy().view(np.uint32)
    assert noise_bits(seed, position, ids).tolist() == bits[ids].tolist()
    noise = kernel_noise.gumbel_noise([seed], [position], 3000)[0].numpy()
    assert gumbel_noise(seed, position, ids) == pytest.approx(noise[ids], abs=1e-5)
    assert gumbel_noise(seed, position, ids).tolist() == noise_row(seed, position, 3000)[ids].tolist()


def test_noise_is_finite_for_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.array([0, 1, 2**32 - 1, 2**32 - 2, 2**31 - 1, 2**31], dtype=np.uint32)
    monkeypatch.setattr("poolwright_engine.cpu.sampler.noise_bits", lambda *_: words)
    noise = gumbel_noise(0, 0, words)
    assert np.isfinite(noise).all()
    assert noise[0] == noise.max()
    assert noise[2] == noise.min()


def test_another_seed_or_position_is_another_draw() -> None:
    logits = np.zeros(10_000, dtype=np.float32)
    tokens = {sample(logits, params(seed=s), p).token_id for s in range(4) for p in range(4)}
    assert len(tokens) == 16


# What is left to draw from.


def test_top_k_draws_only_the_k_most_likely_and_keeps_ties() -> None:
    logits = row(3.0, 1.0, 2.0, 2.0, 0.0)
    assert set(draws(logits, 500, top_k=1, temperature=5.0)) == {0}
    assert set(draws(logits, 500, top_k=2, temperature=5.0)) == {0, 2, 3}
    assert set(draws(logits, 500, top_k=99, temperature=5.0)) == {0, 1, 2, 3, 4}


def test_top_p_draws_the_smallest_set_that_reaches_p() -> None:
    logits = np.log(row(0.5, 0.1, 0.25, 0.15))
    assert set(draws(logits, 500, top_p=0.4)) == {0}
    assert set(draws(logits, 500, top_p=0.6)) == {0, 2}
    assert set(draws(logits, 500, top_p=0.8)) == {0, 2, 3}
    assert set(draws(logits, 500, top_p=1e-9)) == {0}
    assert set(draws(logits, 500, top_p=0.999)) == {0, 1, 2, 3}


def test_min_p_draws_what_is_likely_enough_against_the_best() -> None:
    logits = np.log(row(0.5, 0.1, 0.25, 0.15))
    assert set(draws(logits, 500, min_p=0.4)) == {0, 2}
    assert set(draws(logits, 500, min_p=0.25)) == {0, 2, 3}
    assert set(draws(logits, 500, min_p=1.0)) == {0}
    assert set(draws(logits, 500, min_p=1.0, temperature=100.0)) == {0}
    assert set(draws(logits, 1500, min_p=0.4, temperature=2.0)) == {0, 2, 3, 1}  # √(0.1 / 0.5) is more than 0.4


def test_top_p_counts_what_min_p_and_top_k_left() -> None:
    logits = np.log(row(0.4, 0.3, 0.2, 0.1))
    assert set(draws(logits, 500, top_p=0.5)) == {0, 1}
    assert set(draws(logits, 500, top_k=2, top_p=0.5)) == {0}  # 0.4 / 0.7 is more than a half
    assert set(draws(logits, 500, min_p=0.6, top_p=0.5)) == {0}


def test_a_nucleus_of_thousands_of_tokens_is_whole() -> None:
    logits = np.linspace(0.0, 1e-3, 5000, dtype=np.float32)
    kept = draws(logits, 400, top_p=0.5, seed=11)
    assert 2490 <= min(kept) < 2600
    assert max(kept) > 4900


@pytest.mark.parametrize(
    "changes",
    [
        *({"temperature": temperature} for temperature in (1e-4, 1e-6, 1e-9)),
        *({"top_p": top_p} for top_p in (1e-4, 1e-9)),
        {"top_k": 1},
        {"min_p": 1.0},
        {"temperature": 1e-4, "top_p": 1e-9, "top_k": 1, "min_p": 1.0},
        {"temperature": 1e300, "top_k": 1},
    ],
)
def test_extreme_settings_are_greedy(changes: dict[str, float]) -> None:
    """A hundred tokens each: never NaN, never another token than the most likely."""
    for position in range(100):
        logits = random_logits(position, 500, scale=8.0)
        found = sample(logits, params(**changes, logprobs=2), position)
        assert found.token_id == logits.argmax()
        assert found.logprobs is not None
        assert math.isfinite(found.logprobs.logprob)


def test_an_endless_temperature_draws_anything_that_is_allowed() -> None:
    wanted = params(temperature=1e300, stop_token_ids=(0,), min_tokens=1)
    found = draws(random_logits(1, 4, scale=20.0), 500, memory_of(wanted, vocab_size=4), temperature=1e300)
    assert set(found) == {1, 2}  # 0 and the end, 3, are masked


# What must come before what: masks, biases, penalties.


@pytest.mark.parametrize("repetition", [2.0, 1.0])
def test_penalties_follow_prompt_and_output_and_their_signs(repetition: float) -> None:
    """Repetition: prompt 5, 7 and output 9, by sign. Presence and frequency: output alone, frequency by its count."""
    wanted = params(
        temperature=0.0, repetition_penalty=repetition, presence_penalty=0.5, frequency_penalty=0.5, logprobs=0
    )
    for output, count in (((9,), 1), ((9, 9, 9), 3)):
        memory = memory_of(wanted, prompt=(5, 5, 7), output=output)
        for sign in (1.0, -1.0):
            # Each of the four is compared with an unpenalised token just above, and just below, where it must land.
            for token, start in ((5, 4.0), (7, 3.0), (9, 4.0), (11, 2.0)):
                repeated = repetition if token != 11 else 1.0
                lands = sign * start / repeated if sign > 0 else sign * start * repeated
                lands -= 0.5 + 0.5 * count if token == 9 else 0.0
                for offset, winner in ((0.01, 50), (-0.01, token)):
                    logits = np.full(100, -100.0, dtype=np.float32)
                    logits[token] = sign * start
                    logits[50] = lands + offset
                    assert sample(logits, wanted, 8, memory).token_id == winner


def test_penalties_of_a_slot_taken_again_are_the_same() -> None:
    wanted = params(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.2, temperature=0.8, seed=4)
    prompt = (5, 5, 7)
    kept = memory_of(wanted, prompt)
    output: list[int] = []
    for position in range(3, 60):
        logits = random_logits(position)
        found = sample(logits, wanted, position, kept).token_id
        again = memory_of(wanted, prompt, tuple(output))
        assert sample(logits, wanted, position, again).token_id == found
        kept.note(found)
        output.append(found)
        assert kept.counts is not None
        counted = dict(zip(kept.counts.ids.tolist(), kept.counts.outputs.tolist(), strict=True))
        assert counted == {token: output.count(token) for token in {*prompt, *output}}
    assert len(set(output)) < len(output)


def test_extreme_penalties_stay_finite() -> None:
    logits = np.concatenate((row(20.0, -20.0, 0.0), random_logits(2, 97)))
    for penalty in (1e-300, 1e-9, 1e9, 1e300):
        wanted = params(repetition_penalty=penalty, presence_penalty=-penalty, frequency_penalty=penalty, top_p=0.9)
        for position in range(20):
            memory = memory_of(wanted, prompt=(0, 1, 2, 40), output=(1, 2, 50))
            assert 0 <= sample(logits, wanted, position, memory).token_id < 100


def test_a_bias_can_leave_two_tokens() -> None:
    wanted = params(temperature=0.8, seed=6, logit_bias=tuple((i, -100.0) for i in range(100) if i not in (8, 41)))
    found = draws(random_logits(3), 300, memory_of(wanted), temperature=0.8, seed=6)
    assert set(found) == {8, 41}
    assert min(found.values()) > 20


def test_a_bias_moves_a_token_by_its_value() -> None:
    logits = row(1.0, 3.0, 0.0, 0.0)
    for bias, winner in ((1.99, 1), (2.01, 0)):
        wanted = params(temperature=0.0, logit_bias=((0, bias),))
        assert sample(logits, wanted, 0, memory_of(wanted, vocab_size=4)).token_id == winner


def test_a_text_cannot_end_before_min_tokens() -> None:
    wanted = params(temperature=0.0, min_tokens=3, stop_token_ids=(1,))
    memory = memory_of(wanted, output=(0,), vocab_size=5)
    found = []
    for _ in range(4):
        token = sample(row(0.0, 8.0, 1.0, 9.0, 2.0), wanted, 0, memory).token_id
        memory.note(token)
        found.append(token)
    assert found == [4, 4, EOS, EOS]
    unending = params(temperature=0.0, min_tokens=3, ignore_eos=True)
    assert sample(row(0.0, 8.0, 1.0, 9.0, 2.0), unending, 0, memory_of(unending, vocab_size=5)).token_id == EOS


def test_only_allowed_tokens_are_drawn_whatever_else_is_asked() -> None:
    for changes in (
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"logit_bias": ((7, 100.0), (8, 5.0))},
        {"presence_penalty": 2.0, "repetition_penalty": 1.5},
        {"top_p": 0.5, "min_p": 0.1},
    ):
        wanted = {"allowed_token_ids": (8, 41, 90), **changes}
        memory = memory_of(params(**wanted), output=(8, 9))
        assert set(draws(random_logits(3), 200, memory, **wanted)) <= {8, 41, 90}
    free = {"temperature": 2.0, "allowed_token_ids": (8, 41, 90)}
    assert set(draws(random_logits(3), 200, memory_of(params(**free)), **free)) == {8, 41, 90}


def test_an_end_that_is_all_that_is_allowed_comes_before_min_tokens() -> None:
    both = params(temperature=0.0, min_tokens=3, allowed_token_ids=(0, EOS))
    logits = row(0.0, 8.0, 1.0, 9.0, 2.0)
    assert sample(logits, both, 0, memory_of(both, vocab_size=5)).token_id == 0
    assert sample(logits, both, 0, memory_of(both, output=(0, 0, 0), vocab_size=5)).token_id == EOS
    end = params(temperature=0.0, min_tokens=3, allowed_token_ids=(EOS,))
    assert sample(logits, end, 0, memory_of(end, vocab_size=5)).token_id == EOS


def test_a_masked_greedy_row_next_to_others_is_the_same_as_alone() -> None:
    """Greedy with its end masked, a random one, and one biased to two tokens: each as alone, and finite."""
    rows = {
        "greedy": params(temperature=0.0, min_tokens=5, logprobs=3),
        "random": params(temperature=0.8, seed=1, logprobs=3),
        "biased": params(seed=2, logprobs=3, logit_bias=tuple((i, -100.0) for i in range(98))),
    }

    def run(names: list[str]) -> dict[str, list[int]]:
        memories = {name: memory_of(rows[name]) for name in names}
        found: dict[str, list[int]] = {name: [] for name in names}
        for position in range(12):
            for name in names:
                logits = random_logits(position)
                logits[EOS] = 30.0
                result = sample(logits, rows[name], position, memories[name])
                memories[name].note(result.token_id)
                found[name].append(result.token_id)
                assert result.logprobs is not None
                assert all(math.isfinite(value) for _, value in result.logprobs.top)
        return found

    together = run(list(rows))
    assert together == {name: run([name])[name] for name in rows}
    assert EOS not in together["greedy"][:5]
    assert together["greedy"][5:] == [EOS] * 7
    assert set(together["biased"]) <= {98, 99}


def test_a_row_without_finite_logits_fails_in_words() -> None:
    for value in (math.nan, math.inf):
        logits = random_logits(1)
        logits[7] = value
        with pytest.raises(NoFiniteLogits, match="not finite"):
            sample(logits, params(), 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logit_bias": ((100, 1.0),)}, r"logit_bias names a token outside \[0, 100\)"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias names a token"),
        ({"logit_bias": ((1, math.nan),)}, "not finite"),
        ({"allowed_token_ids": (5, 100)}, "allowed_token_ids names a token outside"),
        ({"allowed_token_ids": ()}, "allowed_token_ids names no token"),
        ({"stop_token_ids": (100,), "min_tokens": 1}, "stop_token_ids names a token"),
        ({"guide": Guide(GuideKind.REGEX, "a")}, "guided output is not available"),
    ],
)
def test_what_cannot_be_honoured_is_said(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UnusableParams, match=says):
        memory_of(params(**changes))


def test_a_history_that_did_not_come_is_said() -> None:
    with pytest.raises(UnusableParams, match="tokens so far"):
        SlotMemory(params(presence_penalty=1.0), None, 100, frozenset(), None)


@given(
    prompt=st.lists(st.integers(0, 30)),
    output=st.lists(st.integers(0, 30)),
    cut=st.integers(0, 30),
)
def test_counts_do_not_depend_on_when_they_were_made(prompt: list[int], output: list[int], cut: int) -> None:
    counts = TokenCounts(prompt, output[:cut])
    for token_id in output[cut:]:
        counts.add(token_id)
    found = dict(zip(counts.ids.tolist(), counts.outputs.tolist(), strict=True))
    assert found == {token_id: output.count(token_id) for token_id in {*prompt, *output}}


# Guides.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def guided(tokenizer: Tokenizer, wanted: SamplingParams, count: int) -> list[int]:
    """A text of random logits under a guide, its slot taken anew for every token."""
    guides = Guides(tokenizer, 320)
    kept = SlotMemory(wanted, Seat((1, 2), ()), 320, tokenizer.eos_ids, guides)
    output: list[int] = []
    for position in range(count):
        logits = random_logits(position, 320)
        found = sample(logits, wanted, position, kept).token_id
        again = SlotMemory(wanted, Seat((1, 2), tuple(output)), 320, tokenizer.eos_ids, guides)
        assert sample(logits, wanted, position, again).token_id == found
        kept.note(found)
        output.append(found)
        if found in tokenizer.eos_ids:
            break
    return output


def test_a_guided_text_is_in_its_language_whatever_the_logits(tokenizer: Tokenizer) -> None:
    guide = Guide(GuideKind.CHOICE, json.dumps(["yes", "maybe", "no"]))
    texts = set()
    for seed in range(10):
        *text, end = guided(tokenizer, params(seed=seed, guide=guide), 10)
        texts.add(tokenizer.decode(text))
        assert end in tokenizer.eos_ids
    assert texts == {"yes", "maybe", "no"}


def test_a_guide_that_is_complete_wins_over_min_tokens(tokenizer: Tokenizer) -> None:
    number = guided(tokenizer, params(seed=3, guide=Guide(GuideKind.REGEX, "[0-9]{1,9}"), min_tokens=6), 20)
    assert 7 <= len(number) <= 10
    (end,) = tokenizer.eos_ids
    closed = guided(tokenizer, params(seed=3, guide=Guide(GuideKind.REGEX, "[0-9]{2}"), min_tokens=6), 20)
    assert len(closed) == 3
    assert closed[-1] == end


def test_penalties_and_biases_work_within_a_guide(tokenizer: Tokenizer) -> None:
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    wanted = params(temperature=0.0, guide=Guide(GuideKind.REGEX, "[ab]{4}"), logit_bias=((a, 50.0), (7, 100.0)))
    assert guided(tokenizer, wanted, 4) == [a] * 4
    shy = params(temperature=0.0, guide=Guide(GuideKind.REGEX, "[ab]{4}"), frequency_penalty=100.0)
    assert sorted(guided(tokenizer, shy, 4)) == sorted([a, a, b, b])


def test_a_guide_and_a_list_leave_what_both_allow(tokenizer: Tokenizer) -> None:
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    (end,) = tokenizer.eos_ids
    guide = Guide(GuideKind.REGEX, "[abc]{4}")
    assert set(guided(tokenizer, params(seed=1, guide=guide, allowed_token_ids=(a, b, end)), 9)) == {a, b, end}
    with pytest.raises(UnusableParams, match="the guide leaves no token that is among the allowed ones"):
        guided(tokenizer, params(guide=guide, allowed_token_ids=(end,)), 1)


# Log probabilities.


def test_log_probabilities_are_of_raw_logits_whatever_the_sampling() -> None:
    logits = random_logits(5, 50)
    precise = logits.astype(np.float64)
    expected = precise - np.log(np.exp(precise).sum())
    order = np.argsort(-logits).tolist()
    wanted = params(temperature=3.0, top_k=5, logprobs=3, presence_penalty=2.0)
    hot = sample(logits, wanted, 0, memory_of(wanted, output=(order[0],), vocab_size=50))
    assert hot.logprobs is not None
    assert hot.logprobs.token_id == hot.token_id
    assert hot.logprobs.logprob == pytest.approx(expected[hot.token_id], abs=1e-5)
    assert hot.logprobs.rank == order.index(hot.token_id) + 1
    assert [token_id for token_id, _ in hot.logprobs.top] == order[:3]
    assert [value for _, value in hot.logprobs.top] == pytest.approx(expected[order[:3]].tolist(), abs=1e-5)


def test_log_probabilities_of_none_are_of_the_sampled_token_and_of_minus_one_of_all() -> None:
    logits = random_logits(6, 50)
    sampled = sample(logits, params(temperature=0.0, logprobs=0), 0).logprobs
    assert sampled is not None
    assert sampled.top == ()
    assert sampled.rank == 1
    everything = logprobs_of(logits, 7, -1)
    assert [token_id for token_id, _ in everything.top] == np.argsort(-logits).tolist()
    assert sum(math.exp(value) for _, value in everything.top) == pytest.approx(1.0, abs=1e-5)
    assert logprobs_of(logits, 7, 50).top == everything.top
    assert dict(everything.top)[7] == everything.logprob


def test_equal_logits_share_a_rank_and_are_listed_by_id() -> None:
    logits = row(1.0, 2.0, 2.0, 2.0, 0.0)
    found = logprobs_of(logits, 3, 2)
    assert found.rank == 1
    assert [token_id for token_id, _ in found.top] == [1, 2]
    assert logprobs_of(logits, 0, 0).rank == 4


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(9)
    before = logits.copy()
    wanted = params(temperature=0.7, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logit_bias=((4, 3.0),), logprobs=5)
    sample(logits, wanted, 0, memory_of(wanted, (1, 2), (3,)))
    assert logits.tolist() == before.tolist()


def test_a_bias_comes_before_penalties_and_temperature_after() -> None:
    wanted = params(temperature=0.0, repetition_penalty=2.0, logit_bias=((0, 10.0),))
    memory = memory_of(wanted, prompt=(0,), vocab_size=4)
    logits = row(-2.0, 5.0, -50.0, -50.0)
    assert sample(logits, wanted, 0, memory).token_id == 1  # (-2 + 10) / 2 is less than 5, -2 · 2 + 10 is not
    shy = params(temperature=0.5, presence_penalty=1.0)
    logits = row(1.0, 0.0, -50.0, -50.0)
    even = draws(logits, 4000, memory_of(shy, output=(0,), vocab_size=4), temperature=0.5, presence_penalty=1.0)
    assert 1850 < even[0] < 2150
