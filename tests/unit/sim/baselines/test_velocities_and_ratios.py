"""TokenScale's velocities, HeteroScale's proportional rule, DOPD's ratio, and what each does with a cluster."""

import pytest

from poolwright.sim.baselines.dopd import dopd, ratio
from poolwright.sim.baselines.heteroscale import DecodeRate, decode_machines
from poolwright.sim.baselines.profile import MachineProfile
from poolwright.sim.baselines.tokenscale import BurstRouter, Velocities, VelocityScaler, tokenscale, wanted
from poolwright.sim.policy import Placement
from poolwright_protocol.roles import Role
from support.line_machine import MODEL, arrival, cluster, histogram, machine, setting


def test_prompt_machines_follow_the_slower_of_prompt_and_network() -> None:
    velocities = Velocities(setting())
    arrivals = [arrival(n, prompt=1000, output=1) for n in range(400)]
    rate = 40_000.0
    assert wanted(arrivals, 10.0, velocities)[0] == -(-rate // velocities.prompt)
    velocities.network = 1000.0
    assert wanted(arrivals, 10.0, velocities)[0] == 40


def test_token_machines_follow_the_answers() -> None:
    velocities = Velocities(setting())
    short = [arrival(n, output=10) for n in range(400)]
    long = [arrival(n, output=1000) for n in range(400)]
    assert wanted(short, 10.0, velocities)[1] < wanted(long, 10.0, velocities)[1]


def test_a_burst_of_prompts_goes_to_a_convertible_decoder() -> None:
    router = BurstRouter(setting(ttft=1.0))
    prompt = machine("p", Role.PROMPT, waiting_prompts=(2048,) * 8)
    view = cluster(prompt, machine("c", Role.MIXED), machine("t", Role.TOKEN))
    assert router.route(0.0, arrival(), view) == Placement("c", reason="burst")
    calm = cluster(machine("p", Role.PROMPT), machine("c", Role.MIXED), machine("t", Role.TOKEN))
    routed = router.route(0.0, arrival(), calm)
    assert isinstance(routed, Placement)
    assert routed.prompt_uid == "p"


def test_convertible_decoders_stay_what_they_are() -> None:
    assert list(tokenscale(4).first_roles(setting(8))).count(Role.MIXED) == 1
    arrivals = [arrival(n, prompt=8000, output=1) for n in range(200)]
    view = cluster(
        machine("p", Role.PROMPT),
        machine("c", Role.MIXED),
        machine("t0", Role.TOKEN),
        machine("t1", Role.TOKEN, decodes=1),
        arrivals=arrivals,
    )
    assert [c.uid for c in VelocityScaler(setting()).tick(20.0, view)] == ["t0"]


@pytest.mark.parametrize(
    ("rate", "late", "machines"),
    [(400, False, 4), (430, False, 4), (370, False, 4), (460, False, 5), (200, False, 2), (400, True, 5)],
)
def test_decode_machines_are_proportional_outside_the_band(rate: float, late: bool, machines: int) -> None:
    assert decode_machines(4, rate, 100.0, late) == machines


def test_a_fixed_ratio_on_fixed_machines_is_a_fixed_split() -> None:
    scaler = DecodeRate(setting(8))
    roles = [Role.PROMPT] * 2 + [Role.TOKEN] * 6
    splits = set()
    for rate in (10.0, 100.0, 1000.0):
        view = cluster(*(machine(f"m{i}", r) for i, r in enumerate(roles)), output_tokens=rate * 60)
        changes = scaler.tick(60.0, view)
        splits.add(2 + sum(1 if c.role is Role.PROMPT else -1 for c in changes))
    assert max(splits) - min(splits) <= 1  # rounding


def test_dopds_ratio_is_one_where_both_phases_take_as_long() -> None:
    profile = MachineProfile(MODEL)
    prompt, output = 1000.0, 200.0
    concurrency = int(MODEL.kv_capacity_tokens / (prompt + output / 2))
    expected = (
        concurrency
        * profile.prompt_seconds(prompt)
        / (output * profile.decode_seconds(concurrency, concurrency * (prompt + output / 2)))
    )
    assert ratio(profile, prompt, output) == pytest.approx(expected)
    assert ratio(profile, 4000, output) > ratio(profile, 500, output)


def test_dopd_moves_when_the_lengths_change() -> None:
    policy, run = dopd(2), setting(4)
    router, scaler = policy.router(run), policy.scaler(run)
    assert scaler is not None
    machines = [
        machine("p0", Role.PROMPT),
        machine("p1", Role.PROMPT),
        machine("t0", Role.TOKEN),
        machine("t1", Role.TOKEN),
    ]
    for number in range(20):
        router.route(100.0, arrival(number, prompt=100), cluster(*machines))
        router.finished(150.0, number)
    view = cluster(*machines, output_tokens=20 * 900.0, tbt=histogram(b0_05=10, binf=10))
    assert [c.role for c in scaler.tick(180.0, view)] == [Role.TOKEN]
