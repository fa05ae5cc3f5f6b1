"""The fast simulation is the exact one: the engine's own scheduler, asked for every step, gives the same outcomes."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from poolwright.sim.outcome import RequestOutcome, RunOutcome
from support.sim_cases import case_of, run

_TOLERANCE_SECONDS = 1e-6  # sums of many steps in closed form, against one by one
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # a seed does not shrink
_SEEDS = st.integers(0, 2**48)


def _assert_same(fast: RunOutcome, exact: RunOutcome) -> None:
    for a, b in zip(fast.requests, exact.requests, strict=True):
        assert _facts(a) == _facts(b)
        assert _times(a) == pytest.approx(_times(b), abs=_TOLERANCE_SECONDS)
    assert fast.moves == exact.moves
    assert fast.steps == exact.steps
    assert fast.transferred_bytes == exact.transferred_bytes


def _facts(request: RequestOutcome) -> tuple[object, ...]:
    return (
        request.number,
        request.refused,
        request.prompt_uid,
        request.token_uid,
        request.preemptions,
        request.restarts,
        request.cached_tokens,
        sum(count for _, count in request.gaps),
        request.first_token_seconds is None,
        request.finished_seconds is None,
    )


def _times(request: RequestOutcome) -> list[float]:
    first, finished = request.first_token_seconds, request.finished_seconds
    gaps = sum(seconds * count for seconds, count in request.gaps)
    return [first or 0.0, finished or 0.0, gaps]


@settings(max_examples=50, deadline=None, phases=_PHASES)
@given(_SEEDS)
def test_the_fast_mode_gives_what_the_engines_scheduler_gives(seed: int) -> None:
    case = case_of(seed)
    _assert_same(run(case, exact=False), run(case, exact=True))


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=1000, deadline=None, phases=_PHASES)
@given(_SEEDS)
def test_it_does_so_on_a_thousand_drawn_traces(seed: int) -> None:
    case = case_of(seed)
    _assert_same(run(case, exact=False), run(case, exact=True))


@settings(max_examples=30, deadline=None, phases=_PHASES)
@given(_SEEDS)
def test_every_request_is_accounted_for(seed: int) -> None:
    case = case_of(seed)
    outcome = run(case, exact=False)
    assert [r.number for r in outcome.requests] == list(range(len(case.trace)))
    for request in outcome.requests:
        gaps = sum(count for _, count in request.gaps)
        if request.finished_seconds is not None:
            assert request.first_token_seconds is not None
            assert request.arrival_seconds < request.first_token_seconds <= request.finished_seconds
            assert gaps == request.output_tokens - 1
            between = request.finished_seconds - request.first_token_seconds
            assert sum(seconds * count for seconds, count in request.gaps) == pytest.approx(between, abs=1e-6)
        else:
            assert request.refused or case.losses or outcome.notes
            assert gaps < request.output_tokens
