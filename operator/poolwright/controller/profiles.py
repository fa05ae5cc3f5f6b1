"""What the engines of one pool last said of their machines, and what routers are told from it.

Engines say it with their role, which every look asks for, so nothing here asks again. Which machine speaks for its
class is `core.class_profiles`'; what a note holds, and when it is news, is `core.router_note`'s.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from poolwright.core.class_profiles import class_profiles
from poolwright.core.machine import Machine
from poolwright.core.router_note import RouterNote
from poolwright.core.spec import Metric, PolicySpec
from poolwright.machines import Conflict, Machines
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import RoleState

log = logging.getLogger(__name__)


class Profiles:
    """A machine keeps what its engine last said while the engine gives no answer, or one that cannot be."""

    def __init__(self) -> None:
        self._said: dict[str, MachineProfile] = {}
        self._problems: dict[str, str] = {}

    def hear(self, answers: Iterable[tuple[Machine, RoleState | None]]) -> None:
        """Of all machines there are: those that are not among them are forgotten."""
        alive = set()
        for machine, state in answers:
            uid = machine.uid
            alive.add(uid)
            if state is None:
                continue
            if state.step_profile is not None:
                self._said[uid] = state.step_profile
            if state.step_profile_problem != self._problems.get(uid, ""):
                self._problems[uid] = state.step_profile_problem
                if state.step_profile_problem:
                    log.warning(
                        "What an engine says of its machine was refused machine=%s error=%s",
                        machine.name,
                        state.step_profile_problem,
                    )
        for known in (self._said, self._problems):
            for uid in known.keys() - alive:
                known.pop(uid)

    def of_classes(self, machines: Iterable[Machine]) -> dict[str, MachineProfile]:
        return class_profiles(machines, self._said)


async def tell_routers(
    store: Machines,
    machines: Sequence[Machine],
    profiles: Mapping[str, MachineProfile],
    spec: PolicySpec,
    bounds: Mapping[str, int],
    *,
    prices_count: bool,
    relegates: bool,
    refuses: bool,
) -> None:
    """Write the note of each machine that has news for routers; where prices do not count, take it away. Raises
    Unavailable."""
    ttft, tbt = spec.objective(Metric.TTFT), spec.objective(Metric.TBT)
    for machine in machines:
        if not prices_count:
            if machine.note is not None:
                await _write(store, machine, None)
            continue
        profile = profiles.get(machine.machine_class)
        if profile is None or machine.deleting:
            continue
        role = machine.effective_role
        of_role = spec.pools[role].max_prefill_tokens_per_step if role is not None else None
        note = RouterNote(
            profile,
            ttft_seconds=ttft.target_seconds if ttft else None,
            tbt_seconds=tbt.target_seconds if tbt else None,
            tbt_percentile=float(tbt.percentile) if tbt else None,
            max_prefill_tokens_per_step=of_role if of_role is not None else bounds.get(machine.uid),
            relegates=relegates,
            refuses=refuses,
        )
        if note.is_news_after(machine.note):
            await _write(store, machine, note)


async def _write(store: Machines, machine: Machine, note: RouterNote | None) -> None:
    try:
        await store.annotate(machine, note)
    except Conflict as error:
        log.info("A machine went before routers were told of it error=%s", error)
