"""One look at one pool, the same whoever asked for it: bring what is nearer to what should be, and say so.

Order: children; moves already begun, and engines against labels; births; metrics; decision; new moves; status; Events;
what routers are told of machines.
Level-triggered: a second look at a settled world writes nothing. Policy is `core.decide`'s; the steps of a move are the
mover's; what the status says is `status.py`'s.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from poolwright.api.models import Basis, InferencePool, InferencePoolStatus, InvalidPool, Refusal, Relegation
from poolwright.api.policy import policy_spec
from poolwright.controller import status as statuses
from poolwright.controller.mover import Mover, Progress, Result
from poolwright.controller.ports import ChildrenState, Event, World
from poolwright.controller.profiles import Profiles, tell_routers
from poolwright.core.class_profiles import prices_of
from poolwright.core.decide import decide
from poolwright.core.decision import Decision, MoveRecord, Reason, Snapshot
from poolwright.core.decision import Memory as PolicyMemory
from poolwright.core.evidence import prices_text
from poolwright.core.links import Links
from poolwright.core.machine import Machine
from poolwright.core.memory import rebuild_memory
from poolwright.core.reading import MetricsReading
from poolwright.core.spec import PolicySpec
from poolwright_protocol.machine_profile import MachineProfile

_STEP_SECONDS = 0.25  # until a move that waits is looked at again
_BIRTH_SECONDS = 2.0  # until a birth that waits is: its engine may load for minutes
_LOST_RACE_SECONDS = 0.1
_RETRY_SECONDS = 2.0
_ROUNDING_SECONDS = 0.01  # of times that went through a status
_READING_SECONDS = 5.0  # between two plans a reading is good for so long


@dataclass(slots=True)
class Memory:
    """What the looks at one pool leave for the next. All of it can be lost: a new one is rebuilt from the world.

    `refresh_seconds`: measured values are written no more often.
    """

    refresh_seconds: float = 30.0
    policy: PolicyMemory | None = None
    profiles: Profiles = field(default_factory=Profiles)
    written_at: float | None = None
    reading: MetricsReading | None = None
    read_at: float = 0.0
    plan_at: float = 0.0
    invalid: str = ""


async def reconcile(world: World, memory: Memory, now: float) -> float | None:
    """Seconds until the next look is due without any event; None when there is nothing to wait for. Raises Unavailable
    or Conflict, and then wants to be called again; what was done until then stays done."""
    pool = await _read(world, memory)
    if pool is None or pool.metadata.deletion_timestamp is not None:
        return None
    children = await world.children.ensure(pool)
    spec = policy_spec(pool.spec)
    bounds = {role: bound.max_prefill_tokens_per_step for role, bound in spec.pools.items()}
    chosen_bounds = memory.policy.bounds if memory.policy else {}
    mover = Mover(world.machines, world.engines, bounds=bounds, machine_bounds=chosen_bounds)
    progress = await mover.advance_all(await world.machines.list(), now)
    machines = await _after(world, progress)
    memory.profiles.hear((p.machine, p.engine) for p in progress)
    profiles = memory.profiles.of_classes(machines)
    prices = {name: price for name, p in profiles.items() if (price := prices_of(p)) is not None}

    old = statuses.parse(pool.status)
    remembered = memory.policy or _rebuild(now, machines, old, spec)
    remembered = replace(remembered, moves=_with_drains(remembered.moves, machines, progress))
    reading = await _observe(world, memory, spec, children, now)
    counting = pool.spec.rebalance.basis is Basis.WORK
    asks = world.live if counting and prices else None
    live = await asks.read(children.router_urls, now) if asks is not None else None
    snapshot = Snapshot(machines, reading, prices if counting else {}, live, links=_links(machines, profiles))
    decision, remembered = decide(now, snapshot, spec, remembered)
    if prices and not counting:
        decision = replace(decision, evidence=(*decision.evidence, ("prices", f"not used: {prices_text(prices)}")))
    begun = await _begin(mover, machines, decision, now)
    remembered = replace(remembered, moves=_only_begun(remembered.moves, begun, now))
    memory.policy, memory.plan_at = remembered, decision.next_plan_at

    latest = {p.machine.uid: p.machine for p in begun}
    machines = tuple(latest.get(m.uid, m) for m in machines)
    facts = statuses.Facts(pool, machines, children, reading, decision, remembered.moves, old, remembered.held_until)
    waits = [*_waits(progress, begun), await _publish(world, memory, facts, now)]
    for repaired in progress:
        if repaired.result is Result.REPAIRED:
            text = f"The role of machine {repaired.machine.name} was repaired: {repaired.detail}"
            await world.store.emit(Event("Warning", "RoleRepaired", text))
    await tell_routers(
        world.machines,
        machines,
        profiles,
        spec,
        decision.bounds,
        prices_count=counting,
        relegates=pool.spec.router.relegation is Relegation.LATE,
        refuses=pool.spec.router.refusal is Refusal.LATE,
    )
    # A plan that could not be concluded is due at once, for as long as what it waits for lasts.
    patience = min(spec.interval_seconds, max(_RETRY_SECONDS, spec.interval_seconds / 12))
    next_look = spec.interval_seconds if asks is None else min(spec.interval_seconds, spec.fast_interval_seconds)
    return min(*waits, max(patience, decision.next_plan_at - now), next_look)


async def _read(world: World, memory: Memory) -> InferencePool | None:
    try:
        pool = await world.store.get()
    except InvalidPool as error:
        # An older CRD let it in. Nothing is touched until it is edited, and then an event brings it back here.
        if memory.invalid != str(error):
            memory.invalid = str(error)
            await world.store.emit(Event("Warning", "InvalidSpec", str(error)))
        return None
    memory.invalid = ""
    return pool


async def _after(world: World, progress: Sequence[Progress]) -> tuple[Machine, ...]:
    """The machines as they are after these steps; read again where another writer was first."""
    if any(p.result is Result.OUTRUN for p in progress):
        return await world.machines.list()
    return tuple(p.machine for p in progress)


def _links(machines: Sequence[Machine], profiles: Mapping[str, MachineProfile]) -> Links | None:
    """None where no node says where it stands."""
    places = {m.uid: m.place for m in machines if m.place is not None}
    sizes = [p.kv_bytes_per_token for p in profiles.values() if p.kv_bytes_per_token is not None]
    return Links(places, max(sizes, default=None)) if places else None


def _rebuild(
    now: float, machines: Sequence[Machine], old: InferencePoolStatus | None, spec: PolicySpec
) -> PolicyMemory:
    if old is None:
        return rebuild_memory(now, machines, None, None, spec)
    try:
        moves, held_until = statuses.recorded_moves(old), statuses.recorded_hold(old)
    except ValueError:
        return rebuild_memory(now, machines, None, statuses.recorded_counts(old), spec)
    return rebuild_memory(now, machines, moves, statuses.recorded_counts(old), spec, held_until)


def _with_drains(
    records: Iterable[MoveRecord], machines: Sequence[Machine], progress: Sequence[Progress]
) -> tuple[MoveRecord, ...]:
    """`drained_seconds` of the last move of each machine, once its engine knows it."""
    engines = {p.machine.uid: p.engine for p in progress if p.engine is not None and p.machine.move is None}
    since = {m.uid: m.role_since for m in machines}
    filled = []
    for record in records:
        engine, role_since = engines.get(record.uid), since.get(record.uid)
        ended = record.finished_at
        is_last = role_since is not None and ended is not None and ended >= role_since - _ROUNDING_SECONDS
        if engine is not None and is_last and record.drained_seconds is None and not engine.foreign_requests:
            record = replace(record, drained_seconds=engine.drained_seconds)
        filled.append(record)
    return tuple(filled)


async def _observe(
    world: World, memory: Memory, spec: PolicySpec, children: ChildrenState, now: float
) -> MetricsReading:
    """Fresh for each plan; between two of them the last one may do, as pod events come in bursts."""
    due = now >= memory.plan_at or not 0 <= now - memory.read_at < _READING_SECONDS
    if memory.reading is None or due:
        memory.reading = await world.metrics.read(spec.metrics_window_seconds, tuple(children.router_uids), now)
        memory.read_at = now
    return memory.reading


async def _begin(mover: Mover, machines: Sequence[Machine], decision: Decision, now: float) -> list[Progress]:
    """Births go as far as they can at once. A move waits for the next look, so that the status knows of it before it
    can have ended: the cap on moves holds also for an operator that starts in between."""
    by_uid = {m.uid: m for m in machines}
    births = [await mover.begin(by_uid[birth.uid], birth.to_role, now, Reason.BORN.value) for birth in decision.births]
    moves = [await mover.begin(by_uid[m.uid], m.to_role, now, m.reason.value) for m in decision.moves]
    born = await mover.advance_all([b.machine for b in births if b.result is Result.BEGUN], now)
    return [*(b for b in births if b.result is not Result.BEGUN), *born, *moves]


def _only_begun(records: Sequence[MoveRecord], begun: Sequence[Progress], now: float) -> tuple[MoveRecord, ...]:
    """Without those that another writer was first to touch."""
    outrun = {p.machine.uid for p in begun if p.result is Result.OUTRUN}
    return tuple(r for r in records if not (r.uid in outrun and r.started_at == now and r.finished_at is None))


def _waits(progress: Sequence[Progress], begun: Sequence[Progress]) -> list[float]:
    """How soon the machines want to be looked at again."""
    waits: list[float] = []
    for step in (*progress, *begun):
        if step.result is Result.OUTRUN:
            waits.append(_LOST_RACE_SECONDS)
        elif step.result in (Result.BEGUN, Result.ROLLING_BACK):
            waits.append(0.0)
        elif step.machine.move is not None and not step.machine.deleting:
            waits.append(_BIRTH_SECONDS if step.machine.move.from_role is None else _STEP_SECONDS)
    return waits


async def _publish(world: World, memory: Memory, facts: statuses.Facts, now: float) -> float:
    """Write the status if it is news, then the Events of what is new in it. Seconds until old news may be written."""
    new = statuses.build(facts, now)
    old = facts.old if facts.pool.status else None
    if not statuses.may_write(old, new):
        return float("inf")
    if not statuses.must_write(old, new) and memory.written_at is not None:
        wait = memory.written_at + memory.refresh_seconds - now
        if 0 < wait <= memory.refresh_seconds:
            return wait
    await world.store.write_status(new.to_json())
    memory.written_at = now
    for event in statuses.events(old, new):
        await world.store.emit(event)
    return float("inf")
