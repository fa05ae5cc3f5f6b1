"""What each part of ours is worth, and what wrong beliefs cost: `--ablation` and `--sensitivity`.

Ours with one of its options the other way, and ours in worlds that are not as it was told. Runs nothing.
"""

import dataclasses
import statistics
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.policy.cells import AS_IT_IS, Cell, Twist
from bench.policy.contenders import OURS, WITHOUT
from bench.policy.known import Known
from bench.policy.parts import PARTS
from bench.policy.schedule import Stages, capacity_of, questions
from bench.policy.verdict import Difference, paired

from poolwright.core.ledger import ReturnRule
from poolwright.sim.ours import Options

CELLS = (
    "conversation-70b-n4",
    "code-70b-n2",
    "wrong-split-70b-n8",
    "burst-8b-n4",
    "mooncake-70b-h100-n4",
    "swing-70b-n4",
)
SEEDS = (1, 2, 3)
FAR = 1000  # more than any window holds moves
TWISTS: Mapping[str, Twist] = {
    "output forecast halved": Twist(forecast=0.5),
    "output forecast doubled": Twist(forecast=2.0),
    "step times believed 20 % shorter": Twist(profile=0.8),
    "step times believed 20 % longer": Twist(profile=1.2),
    "scrape 5 s late": Twist(scrape_delay_seconds=5.0),
    "scrape 15 s late": Twist(scrape_delay_seconds=15.0),
    "scrape 30 s late": Twist(scrape_delay_seconds=30.0),
    "scrape 60 s late": Twist(scrape_delay_seconds=60.0),
    "network believed a tenth": Twist(bandwidth=0.1),
    "network believed tenfold": Twist(bandwidth=10.0),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """`policy` in a world with `twist`."""

    name: str
    policy: str
    twist: Twist = AS_IT_IS


@dataclass(frozen=True, slots=True)
class Effect:
    """`difference`: of ours as it is, less this."""

    variant: str
    value: float
    moves_per_hour: float
    difference: Difference | None


AS_IS = Variant("as it is", OURS)


def ablation() -> list[Variant]:
    """Every part that can be off, off; every one that is off, on. Relegation and refusal are among the options."""
    kinds = typing.get_type_hints(Options)
    found = [AS_IS]
    for part in dataclasses.fields(Options):
        if kinds[part.name] is bool:
            word = "off" if part.default else "on"
            found.append(Variant(f"{part.name} {word}", f"{OURS}:{part.name}={word}"))
    found += [
        Variant("dwell off", f"{OURS}:dwell_seconds=0"),
        Variant("cap on moves off", f"{OURS}:max_moves_per_window={FAR}"),
        *(Variant(f"{part} off", f"{OURS}:{WITHOUT}={part}") for part in PARTS),
    ]
    found.append(Variant("lent machines return when idle", f"{OURS}:return_rule={ReturnRule.IDLE.name.lower()}"))
    return found


def sensitivity() -> list[Variant]:
    return [AS_IS, *(Variant(name, OURS, twist) for name, twist in TWISTS.items())]


def stages(cell: Cell, known: Known, variants: Sequence[Variant], seeds: Sequence[int]) -> Stages:
    yield [capacity_of(cell)]
    asked = questions(cell, known)
    if asked is not None:
        yield [asked.policy(v.policy, seed, twist=v.twist) for seed in seeds for v in variants]


def effects(cell: Cell, known: Known, variants: Sequence[Variant], seeds: Sequence[int]) -> list[Effect]:
    """Of those that were run."""
    asked = questions(cell, known)
    if asked is None:
        return []
    values: dict[str, dict[int, float]] = {}
    moves: dict[str, list[float]] = {}
    for variant in variants:
        for seed in seeds:
            found = known(asked.policy(variant.policy, seed, twist=variant.twist))
            if found is not None and found.value is not None:
                values.setdefault(variant.name, {})[seed] = found.value
                moves.setdefault(variant.name, []).append(found.moves_per_hour)
    own = values.get(AS_IS.name, {})
    return [
        Effect(
            name,
            statistics.fmean(by_seed.values()),
            statistics.fmean(moves[name]),
            None if name == AS_IS.name else paired(own, by_seed),
        )
        for name, by_seed in values.items()
    ]
