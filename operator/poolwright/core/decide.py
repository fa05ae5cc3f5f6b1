"""Which machine takes which role now, and why: births, repair of minimums, then moves by the plan or the fast loop.

Pure: `decide(now, snapshot, spec, memory)` answers a decision and the next memory. Same input, same answer.

Where every class has prices, the plan goes by offered work (`work_plan`). Where not, by latency alone, with this band:
a move is wanted when an objective is missed, that is when its percentile exceeds the target. The published .55/.40 are
shares of a scaling signal that multiplies replicas; latency is none, and one machine is the step, so the upper edge is
the target and the lower edge is the donor test: the giving phase, with that machine gone, must be predicted at or under
80 % of its own target (Dynamo's sensitivity, Narwhal's planning utilisation). Between the two edges nothing moves. The
prediction scales only what a machine can change: TTFT by the M/D/1 wait at the higher busy share (so (N−1)/N acts on
the load, not on the service time alone), TBT by streams per machine.

There a mixed machine counts as half a machine for each phase. Steps are tried from large to small: from the other pure
pool, then from the mixed pool, then half a step by making a machine of the other pure pool mixed.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from poolwright.core.board import Board, is_unlabelled
from poolwright.core.choice import Choice
from poolwright.core.decision import (
    Decision,
    Memory,
    MoveRecord,
    PlannedMove,
    PoolCount,
    Reason,
    Snapshot,
)
from poolwright.core.demand import Demand
from poolwright.core.evidence import evidence
from poolwright.core.fast_loop import count_ticks, measure
from poolwright.core.forecast import Forecast
from poolwright.core.links import Reach
from poolwright.core.objective import measure_load, read_objectives
from poolwright.core.plan import Measured, between_plans, plan
from poolwright.core.reading import MetricsState
from poolwright.core.records import settle_records, trimmed
from poolwright.core.repairs import births_of, repairs_of
from poolwright.core.spec import Metric, Mode, PolicySpec
from poolwright.core.split import Counts, desired_counts
from poolwright_protocol.roles import Role

# A mixed machine is told another bound only where it differs by more than this share: the engine chooses below it.
_NOTABLE_BOUND = 0.2
_STALE_INTERVALS = 3  # of the fast loop: an older live reading says nothing


def decide(now: float, snapshot: Snapshot, spec: PolicySpec, memory: Memory) -> tuple[Decision, Memory]:
    if not math.isfinite(now):
        return _without_a_clock(snapshot, spec, memory), memory
    if snapshot.live is not None and not snapshot.live.is_sound(now, _STALE_INTERVALS * spec.fast_interval_seconds):
        snapshot = replace(snapshot, live=None)
    records = settle_records(now, snapshot.machines, memory.moves)
    unready_since = {
        m.uid: min(now, memory.unready_since.get(m.uid, now))
        for m in snapshot.machines
        if (not m.ready and m.effective_role is not None) or is_unlabelled(m)
    }
    board = Board(now, spec, snapshot.machines, unready_since)
    desired = desired_counts(memory.desired, spec)
    due = memory.planned_at is None or not 0 <= now - memory.planned_at < spec.interval_seconds
    past = _with_live(now, board, snapshot, replace(memory, moves=records), due)
    demand = _demand(now, snapshot, spec, past.forecast)
    board.reach = _reach(snapshot, demand)
    load = measure_load(snapshot.reading, *(board.count(role) for role in (Role.PROMPT, Role.TOKEN, Role.MIXED)))
    objectives = read_objectives(spec, snapshot.reading, load, _own_seconds(snapshot, spec, demand))
    measured = Measured(snapshot, objectives, load, demand)

    births = births_of(board, desired)
    repairs, unmet = repairs_of(board, records)
    if repairs:
        choice = Choice(Reason.MINIMUM_REPAIRED, repairs[0].message)
    elif not board.machines:
        choice = Choice(Reason.NO_MACHINES, "No machine of this pool exists")
    elif births:
        choice = Choice(Reason.BORN, f"{len(births)} new machine(s) got a first role")
    elif due and not (unmet and board.unlabelled()):
        choice = plan(board, measured, desired, past)
    else:
        choice = between_plans(board, snapshot, demand, past.backlogged, past)
    if unmet and not repairs and not births and board.machines and not choice.moves:
        choice = replace(choice, reason=Reason.MINIMUM_UNMET, message=unmet)

    planned_moves = list(repairs)
    advised: tuple[PlannedMove, ...] = ()
    if spec.mode is Mode.ADVISORY:
        advised = choice.moves
    else:
        for move in choice.moves:
            planned_moves.append(move)
            board.move(move.uid, move.to_role)
            if desired[move.from_role] > 0:  # else it is one whom nobody wanted there
                desired = {**desired, move.from_role: desired[move.from_role] - 1}
                desired[move.to_role] += 1

    counts: Counts = {role: board.count(role) for role in Role}
    if spec.mode is Mode.MANUAL:
        desired = desired_counts(None, spec)
    elif sum(counts.values()) == spec.budget:
        desired = counts  # every machine is there and has a role: this is the split now
    planned_at = now if due and choice.concluded else memory.planned_at
    bounds = _bounds(board, snapshot, demand, past.bounds)
    decision = Decision(
        reason=choice.reason,
        message=choice.message,
        births=tuple(births),
        moves=tuple(planned_moves),
        advised=advised,
        objectives=objectives,
        pools={role: PoolCount(board.ready(role), desired[role]) for role in Role},
        evidence=evidence(snapshot, objectives, load, counts, demand, board),
        planned=choice.reason is not Reason.NOT_DUE,
        next_plan_at=now if planned_at is None else max(now, planned_at + spec.interval_seconds),
        minimum_unmet=unmet,
        bounds=bounds,
        machines_wanted=None if demand is None else demand.machines_wanted(board.counts_by_class()),
    )
    new_records = tuple(
        MoveRecord(m.uid, m.machine, m.from_role, m.to_role, m.reason.value, now, repair=m.repair)
        for m in planned_moves
    )
    helps = choice.helps is not None and bool(choice.moves) and spec.mode is not Mode.ADVISORY
    helped_until = now + choice.helps_seconds if helps else memory.helped_until
    return decision, replace(
        past,
        moves=trimmed(now, (*records, *new_records), spec),
        desired=desired,
        held_until=memory.held_until if memory.held_until is not None and memory.held_until > now else None,
        planned_at=planned_at,
        unready_since=unready_since,
        asked=choice.asks if choice.concluded else memory.asked,
        helped=choice.helps if helps else memory.helped if now < memory.helped_until else None,
        helped_until=helped_until if now < helped_until else 0.0,
        backlogged={} if choice.moves else past.backlogged,
        bounds=bounds,
    )


def _without_a_clock(snapshot: Snapshot, spec: PolicySpec, memory: Memory) -> Decision:
    """Whatever would be written now, a deadline or a record, would be of no time: nothing is, not even a repair."""
    board = Board(0.0, spec, snapshot.machines, {})
    desired = desired_counts(memory.desired, spec)
    return Decision(
        Reason.CLOCK_UNREADABLE,
        "The time is not a number, so nothing is decided",
        pools={role: PoolCount(board.ready(role), desired[role]) for role in Role},
        evidence=(("metrics", snapshot.reading.state.value),),
    )


def _with_live(now: float, board: Board, snapshot: Snapshot, past: Memory, due: bool) -> Memory:
    """With what this look adds to forecast and fast loop. Nothing is learned where nothing has a price."""
    if not snapshot.prices:
        return past
    reading = snapshot.reading
    if due and reading.state is MetricsState.COMPLETE:
        past = replace(past, forecast=past.forecast.read(now, reading))
    elapsed = math.inf if past.backlog_at is None else now - past.backlog_at
    if snapshot.live is None:
        return past
    if not 0 <= elapsed < board.spec.fast_interval_seconds:
        ticks: Mapping[Role, int] = count_ticks(measure(board, snapshot), past)
        past = replace(past, backlogged=ticks, backlog_at=now)
    return past


def _demand(now: float, snapshot: Snapshot, spec: PolicySpec, forecast: Forecast) -> Demand | None:
    """The work of the interval to come, at its middle."""
    if not spec.classes or any(c.name not in snapshot.prices for c in spec.classes):
        return None
    offered = forecast.offered(now + spec.interval_seconds / 2)
    return None if offered is None or offered.requests_per_second <= 0 else Demand(spec, snapshot.prices, offered)


def _reach(snapshot: Snapshot, demand: Demand | None) -> Reach | None:
    """At the rate of the offered prompts, or of those that came where work has no price; none, or not all, says nothing
    of what is to come."""
    links, reading = snapshot.links, snapshot.reading
    if links is None:
        return None
    tokens_per_second = 0.0
    if demand is not None:
        tokens_per_second = demand.offered.prompt_tokens_per_second
    elif reading.state is MetricsState.COMPLETE and reading.window_seconds > 0:
        tokens_per_second = reading.prompt_tokens / reading.window_seconds
    sizes = [p.kv_bytes_per_token for p in snapshot.prices.values() if p.kv_bytes_per_token]
    rate = tokens_per_second * (links.kv_bytes_per_token or max(sizes, default=0))
    return Reach(links, rate if 0 < rate < math.inf else None)


def _own_seconds(snapshot: Snapshot, spec: PolicySpec, demand: Demand | None) -> Mapping[Metric, float]:
    """The service time alone, on the fastest class there is: what no split takes away from an objective."""
    prices = [snapshot.prices[c.name] for c in spec.classes if c.name in snapshot.prices]
    if not prices or len(prices) < len(spec.classes):
        return {}
    own = {Metric.TBT: min(p.decode_seconds(1, 0) for p in prices)}
    if demand is not None:
        own[Metric.TTFT] = min(p.prefill_seconds(demand.offered.prompt_tokens) for p in prices)
    return own


def _bounds(board: Board, snapshot: Snapshot, demand: Demand | None, before: Mapping[str, int]) -> Mapping[str, int]:
    """`maxPrefillTokensPerStep` of machines with streams: the continuous part of the split, and what a token machine
    that is lent may do beside them. The user's own bound of a role stands."""
    if not snapshot.prices:
        return {}
    counts = board.counts_by_class()
    bounds: dict[str, int] = {}
    of_kind: dict[tuple[str, Role], int] = {}
    for m in board.machines:
        role, old, prices = board.role_of(m.uid), before.get(m.uid), snapshot.prices.get(m.machine_class)
        if role is None or role is Role.PROMPT or prices is None:
            continue
        if board.spec.pools[role].max_prefill_tokens_per_step is not None:
            continue
        if demand is None:
            if old is not None:
                bounds[m.uid] = old
            continue
        kind = m.machine_class, role
        if kind not in of_kind:
            of_kind[kind] = demand.bound(counts, prices, role)
        new = of_kind[kind]
        bounds[m.uid] = new if old is None or abs(new - old) > _NOTABLE_BOUND * old else old
    return bounds
