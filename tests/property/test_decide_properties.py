"""What holds of the policy for any input: budget, minimums, phases, dwell, cap, calm; restarts, lies, clocks."""

import math
import re
from dataclasses import replace
from random import Random

from hypothesis import event, given, settings
from hypothesis import strategies as st

from poolwright.core.decide import decide
from poolwright.core.decision import MOVE_DEADLINE_SECONDS, MOVING_REASONS, Decision, Memory, Reason, Snapshot
from poolwright.core.demand import DEADBAND, RAISE, Demand
from poolwright.core.forecast import Forecast, Offered
from poolwright.core.machine import Machine, apply, begin
from poolwright.core.memory import rebuild_memory
from poolwright.core.pricing import MachinePrices, Prices
from poolwright.core.reading import HistogramIncrease, LiveReading, MachineWork, MetricsReading, MetricsState
from poolwright.core.spec import MachineClass, Mode, PolicySpec, PoolBounds
from poolwright.core.split import budget_by_class, fillable, starting_split
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile
from support.pool_world import PRICES, START, M, P, T, World, islands, pool, reading, spec, split

_CALM = settings(deadline=None, max_examples=50)

_seconds = st.sampled_from([0.001, 0.01, 0.03, 0.055, 0.07, 0.3, 0.9, 1.2, 5.0, 200.0])
_counts = st.sampled_from([0.0, 5.0, 30.0, 400.0, 5000.0])


@st.composite
def _readings(draw: st.DrawFn) -> MetricsReading:
    seen = reading(
        draw(_seconds),
        draw(_seconds),
        ttft_count=draw(_counts),
        tbt_count=draw(_counts),
        state=draw(st.sampled_from(MetricsState)),
        arrivals=draw(_counts),
        in_flight=draw(st.sampled_from([0, 1, 50, float("nan")])),
        oldest_waiting=draw(st.sampled_from([0.0, 0.5, 30.0, float("inf")])),
    )
    if draw(st.integers(0, 19)) == 0:
        seen = replace(seen, tbt=HistogramIncrease((1.0, float("inf")), (3.0, 1.0)))
    if draw(st.integers(0, 3)) == 0:
        lies = st.sampled_from([math.nan, math.inf, -math.inf, -5.0, 1e300, 0.0])
        field = draw(st.sampled_from(["prompt_tokens", "arrivals", "output_tokens", "window_seconds", "in_flight"]))
        seen = replace(seen, **{field: draw(lies)})  # type: ignore[arg-type]
    return seen


_work = st.builds(
    MachineWork,
    st.sampled_from([0.0, 500.0, 50_000.0, 1e7, math.nan, -1.0]),
    st.sampled_from([0.0, 1e5, 1e9, math.inf]),
    st.sampled_from([0.0, 3.0, 300.0, math.nan]),
    st.sampled_from([0.0, 5e3, 5e5]),
    st.booleans(),
)
_sound_work = st.builds(
    MachineWork, st.sampled_from([0.0, 1e5]), st.just(0.0), st.sampled_from([0.0, 500.0]), st.just(1e4)
)


@st.composite
def _live(draw: st.DrawFn, world: World) -> LiveReading | None:
    """What routers and engines say now, or said once, or will have said; of machines that may be gone."""
    if draw(st.booleans()):
        return None
    uids = [*(m.uid for m in world.machines), "gone"]
    one = draw(st.sampled_from([_work, _sound_work, _sound_work]))
    age = draw(st.sampled_from([0.0, 1.0, 14.0, 60.0, -5.0, math.nan]))
    return LiveReading(world.now - age, {uid: draw(one) for uid in uids})


@st.composite
def _priced(draw: st.DrawFn, made: PolicySpec) -> Prices:
    """None, some or all classes with a price; machines from quick to hopeless."""
    listed = [
        PRICES,
        replace(PRICES, profile=StepProfile(StepCost(0.03, 1e-3, 1e-6), StepCost(0.05, 1e-3, 1e-6)), step_tokens=256),
        replace(PRICES, profile=StepProfile(StepCost(9.0, 0.0, 0.0), StepCost(9.0, 0.0, 0.0))),
        replace(PRICES, profile=StepProfile(StepCost(0.0, 0.0, 0.0), StepCost(0.0, 0.0, 0.0)), kv_capacity_tokens=10),
    ]
    return {c.name: draw(st.sampled_from(listed)) for c in made.classes if draw(st.integers(0, 3)) > 0}


# What makes the policy want a move: one objective far off, the other at ease.
_pushes = st.sampled_from([reading(ttft=30.0, tbt=0.005), reading(ttft=0.02, tbt=0.5, ttft_count=40)])


@st.composite
def _specs(draw: st.DrawFn) -> PolicySpec:
    """Specs that the resource accepts: an assignment within all bounds exists."""
    classes = tuple(
        MachineClass(name, draw(st.integers(1, 4)), frozenset(draw(st.sets(st.sampled_from(Role), min_size=1))))
        for name in draw(st.sampled_from([("c",), ("c", "d")]))
    )
    total = sum(c.replicas for c in classes)
    pools = {
        role: PoolBounds(
            minimum=(low := draw(st.integers(0, 2))), maximum=draw(st.sampled_from([None, None, low, low + 1, low + 3]))
        )
        for role in Role
    }
    made = spec(
        classes=classes,
        pools=pools,
        mode=draw(st.sampled_from([Mode.ACTIVE, Mode.ACTIVE, Mode.ACTIVE, Mode.ADVISORY, Mode.PAUSED])),
        dwell_seconds=float(draw(st.sampled_from([0, 7, 40, 40]))),
        max_moves_per_window=draw(st.integers(1, 3)),
        window_seconds=float(draw(st.sampled_from([30, 90]))),
        metrics_window_seconds=float(draw(st.sampled_from([4, 4, 20]))),
    )
    split_asked = starting_split(made)
    accepted = sum(split_asked.values()) == total and fillable(split_asked, budget_by_class(made), made)
    return made if accepted else replace(made, pools={role: PoolBounds() for role in Role})


# Few machines, no minimums, short windows: whatever may be moved is moved, unless dwell or cap forbid it.
_restless = st.builds(
    lambda machines, dwell, cap, window: spec(
        machines,
        pools={role: PoolBounds() for role in Role},
        dwell_seconds=float(dwell),
        max_moves_per_window=cap,
        window_seconds=float(window),
        metrics_window_seconds=4.0,
    ),
    st.integers(2, 4),
    st.sampled_from([0, 45]),
    st.integers(1, 3),
    st.sampled_from([30, 90]),
)


def _unborn(made: PolicySpec) -> tuple[Machine, ...]:
    return tuple(
        replace(m, uid=f"{c.name}{i}", name=f"{c.name}{i}", machine_class=c.name)
        for c in made.classes
        for i, m in enumerate(pool(*[None] * c.replicas))
    )


_EVENTS = st.sampled_from(
    [
        "tick",
        "tick",
        "tick",
        "tick",
        "slow",
        "roll back",
        "restart",
        "lost status",
        "unready",
        "ready",
        "kill",
        "cordon",
        "remove",
        "add",
        "add",
    ]
)


@settings(_CALM, max_examples=50)
@given(st.one_of(_restless, _specs()), st.data())
def test_any_sequence_keeps_budget_bounds_phases_dwell_and_cap(made: PolicySpec, data: st.DataObject) -> None:
    world = World(made, _unborn(made))
    world.prices = data.draw(_priced(made))
    known_islands = data.draw(st.booleans())
    of: dict[str, str] = {}
    names = len(world.machines)
    for _ in range(data.draw(st.integers(5, 30))):
        happens = data.draw(_EVENTS)
        if happens in ("restart", "lost status"):
            known = None if happens == "lost status" else world.memory.moves
            held = world.memory.held_until  # in the status, beside the moves
            world.memory = rebuild_memory(world.now, world.machines, known, world.memory.desired, made, held)
        elif happens == "unready" and world.machines:
            world.replace(data.draw(st.sampled_from([m.uid for m in world.machines])), ready=False)
        elif happens == "ready":
            world.machines = tuple(replace(m, ready=True, cordoned=False) for m in world.machines)
        elif happens == "cordon" and world.machines:
            world.replace(data.draw(st.sampled_from([m.uid for m in world.machines])), cordoned=True)
        elif happens in ("kill", "remove", "add"):
            # One is replaced, goes and is not, or comes: late, or one more than there may be, as a roll-out makes it.
            of_class = data.draw(st.sampled_from(made.classes)).name
            if happens != "add" and world.machines:
                gone = data.draw(st.sampled_from(world.machines))
                world.remove(gone.uid)
                of_class = gone.machine_class
            if happens != "remove":
                (fresh,) = pool(None, machine_class=of_class, since=world.now)
                world.machines += (replace(fresh, uid=f"n{names}", name=f"n{names}"),)
                names += 1
        elif happens == "roll back":
            world.roll_back_moves()

        if known_islands:
            for m in world.machines:
                if m.uid not in of:
                    of[m.uid] = data.draw(st.sampled_from(["here", "there", "far"]))
            world.links = islands(of, HOLDS_ALL, HOLDS_NOTHING, data.draw(st.sampled_from([None, 100_000])))
        before = world.machines
        seen = data.draw(st.one_of(_pushes, _pushes, _pushes, _readings()))
        snapshot, memory = Snapshot(before, seen, world.prices, data.draw(_live(world)), world.links), world.memory
        decision = world.decide(seen, snapshot.live)
        assert decide(world.now, snapshot, made, memory) == (decision, world.memory), "same input, other answer"
        _check_decision(made, before, world)
        _check_budget(made, before, world, decision)
        _check_minimums(made, world, decision)
        _check_links(before, world, decision)
        if happens != "slow":
            world.finish_moves()
        world.now += data.draw(st.sampled_from([1.0, 6.0, 6.0, 12.0]))
    _check_history(made, world)


@st.composite
def _any_machines(draw: st.DrawFn, made: PolicySpec) -> tuple[Machine, ...]:
    """Machines in whatever state a crash, a hand or a roll-out may leave them, one too many included."""
    machines: list[Machine] = []
    for c in made.classes:
        for _ in range(draw(st.integers(0, c.replicas + 1))):
            roles = sorted(c.roles, key=lambda role: role.value)
            role = draw(st.sampled_from([*roles, *roles, *Role, None]))
            (born,) = pool(role, machine_class=c.name, since=START - draw(st.sampled_from([5.0, 50.0, 5000.0])))
            going = draw(st.sampled_from([None, None, None, None, draw(st.sampled_from(roles))]))
            machine = replace(
                born,
                uid=f"u{len(machines)}",
                name=f"u{len(machines)}",
                ready=draw(st.sampled_from([True, True, True, True, False])),
                cordoned=draw(st.sampled_from([False, False, False, False, True])),
                deleting=draw(st.sampled_from([False, False, False, False, False, True])),
            )
            if going is not None and going is not role:
                machine = apply(machine, begin(machine, going, START - 3, MOVE_DEADLINE_SECONDS, "before"))
            machines.append(machine)
    return tuple(machines)


@settings(_CALM, max_examples=150)
@given(st.one_of(_specs(), _restless), st.data())
def test_one_decision_on_machines_in_any_state_keeps_budget_minimums_phases_and_links(
    made: PolicySpec, data: st.DataObject
) -> None:
    world = World(made, data.draw(_any_machines(made)), prices=data.draw(_priced(made)))
    of = {m.uid: data.draw(st.sampled_from(["here", "there", "far"])) for m in world.machines}
    world.links = islands(of, HOLDS_ALL, HOLDS_NOTHING, data.draw(st.sampled_from([None, 100_000])))
    before = world.machines
    seen = data.draw(st.one_of(_pushes, _pushes, _pushes, _readings()))
    decision = world.decide(seen, data.draw(_live(world)))
    _check_decision(made, before, world)
    _check_budget(made, before, world, decision)
    _check_minimums(made, world, decision)
    _check_links(before, world, decision)


@settings(_CALM, max_examples=250)
@given(st.lists(st.sampled_from([P, T, T, T, M]), min_size=2, max_size=7), st.data())
def test_no_move_of_the_policy_cuts_a_prompt_machine_off(roles: list[Role], data: st.DataObject) -> None:
    """All free to go, and prompts in need: by latency, by offered work, or by what waits now."""
    roles = [P, T, *roles]
    most_mixed = data.draw(st.sampled_from([None, roles.count(M)]))
    made = spec(len(roles), pools={M: PoolBounds(0, most_mixed)}, dwell_seconds=0.0)
    world = World(made, pool(*roles), prices=data.draw(st.sampled_from([{}, {"c": PRICES}])))
    of = {m.uid: data.draw(st.sampled_from(["here", "there"])) for m in world.machines}
    world.links = islands(of, HOLDS_ALL, HOLDS_NOTHING, data.draw(st.sampled_from([None, 100_000])))
    live = None
    if data.draw(st.booleans()):
        live = LiveReading(START, {m.uid: MachineWork(1e6, 1e9) for m in world.machines if m.role is not T})
        world.memory = Memory(planned_at=START, backlogged={P: 2})
    before = world.machines
    heavy = reading(3.0, 0.005, arrivals=400, prompt_tokens=data.draw(st.sampled_from([4e5, 4e6])))
    decision = world.decide(heavy, live)
    event(decision.reason.value)
    _check_links(before, world, decision)
    if decision.reason is Reason.NO_LINK:
        assert decision.moves == ()


def _check_decision(made: PolicySpec, before: tuple[Machine, ...], world: World) -> None:
    settled_before = {r: sum(1 for m in before if _settled(m) and m.role is r) for r in Role}
    settled_after = {r: sum(1 for m in world.machines if _settled(m) and m.role is r) for r in Role}
    for role in Role:
        if settled_after[role] < settled_before[role]:
            assert settled_after[role] >= made.pools[role].minimum
    for machine in world.machines:
        if machine.move is not None and machine.move.started_at == world.now and not machine.move.rolling_back:
            assert machine.move.to_role in made.roles_of(machine.machine_class)
    moved = [m for m in world.machines if m.move and m.move.from_role and m.move.started_at == world.now]
    for phase in ((P, M), (T, M)):
        had = sum(settled_before[r] for r in phase)
        took = [m for m in moved if m.move and m.move.from_role in phase]
        goes = [m for m in moved if m.move and m.move.to_role in phase]
        if had and took:
            assert sum(settled_after[r] for r in phase) + len(goes) > 0


def _check_budget(made: PolicySpec, before: tuple[Machine, ...], world: World, decision: Decision) -> None:
    """No machine gets a first role beyond the replicas of its class, whatever comes, goes, or comes late; and what is
    wanted of the pools is the budget, no more and no less."""
    for c in made.classes:
        had, has = (_with_role(machines, c.name) for machines in (before, world.machines))
        assert has <= max(c.replicas, had), (c, world.machines)
    assert {m.uid for m in world.machines} == {m.uid for m in before}
    wanted = [count.desired for count in decision.pools.values()]
    assert sum(wanted) == made.budget
    assert min(wanted) >= 0


def _with_role(machines: tuple[Machine, ...], machine_class: str) -> int:
    return sum(1 for m in machines if m.machine_class == machine_class and m.effective_role and _may_count(m))


def _check_minimums(made: PolicySpec, world: World, decision: Decision) -> None:
    """No tick leaves a pool under its minimum while a machine is free to lift it, in whatever mode; and it is said."""
    counts = {r: sum(1 for m in world.machines if _settled(m) and m.role is r) for r in Role}
    for role in Role:
        least = made.pools[role].minimum
        # Whoever might still count: also machines that are not ready, for a while.
        if sum(1 for m in world.machines if m.effective_role is role and _may_count(m)) >= least:
            continue
        two_steps = any(m.repair and m.to_role is not role for m in decision.moves)
        assert two_steps or f"{role.value} has" in decision.minimum_unmet, (role, decision)
        for m in world.machines:
            if not _settled(m) or m.role is None or m.role is role or role not in made.roles_of(m.machine_class):
                continue
            spare = counts[m.role] > made.pools[m.role].minimum
            phases = [{P, M}, {T, M}]
            last = any(m.role in ph and role not in ph and sum(counts[r] for r in ph) <= 1 for ph in phases)
            assert not spare or last, (role, m, decision)


HOLDS_ALL, HOLDS_NOTHING = 1e15, 1e-3  # bytes a second, inside an island and outside
_CHOSEN_BY_POLICY = {
    Reason.TTFT_MISSED,
    Reason.TBT_MISSED,
    Reason.WORK_SHIFTED,
    Reason.PROMPT_BACKLOG,
    Reason.TOKEN_BACKLOG,
}


def _check_links(before: tuple[Machine, ...], world: World, decision: Decision) -> None:
    """No move of the policy takes the last machine that decodes from the island of a prompt machine, nor makes a prompt
    machine of one that has none. Births, repairs, and what the user asks for may, since a machine must be somewhere."""
    links = world.links
    if links is None or not decision.moves or any(m.reason not in _CHOSEN_BY_POLICY for m in decision.moves):
        return

    def with_way(machines: tuple[Machine, ...]) -> set[str]:
        takers = [m.uid for m in machines if m.effective_role in (T, M) and _may_count(m)]
        senders = [m.uid for m in machines if m.effective_role is P and m.ready and _may_count(m)]
        return {p for p in senders if any(links.bytes_per_second(p, t) == HOLDS_ALL for t in takers)}

    moved = {m.uid for m in decision.moves if m.to_role is P}
    gone = {m.uid for m in decision.moves if m.from_role is P}
    assert (with_way(before) - gone) | moved <= with_way(world.machines), decision


def _settled(machine: Machine) -> bool:
    return machine.role is not None and machine.move is None and machine.ready and _may_count(machine)


def _may_count(machine: Machine) -> bool:
    return not machine.cordoned and not machine.deleting


def _check_history(made: PolicySpec, world: World) -> None:
    counted = [(when, uid) for when, uid, _, _, repair in world.begun if not repair]
    for when, _ in counted:
        inside = [w for w, _ in counted if when <= w < when + made.window_seconds]
        assert len(inside) <= made.max_moves_per_window
    last: dict[str, float] = {}
    for when, uid, _, _, repair in world.begun:
        if not repair and uid in last:
            assert when - last[uid] >= made.dwell_seconds
        last[uid] = when
    if made.mode in (Mode.PAUSED, Mode.ADVISORY):
        assert counted == []


@_CALM
@given(_specs())
def test_births_fill_every_minimum_whatever_comes_up_first(made: PolicySpec) -> None:
    world = World(made, ())
    for machine in sorted(_unborn(made), key=lambda m: m.uid[::-1]):
        world.machines += (machine,)
        world.step(reading(ttft_count=0, tbt_count=0, arrivals=0, in_flight=0))
    for _ in range(6):
        world.step(reading(ttft_count=0, tbt_count=0, arrivals=0, in_flight=0))
    for role, count in zip((P, T, M), split(world.machines), strict=True):
        assert made.pools[role].minimum <= count
        assert made.pools[role].maximum is None or count <= (made.pools[role].maximum or 0)


@_CALM
@given(_specs(), _readings())
def test_constant_load_comes_to_rest_without_ever_turning_back(made: PolicySpec, seen: MetricsReading) -> None:
    """Measured latency that no move changes."""
    world = World(made, _unborn(made))
    for _ in range(80):
        world.step(seen, seconds=20)
    by_policy = [(uid, a, b) for _, uid, a, b, repair in world.begun if not repair]
    edges = {(a, b) for _, a, b in by_policy}
    assert not any((b, a) in edges for a, b in edges), "a move was undone under constant load"
    moved = len(world.begun)
    for _ in range(20):
        world.step(seen, seconds=20)
    assert len(world.begun) == moved


@_CALM
@given(_specs(), _readings())
def test_deciding_again_at_rest_answers_the_same(made: PolicySpec, seen: MetricsReading) -> None:
    world = World(made, _unborn(made))
    for _ in range(60):
        world.step(seen, seconds=20)
    snapshot = Snapshot(world.machines, seen)
    once, memory = decide(world.now, snapshot, made, world.memory)
    twice, again = decide(world.now + made.interval_seconds, snapshot, made, memory)
    assert once.reason not in MOVING_REASONS or made.mode is Mode.ADVISORY
    assert replace(twice, next_plan_at=0.0) == replace(once, next_plan_at=0.0)
    assert replace(again, planned_at=None) == replace(memory, planned_at=None)


@_CALM
@given(_specs(), _readings(), st.randoms(use_true_random=False))
def test_order_of_machines_changes_nothing(made: PolicySpec, seen: MetricsReading, random: Random) -> None:
    machines = list(_unborn(made))
    random.shuffle(machines)
    straight = decide(START, Snapshot(_unborn(made), seen), made, Memory())
    assert decide(START, Snapshot(tuple(machines), seen), made, Memory()) == straight


@_CALM
@given(_specs(), _readings(), st.data())
def test_every_decision_says_why_and_on_what(made: PolicySpec, seen: MetricsReading, data: st.DataObject) -> None:
    world = World(made, _unborn(made), prices=data.draw(_priced(made)))
    for _ in range(6):
        decision = world.step(seen)
        assert decision.reason in Reason
        assert decision.message
        assert dict(decision.evidence)["metrics"] == seen.state.value
        assert {o.metric for o in decision.objectives} == {o.metric for o in made.objectives}
        assert sum(count.desired for count in decision.pools.values()) == made.budget
        assert not any(re.search(r"\bnan\b", value.lower()) for _, value in decision.evidence), decision.evidence


@_CALM
@given(_specs())
def test_start_is_within_all_bounds_and_classes(made: PolicySpec) -> None:
    counts = starting_split(made)
    assert sum(counts.values()) == made.budget
    assert fillable(counts, budget_by_class(made), made)


_offers = st.builds(
    Offered,
    st.floats(0.01, 200),
    st.floats(1, 20_000),
    st.floats(1, 1000),
    st.floats(1, 16),
)
_profiles = st.builds(
    lambda fixed, token, kv, mixed: MachinePrices(
        StepProfile(StepCost(fixed, token, kv), StepCost(fixed * mixed, token, kv)), step_tokens=2048
    ),
    st.floats(0.001, 0.05),
    st.floats(1e-6, 1e-3),
    st.floats(0, 1e-7),
    st.floats(1, 2),
)


@settings(_CALM, max_examples=40)
@given(st.integers(2, 8), _offers, _profiles, st.floats(0.1, 1.0))
def test_constant_offered_work_comes_to_rest_where_no_other_split_is_better(
    machines: int, offered: Offered, prices: MachinePrices, busy: float
) -> None:
    """As many requests as keep so much of the machines busy."""
    made = spec(machines, max_moves_per_window=4, window_seconds=20.0)
    world = World(made, _unborn(made), prices={"c": prices})
    wanted = Demand(made, {"c": prices}, replace(offered, requests_per_second=1.0)).machines_wanted(_in_roles(0, 0, 0))
    arrivals = made.metrics_window_seconds * min(200.0, busy * machines / wanted)
    seen = reading(
        0.5,
        0.05,
        ttft_count=max(40.0, arrivals),
        tbt_count=max(40.0, arrivals * (offered.output_tokens - 1)),
        arrivals=arrivals,
        prompt_tokens=arrivals * offered.prompt_tokens,
    )
    for _ in range(60):
        world.step(seen, seconds=10)
    moved = len(world.begun)
    for _ in range(20):
        decision = world.step(seen, seconds=10)
    assert len(world.begun) == moved, decision
    assert moved <= 4 * machines
    event(decision.reason.value)
    expected = world.memory.forecast.offered(world.now)
    if decision.reason not in (Reason.SPLIT_FITS, Reason.TARGETS_MET) or expected is None:
        return  # no split would do
    demand = Demand(made, {"c": prices}, expected)
    prompt, token, mixed = split(world.machines)
    pressed = demand.pressure(_in_roles(prompt, token, mixed)).most
    others = [_in_roles(p, t, machines - p - t) for p in range(1, machines) for t in range(1, machines - p + 1)]
    least = min(demand.pressure(other).most for other in others)
    assert pressed < RAISE + 1e-3 or least >= pressed - DEADBAND - 1e-3, decision


def _in_roles(prompt: int, token: int, mixed: int) -> dict[tuple[str, Role], int]:
    return {("c", P): prompt, ("c", T): token, ("c", M): mixed}


@settings(_CALM, max_examples=100)
@given(st.integers(2, 12), _offers, _profiles, st.floats(1, 5))
def test_pressure_grows_with_work_and_falls_with_machines(
    machines: int, offered: Offered, prices: MachinePrices, more: float
) -> None:
    made = spec(machines)
    counts = {("c", P): machines // 2, ("c", T): machines - machines // 2}
    now = Demand(made, {"c": prices}, offered)
    busier = Demand(made, {"c": prices}, replace(offered, requests_per_second=offered.requests_per_second * more))
    assert busier.pressure(counts).prompt >= now.pressure(counts).prompt - 1e-9
    assert busier.pressure(counts).token >= now.pressure(counts).token - 1e-9
    assert busier.machines_wanted(counts) >= now.machines_wanted(counts) - 1e-9
    larger = {**counts, ("c", P): counts["c", P] + 1}
    assert now.pressure(larger).prompt <= now.pressure(counts).prompt + 1e-9
    larger = {**counts, ("c", T): counts["c", T] + 1}
    assert now.pressure(larger).token <= now.pressure(counts).token + 1e-9
    slower = replace(prices, profile=StepProfile(prices.profile.decode, _times(prices.profile.mixed, more)))
    # Chunks are whole tiles, so that a slower machine's may be the better filled ones.
    assert Demand(made, {"c": slower}, offered).pressure(counts).prompt >= 0.95 * now.pressure(counts).prompt - 1e-9


def _times(cost: StepCost, factor: float) -> StepCost:
    return StepCost(cost.fixed_seconds * factor, cost.token_seconds * factor, cost.kv_token_seconds * factor)


@settings(_CALM, max_examples=100)
@given(st.integers(2, 8), _offers, _profiles)
def test_steps_of_a_plan_never_press_more_and_keep_bounds(
    machines: int, offered: Offered, prices: MachinePrices
) -> None:
    made = spec(machines)
    counts = {("c", P): 1, ("c", T): machines - 1}
    demand = Demand(made, {"c": prices}, offered)
    steps, pressed = demand.best(counts, 16)
    assert pressed.most <= demand.pressure(counts).most + 1e-9
    for name, a, b in steps:
        counts[name, a] -= 1
        counts[name, b] = counts.get((name, b), 0) + 1
        assert all(n >= 0 for n in counts.values())
    assert sum(counts.values()) == machines
    assert counts["c", P] >= 1
    assert counts["c", T] >= 1
    assert demand.pressure(counts) == pressed


_jumps = st.sampled_from([1.0, 5.0, 60.0, 600.0, -30.0, -1e7, 1e9])


@_CALM
@given(_specs(), st.lists(st.tuples(_jumps, _readings()), min_size=1, max_size=25), st.data())
def test_a_clock_that_jumps_breaks_nothing(
    made: PolicySpec, seen: list[tuple[float, MetricsReading]], data: st.DataObject
) -> None:
    world = World(made, _unborn(made), prices=data.draw(_priced(made)))
    for seconds, metrics in seen:
        before = world.machines
        decision = world.decide(metrics)
        _check_decision(made, before, world)
        _check_budget(made, before, world, decision)
        assert len(decision.moves) <= made.max_moves_per_window + sum(m.repair for m in decision.moves)
        assert decision.next_plan_at >= world.now
        for _, value in decision.evidence:
            assert value
        world.finish_moves()
        world.now += seconds


@_CALM
@given(st.lists(st.tuples(_jumps, _readings()), min_size=1, max_size=30))
def test_a_forecast_stays_finite_whatever_it_reads(seen: list[tuple[float, MetricsReading]]) -> None:
    forecast, now = Forecast(), START
    for seconds, metrics in seen:
        now += seconds
        forecast = forecast.read(now, metrics)
        offered = forecast.offered(now + 30)
        if offered is not None:
            numbers = (
                offered.requests_per_second,
                offered.prompt_tokens,
                offered.output_tokens,
                offered.dispersion,
                offered.context_tokens,
            )
            assert all(math.isfinite(n) and n >= 0 for n in numbers), offered
