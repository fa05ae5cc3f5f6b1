"""How many machines each pool is to have at the start, and which counts the classes can fill at all."""

from collections.abc import Iterator, Mapping
from itertools import combinations

from poolwright.core.spec import Mode, PolicySpec
from poolwright_protocol.roles import Role

Counts = dict[Role, int]


def role_subsets() -> Iterator[frozenset[Role]]:
    for size in (1, 2, 3):
        yield from map(frozenset, combinations(Role, size))


def fillable(counts: Mapping[Role, int], machines: Mapping[str, int], spec: PolicySpec) -> bool:
    """Hall's condition: whether `machines` (by class) can take these roles, each machine at most one."""
    return all(
        sum(counts.get(role, 0) for role in subset) <= sum(n for c, n in machines.items() if spec.roles_of(c) & subset)
        for subset in role_subsets()
    )


def budget_by_class(spec: PolicySpec) -> dict[str, int]:
    return {c.name: c.replicas for c in spec.classes}


def starting_split(spec: PolicySpec) -> Counts:
    """What is asked for first (replicas, else min), then one mixed machine, the rest alternating token and prompt.

    A lone machine is mixed where it may be: it has both phases to serve.
    """
    machines = budget_by_class(spec)
    counts: Counts = {role: bounds.minimum for role, bounds in spec.pools.items()}
    for role, bounds in spec.pools.items():
        if bounds.replicas is not None:
            counts[role] = bounds.replicas

    def grow(role: Role) -> bool:
        maximum = spec.pools[role].maximum
        grown = {**counts, role: counts[role] + 1}
        if (maximum is not None and grown[role] > maximum) or not fillable(grown, machines, spec):
            return False
        counts[role] += 1
        return True

    wants_mixed = counts[Role.MIXED] == 0 and spec.pools[Role.MIXED].replicas is None and spec.budget != 2
    if sum(counts.values()) < spec.budget and wants_mixed:
        grow(Role.MIXED)
    while sum(counts.values()) < spec.budget:
        fewer, more = (
            (Role.TOKEN, Role.PROMPT) if counts[Role.TOKEN] <= counts[Role.PROMPT] else (Role.PROMPT, Role.TOKEN)
        )
        if not (grow(fewer) or grow(more) or grow(Role.MIXED)):
            break  # the classes leave no room: those machines stay without a role
    return counts


def desired_counts(remembered: Mapping[Role, int] | None, spec: PolicySpec) -> Counts:
    """The user's counts in Manual; else what was remembered, where it still fits the spec; else the start."""
    if spec.mode is not Mode.MANUAL and remembered is not None:
        counts = {role: remembered.get(role, 0) for role in Role}
        within = all(
            b.minimum <= counts[r] and (b.maximum is None or counts[r] <= b.maximum) for r, b in spec.pools.items()
        )
        if within and sum(counts.values()) == spec.budget and fillable(counts, budget_by_class(spec), spec):
            return counts
    return starting_split(spec)
