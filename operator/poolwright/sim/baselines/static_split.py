"""Every split that never changes: the sweep whose best, chosen in hindsight, is what a moving policy must beat."""

from collections.abc import Iterator

from poolwright.sim.baselines.pools import split_roles
from poolwright.sim.baselines.routers import MakeRouter, ShortestQueue
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.policy import Policy

SOURCE = "no publication: the grid that Splitwise (ISCA '24, section 4.4) and DistServe (OSDI '24, section 4) search"


def static_split(prompt: int, token: int, mixed: int = 0, router: MakeRouter = ShortestQueue) -> Policy:
    mixed_name = f"{mixed}M" if mixed else ""
    return Policy(
        name=f"static {prompt}P{mixed_name}{token}T",
        source=SOURCE,
        router=router,
        scaler=lambda setting: None,
        first_roles=lambda setting: split_roles(setting, prompt, mixed),
        rules=split_rules,
        parameters={"prompt": prompt, "mixed": mixed, "token": token},
    )


def every_split(machines: int, most_mixed: int = 1, router: MakeRouter = ShortestQueue) -> Iterator[Policy]:
    """All splits with at least one machine for each phase and up to `most_mixed` mixed ones, and all mixed."""
    for mixed in range(0, min(most_mixed, machines - 1) + 1):
        rest = machines - mixed
        for prompt in range(1 if not mixed else 0, rest + (1 if mixed else 0)):
            yield static_split(prompt, rest - prompt, mixed, router)
    yield static_split(0, 0, machines, router)
