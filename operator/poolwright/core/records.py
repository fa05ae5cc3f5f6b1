"""The records of moves: how each ended, by what the machines say, and which are kept."""

from collections.abc import Sequence
from dataclasses import replace

from poolwright.core.decision import MOVE_DEADLINE_SECONDS, MoveRecord, Outcome
from poolwright.core.machine import Machine
from poolwright.core.spec import PolicySpec

KEPT_RECORDS = 32


def settle_records(now: float, machines: Sequence[Machine], records: Sequence[MoveRecord]) -> tuple[MoveRecord, ...]:
    """Close the records of moves that have ended, by what the machines say. A move that never began is forgotten."""
    by_uid = {m.uid: m for m in machines}
    settled = []
    for record in records:
        machine = by_uid.get(record.uid)
        if record.finished_at is not None:
            settled.append(record)
        elif machine is None or machine.deleting:
            settled.append(replace(record, finished_at=now, outcome=Outcome.LOST))
        elif machine.move is not None and machine.move.from_role is not None:
            settled.append(record)
        elif machine.role_since is not None and machine.role_since >= record.started_at:
            outcome = Outcome.COMPLETED if machine.role is record.to_role else Outcome.ROLLED_BACK
            settled.append(replace(record, finished_at=machine.role_since, outcome=outcome))
        elif now < record.started_at + MOVE_DEADLINE_SECONDS:
            settled.append(record)  # begun a moment ago, or about to be
    return tuple(settled)


def trimmed(now: float, records: tuple[MoveRecord, ...], spec: PolicySpec) -> tuple[MoveRecord, ...]:
    """The last ones, and none that still counts: open, or begun inside the window."""
    counting = [
        r for r in records if r.finished_at is None or (not r.repair and now - r.started_at < spec.window_seconds)
    ]
    rest = [r for r in records if r not in counting]
    kept = rest[max(0, len(rest) - max(0, KEPT_RECORDS - len(counting))) :]
    return tuple(r for r in records if r in counting or r in kept)
