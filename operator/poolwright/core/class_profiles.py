"""From what engines say of their machines to one price list for each class: that of its median machine.

Machines of a class are meant to be alike, and each measures itself: one that was disturbed, or that is ill, must price
no other. The median is a machine that exists, taken for each kind of step apart: its lines come from one fit, and
machines that never compute prompts say nothing of them.
"""

from collections.abc import Iterable, Mapping, Sequence

from poolwright.core.machine import Machine
from poolwright.core.pricing import MachinePrices
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.step_time import StepCost, StepProfile

# The steps by which machines are told faster from slower: tokens, and tokens of context.
_DECODES = (16, 16 * 512)
_PROMPTS = (256, 512)


def class_profiles(machines: Iterable[Machine], profiles: Mapping[str, MachineProfile]) -> dict[str, MachineProfile]:
    """By class, those of which both kinds of step are known by some machine; `profiles` by uid of machine."""
    of_class: dict[str, list[MachineProfile]] = {}
    for machine in machines:
        if (profile := profiles.get(machine.uid)) is not None:
            of_class.setdefault(machine.machine_class, []).append(profile)
    found = {name: _median_machine(said) for name, said in of_class.items()}
    return {name: p for name, p in found.items() if p.decode is not None and p.mixed is not None}


def prices_of(profile: MachineProfile) -> MachinePrices | None:
    """None where a kind of step is not known."""
    if profile.decode is None or profile.mixed is None:
        return None
    return MachinePrices(
        StepProfile(profile.decode, profile.mixed),
        step_tokens=profile.max_tokens_per_step,
        most_streams=profile.max_sequences,
        tile_tokens=profile.tile_tokens,
        kv_capacity_tokens=profile.kv_capacity_tokens,
        kv_bytes_per_token=profile.kv_bytes_per_token,
    )


def _median_machine(said: Sequence[MachineProfile]) -> MachineProfile:
    return MachineProfile(
        decode=_median_cost([p.decode for p in said if p.decode is not None], *_DECODES),
        mixed=_median_cost([p.mixed for p in said if p.mixed is not None], *_PROMPTS),
        max_tokens_per_step=_median([p.max_tokens_per_step for p in said]),
        max_sequences=_median([p.max_sequences for p in said]),
        tile_tokens=_median([p.tile_tokens for p in said]),
        kv_capacity_tokens=_median_known([p.kv_capacity_tokens for p in said]),
        kv_bytes_per_token=_median_known([p.kv_bytes_per_token for p in said]),
    )


def _median_cost(costs: Sequence[StepCost], tokens: int, kv_tokens: int) -> StepCost | None:
    if not costs:
        return None
    ordered = sorted(costs, key=lambda c: (c.seconds(tokens, kv_tokens), c.fixed_seconds, c.token_seconds))
    return ordered[len(ordered) // 2]  # of an even number the slower: who is promised less is not disappointed


def _median(values: Sequence[int]) -> int:
    return sorted(values)[(len(values) - 1) // 2]


def _median_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return _median(known) if known else None
