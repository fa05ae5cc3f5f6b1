"""Arrow's algorithms and Narwhal's planner decide as Narwhal's own code did."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from poolwright.sim.baselines.arrow import Arrow, Capability, Engine, Thresholds
from poolwright.sim.baselines.narwhal import Attained, Knobs, Planner
from poolwright.sim.baselines.pools import moves_to
from poolwright.sim.policy import Slo
from poolwright_protocol.roles import Role

Recorded = Callable[[str], Any]
ROLES = {"prefill": Role.PROMPT, "decode": Role.TOKEN, "p": Role.PROMPT, "d": Role.TOKEN}


def capability(profile: dict[str, float]) -> Capability:
    return Capability(*(profile[k] for k in ("ttft_a", "ttft_b", "ttft_c", "tpot_slope", "tpot_intercept")))


def engines(case: dict[str, Any]) -> list[Engine]:
    return [
        Engine(
            e["uid"],
            ROLES[e["role"]],
            capability(profile),
            sum(e["prefill"]),
            sum(map(capability(profile).prompt_seconds, e["prefill"])),
            len(e["decode"]),
            sum(e["decode"]),
            max(e["mean_gap"], e["stalled_gap"]),
            e["mean_prefill_seconds"],
        )
        for e, profile in zip(case["engines"], case["profiles"], strict=True)
    ]


def arrow(case: dict[str, Any]) -> Arrow:
    return Arrow(
        Slo(*case["slo"]), Thresholds(*case["thresholds"], sustained_ticks=3), last_flip_to_decode=case["last_flip"]
    )


def test_requests_are_placed_and_machines_flipped_as_narwhal_does(recorded: Recorded) -> None:
    decisions = recorded("narwhal-schedule")
    assert len(decisions) >= 1000
    for decision in decisions:
        case, out = decision["in"], decision["out"]
        policy, fleet, phase = arrow(case), engines(case), ROLES[case["phase"]]
        policy.may_flip = not case["planner_owns"]
        choice = policy.place(case["now"], fleet, phase, case["prompt"] + case["output"], case["prior"])
        flips = [[choice.flipped, {Role.PROMPT: "prefill", Role.TOKEN: "decode"}[phase]]] if choice.flipped else []
        assert (choice.uid, flips) == (out["uid"], out["flips"]), case


def test_the_monitoring_pass_flips_as_narwhal_does(recorded: Recorded) -> None:
    decisions = recorded("narwhal-monitor")
    assert len(decisions) >= 1000
    for decision in decisions:
        case, out = decision["in"], decision["out"]
        policy = arrow(case)
        policy.sustained = case["sustained"]
        assert policy.monitor(case["now"], engines(case)) == out["flipped"], case
        assert policy.sustained == out["sustained"], case


def test_the_planner_moves_as_narwhal_does(recorded: Recorded) -> None:
    count = 0
    for sequence in recorded("narwhal-planner"):
        fleet = [capability(p) for p in sequence["profiles"]]
        roles = [ROLES[r] for r in sequence["roles"]]
        planner = Planner(Knobs(attainment_floor=sequence["floor"]))
        outcomes: list[list[float]] = []
        for which, now, arrivals, residency, ended, held, moved, after in sequence["steps"]:
            for at, tokens in arrivals:
                planner.arrived(at, sum(c.prompt_seconds(tokens) for c in fleet) / len(fleet))
            for at, value in residency:
                planner.sampled(at, value)
            outcomes += ended
            prompt = roles.count(Role.PROMPT)
            if which == "plan":
                recent = [o for o in outcomes if o[0] >= now - 120.0]
                attained = (
                    Attained(len(recent), *(sum(o[i] for o in recent) / len(recent) for i in (1, 2)))
                    if recent
                    else None
                )
                want = planner.plan(now, prompt, len(roles), attained)
            else:
                want = planner.fast(now, prompt, len(roles))
            before = list(roles)
            _move(roles, held, prompt if want is None else want)
            if which == "fast" and roles != before:
                planner.last_fast = now
            assert (sum(a is not b for a, b in zip(roles, before, strict=True)), roles) == (
                moved,
                [ROLES[r] for r in after],
            ), (sequence["roles"], which, now)
            count += 1
    assert count >= 1000


def _move(roles: list[Role], held: list[int], prompt: int) -> None:
    """As the baseline itself moves: the emptiest first."""
    machines = [
        SimpleNamespace(uid=i, role=role, ready=True, moving_to=None, held=held[i]) for i, role in enumerate(roles)
    ]
    view: Any = SimpleNamespace(machines=machines)
    for change in moves_to(view, prompt, "plan", lambda m: m.held):  # type: ignore[attr-defined]
        roles[int(change.uid)] = change.role
