"""Traces: what the recorded ones hold, and what is made of them."""

import itertools
import random
from collections import Counter

import pytest

from poolwright.sim import traces
from poolwright.sim.request import Request, Trace
from poolwright.sim.traces import Copies


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return traces.azure_conversation()


@pytest.fixture(scope="module")
def slice_of_it(conversation: Trace) -> Trace:
    return traces.slices(conversation)[1]


def lengths(trace: Trace) -> Counter[tuple[int, int]]:
    return Counter((r.prompt_tokens, r.output_tokens) for r in trace)


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[int(share * (len(values) - 1))]


@pytest.mark.parametrize(
    ("name", "requests", "seconds", "prompt", "output"),
    [
        ("azure-code", 8819, 3436, (2048, 1469, 5188), (27.9, 13, 55)),
        ("azure-conversation", 19366, 3502, (1155, 1020, 2734), (211, 129, 424)),
        ("mooncake-conversation", 12031, 3537, (12035, 6909, 27367), (343, 350, 597)),
    ],
)
def test_recorded_traces_are_the_published_ones(
    name: str, requests: int, seconds: float, prompt: tuple[float, ...], output: tuple[float, ...]
) -> None:
    trace = traces.recorded(name)
    assert (len(trace), trace.horizon_seconds) == (requests, pytest.approx(seconds, abs=1))
    for values, (mean, p50, p90) in (
        ([r.prompt_tokens for r in trace], prompt),
        ([r.output_tokens for r in trace], output),
    ):
        assert sum(values) / len(values) == pytest.approx(mean, rel=0.005)
        assert percentile(values, 0.5) == pytest.approx(p50, rel=0.005)
        assert percentile(values, 0.9) == pytest.approx(p90, rel=0.005)
    assert [r.number for r in trace] == list(range(requests))
    assert all(a.arrival_seconds <= b.arrival_seconds for a, b in itertools.pairwise(trace.requests))


def test_mooncake_shares_prefixes_as_published() -> None:
    """The share of all blocks, full or not, that an unbounded cache would hold: 37.4 %; of full blocks a little more,
    for a block that is not full is rarely another's."""
    seen: set[int] = set()
    hits = total = 0
    for request in traces.mooncake_conversation():
        assert len(request.prefix) == request.prompt_tokens // 512
        fresh = next((i for i, key in enumerate(request.prefix) if key not in seen), len(request.prefix))
        hits, total = hits + fresh * 512, total + request.prompt_tokens
        seen.update(request.prefix)
    assert hits / total == pytest.approx(0.374, abs=0.01)


def test_slices_are_whole_and_start_at_zero(conversation: Trace) -> None:
    cut = traces.slices(conversation)
    assert len(cut) == 5
    assert sum(map(len, cut)) == sum(1 for r in conversation if r.arrival_seconds < 3000)
    for part in cut:
        assert part.horizon_seconds == 600
        assert all(0 <= r.arrival_seconds < 600 for r in part)


@pytest.mark.parametrize("factor", [0, 0.3, 1, 2.5, 8])
@pytest.mark.parametrize("copies", Copies)
def test_scaling_gives_the_rate_and_keeps_the_lengths(slice_of_it: Trace, factor: float, copies: Copies) -> None:
    scaled = traces.scaled(slice_of_it, factor, seed=3, copies=copies)
    assert len(scaled) == pytest.approx(factor * len(slice_of_it), rel=0.05)
    assert lengths(scaled).keys() <= lengths(slice_of_it).keys()
    assert all(0 <= r.arrival_seconds < scaled.horizon_seconds for r in scaled)


def test_scaling_by_one_changes_nothing(slice_of_it: Trace) -> None:
    assert traces.scaled(slice_of_it, 1, seed=9).requests == slice_of_it.requests


def test_a_larger_factor_only_adds(slice_of_it: Trace) -> None:
    def found(factor: float) -> Counter[tuple[float, int, int]]:
        scaled = traces.scaled(slice_of_it, factor, seed=5)
        return Counter((r.arrival_seconds, r.prompt_tokens, r.output_tokens) for r in scaled)

    steps = [found(factor) for factor in (0.2, 0.9, 1.4, 2.0, 3.7)]
    assert all(few <= many for few, many in itertools.pairwise(steps))


def test_chance_comes_from_the_seed(slice_of_it: Trace) -> None:
    once, again, other = (traces.scaled(slice_of_it, 2.5, seed=seed).requests for seed in (1, 1, 2))
    assert once == again != other


def test_a_repeated_arrival_stays_near() -> None:
    one = traces.made("one", [Request(0, 100.0, 10, 5)], 200.0)
    times = [r.arrival_seconds for r in traces.scaled(one, 50, seed=1)]
    assert len(times) == 50
    assert all(70 <= at <= 130 for at in times)
    assert max(times) - min(times) > 30


def test_copies_hit_their_own_prefixes_and_no_others() -> None:
    shared = [Request(0, 1.0, 1024, 1, prefix=(1, 2)), Request(1, 2.0, 1024, 1, prefix=(1, 2))]
    scaled = traces.scaled(traces.made("shared", shared, 100.0), 3, seed=1)
    assert sorted(Counter(r.prefix for r in scaled).values()) == [2, 2, 2]


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_is_refused(slice_of_it: Trace, factor: float) -> None:
    with pytest.raises(ValueError, match="scaled"):
        traces.scaled(slice_of_it, factor, seed=1)


def test_shuffling_moves_lengths_only(slice_of_it: Trace) -> None:
    moved = traces.shuffled(slice_of_it, seed=4)
    assert [r.arrival_seconds for r in moved] == [r.arrival_seconds for r in slice_of_it]
    assert lengths(moved) == lengths(slice_of_it)
    assert moved.requests != slice_of_it.requests


def test_alternation_takes_turns(conversation: Trace) -> None:
    code = traces.azure_code()
    both = traces.alternated(code, conversation, 600)
    assert both.horizon_seconds == code.horizon_seconds
    turns = [code if int(start / 600) % 2 == 0 else conversation for start in range(0, 3436, 600)]
    for start, turn in zip(range(0, 3436, 600), turns, strict=True):
        stop = min(start + 600, both.horizon_seconds)
        assert lengths(traces.between(both, start, stop)) == lengths(traces.between(turn, start, stop))


def test_a_burst_rises_within_two_seconds_and_ends() -> None:
    steady = traces.generated(traces.OPENCHAT, 200, 60, seed=1)
    burst = traces.with_burst(steady, 20, seed=1, hold_seconds=10)

    def rate(start: float, stop: float) -> float:
        return sum(start <= r.arrival_seconds < stop for r in burst) / (stop - start)

    assert rate(0, 20) == pytest.approx(200, rel=0.1)
    assert rate(20, 22) == pytest.approx(600, rel=0.15)
    assert rate(22, 32) == pytest.approx(1000, rel=0.1)
    assert rate(33, 60) == pytest.approx(200, rel=0.1)


def test_a_flood_adds_its_rate(slice_of_it: Trace) -> None:
    flooded = traces.with_flood(slice_of_it, 100, 60, 50, seed=2)
    assert len(flooded) - len(slice_of_it) == pytest.approx(3000, rel=0.1)
    assert Counter(r.arrival_seconds for r in slice_of_it) <= Counter(r.arrival_seconds for r in flooded)


@pytest.mark.parametrize("lengths_of", [traces.OPENCHAT, traces.ARXIV])
def test_generated_lengths_have_the_published_percentiles(lengths_of: traces.Lengths) -> None:
    chance = random.Random(1)
    drawn = [lengths_of.draw(chance) for _ in range(20_000)]
    assert all(prompt + output <= lengths_of.most_tokens for prompt, output in drawn)
    # The cut at `most_tokens` takes long ones away.
    assert percentile([p for p, _ in drawn], 0.5) == pytest.approx(lengths_of.prompt_p50, rel=0.15)
    assert percentile([o for _, o in drawn], 0.5) == pytest.approx(lengths_of.output_p50, rel=0.05)
    assert percentile([o for _, o in drawn], 0.9) == pytest.approx(lengths_of.output_p90, rel=0.05)


def test_generated_requests_do_not_depend_on_the_rate() -> None:
    slow, fast = (traces.generated(traces.arxiv_lengths(), rate, 100, seed=1) for rate in (2, 4))
    assert lengths(slow) <= lengths(fast)
    assert len(fast) == pytest.approx(400, rel=0.2)


def test_means_count_context_step_by_step() -> None:
    trace = traces.made("two", [Request(0, 0.0, 10, 4), Request(1, 1.0, 5, 1)], 4.0)
    found = traces.means(trace)
    assert found == traces.Means(0.5, 7.5, 2.5, 1.5, (11 + 12 + 13) / 2)


def test_means_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no requests"):
        traces.means(traces.made("none", [], 1.0))
