"""What one part of the policy wants, before anyone asked whether it may."""

from dataclasses import dataclass

from poolwright.core.decision import PlannedMove, Reason
from poolwright_protocol.roles import Role


@dataclass(frozen=True, slots=True)
class Choice:
    """`concluded`: the plan looked at everything, so the next look is one interval away. `asks`: the roles that this
    plan would shift between, for the next one to confirm. `helps`: the pool that a move helps out of a miss; no plan
    takes from it for `helps_seconds`."""

    reason: Reason
    message: str
    moves: tuple[PlannedMove, ...] = ()
    concluded: bool = False
    asks: frozenset[tuple[Role, Role]] = frozenset()
    helps: Role | None = None
    helps_seconds: float = 0.0
