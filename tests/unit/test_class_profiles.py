"""One price list for a class, whatever its machines say of themselves."""

from dataclasses import replace

from poolwright.core.class_profiles import class_profiles, prices_of
from poolwright.core.machine import Machine
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile

USUAL = MachineProfile(StepCost(0.02, 1e-4, 1e-8), StepCost(0.03, 2e-4, 2e-8), 2048, 256, 64, kv_capacity_tokens=90_000)


def slower(times: float) -> MachineProfile:
    def scaled(cost: StepCost | None) -> StepCost | None:
        return cost and StepCost(*(times * s for s in (cost.fixed_seconds, cost.token_seconds, cost.kv_token_seconds)))

    return replace(USUAL, decode=scaled(USUAL.decode), mixed=scaled(USUAL.mixed))


def machines(count: int, machine_class: str = "h100") -> list[Machine]:
    return [
        Machine(f"m{i}", f"{machine_class}-{i}", machine_class, "10.0.0.1", True, Role.MIXED, 1, 0.0, None, 0.0)
        for i in range(count)
    ]


def test_the_median_machine_speaks_for_its_class() -> None:
    fleet = machines(5)
    said = dict(zip([m.uid for m in fleet], (USUAL, slower(1.1), slower(40), slower(0.9), slower(1.05)), strict=True))
    assert class_profiles(fleet, said) == {"h100": slower(1.05)}
    assert class_profiles(reversed(fleet), said) == {"h100": slower(1.05)}


def test_of_two_that_disagree_the_slower_speaks() -> None:
    fleet = machines(2)
    assert class_profiles(fleet, {"h100-0": slower(3), "h100-1": USUAL}) == {"h100": slower(3)}


def test_kinds_of_steps_may_be_known_by_different_machines() -> None:
    fleet = machines(3)
    said = {"h100-0": replace(USUAL, mixed=None), "h100-1": replace(USUAL, decode=None)}
    assert class_profiles(fleet, said) == {"h100": USUAL}
    assert class_profiles(fleet, {"h100-0": replace(USUAL, mixed=None)}) == {}


def test_classes_are_priced_apart_and_a_silent_one_not_at_all() -> None:
    fleet = machines(2) + machines(2, "a100") + machines(1, "l4")
    said = {"h100-0": USUAL, "a100-1": slower(2), "of-another-pool": slower(9)}
    assert class_profiles(fleet, said) == {"h100": USUAL, "a100": slower(2)}
    assert class_profiles(fleet, {}) == {}


def test_memory_is_the_lower_median_of_those_that_say() -> None:
    fleet = machines(3)
    said = {
        "h100-0": replace(USUAL, kv_capacity_tokens=None),
        "h100-1": replace(USUAL, kv_capacity_tokens=80_000),
        "h100-2": USUAL,
    }
    assert class_profiles(fleet, said)["h100"].kv_capacity_tokens == 80_000


def test_prices_are_the_profile_in_the_policys_words() -> None:
    prices = prices_of(USUAL)
    assert prices is not None
    assert USUAL.decode is not None
    assert USUAL.mixed is not None
    assert prices.profile == StepProfile(USUAL.decode, USUAL.mixed)
    assert (prices.step_tokens, prices.most_streams, prices.tile_tokens) == (2048, 256, 64)
    assert (prices.kv_capacity_tokens, prices.kv_bytes_per_token) == (90_000, None)
    assert prices_of(replace(USUAL, mixed=None)) is None
