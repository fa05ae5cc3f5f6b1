"""What policies ask of a machine before they serve."""

import pytest

from poolwright.sim.baselines.profile import MachineProfile, Profiles
from poolwright_protocol.roles import Role
from support.line_machine import MODEL, machine, setting


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    profile = MachineProfile(MODEL, step_tokens=2048)
    assert profile.prompt_seconds(2048) == pytest.approx(0.01 + 0.2048)
    assert profile.prompt_seconds(8192) == pytest.approx(4 * (0.01 + 0.2048))
    assert profile.prompt_seconds(0) == 0.0


def test_the_largest_batch_keeps_the_gap_and_fits_the_memory() -> None:
    profile = MachineProfile(MODEL)
    batch = profile.most_decodes(0.02, 100)
    assert profile.decode_seconds(batch, batch * 100) <= 0.02 < profile.decode_seconds(batch + 1, (batch + 1) * 100)
    assert profile.most_decodes(1000.0, 10_000) == 10  # memory
    assert profile.most_decodes(0.001, 100) == 0


def test_lines_are_fitted_exactly_where_the_machine_is_a_line() -> None:
    profile = MachineProfile(MODEL)
    slope, floor = profile.decode_line(1000)
    assert (slope, floor) == (pytest.approx(1e-7 + 1e-7), pytest.approx(0.01))
    assert profile.decode_plane() == pytest.approx((0.01, 1e-4, 1e-7))


def test_a_queue_is_the_sum_of_its_prompts_and_follows_its_changes() -> None:
    profiles = Profiles(setting())
    one = profiles.first.prompt_seconds
    assert profiles.queue_seconds(machine("a", Role.PROMPT, waiting_prompts=(100, 200))) == one(100) + one(200)
    assert profiles.queue_seconds(machine("a", Role.PROMPT, waiting_prompts=(200,))) == one(200)
    assert profiles.queue_seconds(machine("b", Role.PROMPT)) == 0.0


def test_the_saturating_length_gives_nearly_the_best_throughput() -> None:
    profile = MachineProfile(MODEL)
    at = profile.saturating_tokens()
    rates = {n: n / (0.01 + n * 1e-4) for n in (64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)}
    assert rates[at] >= 0.95 * max(rates.values())
    assert all(rate < 0.95 * max(rates.values()) for n, rate in rates.items() if n < at)
