"""The demo chooses a load that can show what it promises on any machine; its summary says why a promise was broken."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rich.console import Console

from poolwright.core.decision import MIN_SAMPLES
from poolwright.local.demo import MOST_WINDOW_SECONDS, DemoFailed, Load
from poolwright.local.summary import Phase, Run, slowed, summarize
from poolwright.local.traffic import Outcome, Shape

UNLOADED = 1.0
INSUFFICIENT = {
    "time": "2026-01-01T00:00:07Z",
    "mode": "Active",
    "reason": "InsufficientSamples",
    "message": "tbt: 16 samples, 20 needed",
}


def load(ttft_unloaded: float, prompts_per_second: float, window: int = 30) -> Load:
    return Load(ttft_unloaded, 0.2, 0.1, prompts_per_second, Shape(60, 20), window)


@pytest.mark.parametrize(("ttft_unloaded", "prompts_per_second"), [(0.1, 12.0), (0.5, 2.0), (1.2, 0.9), (3.0, 0.4)])
def test_each_phase_brings_more_requests_into_a_window_than_the_policy_needs(
    ttft_unloaded: float, prompts_per_second: float
) -> None:
    chosen = load(ttft_unloaded, prompts_per_second)
    for per_second in (chosen.prompts_per_second, chosen.decode_requests_per_second):
        assert per_second * chosen.window_seconds >= 1.5 * MIN_SAMPLES
    assert 30 <= chosen.window_seconds <= MOST_WINDOW_SECONDS
    # The old samples leave, a machine moves, and there is a window of what that brought.
    assert chosen.phase_seconds > 2 * chosen.window_seconds
    assert chosen.after_seconds <= chosen.window_seconds


def test_a_fast_machine_keeps_the_window_of_the_manifest_unless_it_takes_hours() -> None:
    assert load(0.2, 8.0).window_seconds == 30
    assert load(0.2, 8.0, window=3600).window_seconds == MOST_WINDOW_SECONDS


def test_a_machine_on_which_nothing_can_be_shown_is_refused_before_the_traffic() -> None:
    with pytest.raises(DemoFailed, match="too slow, or too busy now: a first token takes 9000 ms"):
        _ = load(9.0, 0.2).window_seconds


def phase(
    metric: str,
    seconds: float,
    moves: Sequence[Mapping[str, Any]] = (),
    *,
    again: float | None = UNLOADED,
    ttft: float = UNLOADED,
    decisions: Sequence[Mapping[str, Any]] = (),
) -> Phase:
    """All samples of the metric are this many seconds; the target is 2."""
    first = seconds if metric == "TTFT" else ttft
    outcomes = [Outcome(float(at), first, [seconds], [float(at) + 1], 2) for at in range(60)]
    name = "prompt-heavy phase" if metric == "TTFT" else "decode-heavy phase"
    return Phase(name, metric, 90, 2.0, outcomes, 0.0, 45.0, moves, 10.0 if moves else None, decisions, again)


def move(to: str) -> dict[str, Any]:
    return {"machine": "pod-c", "uid": "c", "from": "Mixed", "to": to, "outcome": "Completed"}


def said(prompt_heavy: Phase, decode_heavy: Phase, failures: Sequence[str] = ()) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=400, force_terminal=False)
    good = summarize(console, UNLOADED, [Run("Active", [prompt_heavy, decode_heavy], 120, failures)], {"router": 80})
    assert isinstance(console.file, io.StringIO)
    return good, console.file.getvalue()


def test_what_was_kept_is_said_with_moves_metric_and_figures() -> None:
    good, text = said(phase("TTFT", 1.0, [move("Prompt")]), phase("TBT", 0.5, [move("Token")]))
    assert good
    assert "Every promise was kept." in text
    assert "✗" not in text
    assert "The prompt-heavy phase (mode Active)" in text
    assert "moves: pod-c Mixed → Prompt" in text
    assert "TTFT before the first move: P50 1000, P90 1000, P99 1000 ms of 10 samples" in text
    assert "TTFT of its last part: P50 1000" in text
    assert "failed: 0" in text


def test_a_broken_promise_comes_with_what_the_policy_decided_in_that_phase() -> None:
    good, text = said(phase("TTFT", 1.0, [move("Prompt")]), phase("TBT", 3.0, decisions=[INSUFFICIENT]))
    assert not good
    assert "✗ no machine moved into the token or mixed pool" in text
    assert "✗ at the end of the decode-heavy phase P90 of TBT missed its target: 3000 ms, not 2000 ms" in text
    assert "What the policy decided in the decode-heavy phase:" in text
    assert "2026-01-01T00:00:07Z InsufficientSamples: tbt: 16 samples, 20 needed" in text
    assert "decided in the prompt-heavy" not in text
    assert "Not every promise was kept." in text
    assert "Inconclusive" not in text


def test_a_broken_promise_on_a_machine_that_slowed_down_is_inconclusive() -> None:
    good, text = said(phase("TTFT", 7.0, again=3.0), phase("TBT", 0.5, [move("Token")]))
    assert not good
    assert "Inconclusive: this machine was busy: a first token took 1000 ms without load" in text
    assert "and 3000 ms without load after the prompt-heavy phase" in text
    assert "Not every promise was kept." not in text


def test_prompts_that_wait_where_no_split_makes_them_wait_show_a_slow_machine() -> None:
    calm = phase("TTFT", 9.0)  # overloaded on purpose: says nothing of the machine
    assert slowed(UNLOADED, [Run("Active", [calm, phase("TBT", 0.5, ttft=2.0)], 1, ())]) is None
    why = slowed(UNLOADED, [Run("Active", [calm, phase("TBT", 0.5, ttft=6.0)], 1, ())])
    assert why is not None
    assert "6000 ms (P50) in the decode-heavy phase" in why


def test_a_machine_that_slowed_down_and_kept_every_promise_is_no_failure() -> None:
    good, text = said(phase("TTFT", 1.0, [move("Prompt")], again=3.0), phase("TBT", 0.5, [move("Token")]))
    assert good
    assert "Inconclusive" not in text


def test_failures_are_counted_and_the_first_is_shown() -> None:
    good, text = said(
        phase("TTFT", 1.0, [move("Prompt")]), phase("TBT", 0.5, [move("Token")]), ["502: [no machine]", "b"]
    )
    assert not good
    assert "✗ 2 requests failed, the first: 502: [no machine]" in text
