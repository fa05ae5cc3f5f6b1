"""Poolwright's own policy as a policy under test: `core` decides, and here its answers are carried over.

The router is `core.routing` over `core.ledger`, as `poolwright.router` runs it; the scaler is `core.decide` over a
snapshot, as the controller's reconcile runs it. No rule of either is written here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from poolwright.core.admission import Tally, Verdict, admit
from poolwright.core.affinity import PrefixIndex
from poolwright.core.decide import decide
from poolwright.core.decision import MOVE_DEADLINE_SECONDS, Memory, Snapshot
from poolwright.core.demand import Demand
from poolwright.core.forecast import Offered
from poolwright.core.ledger import Entry, Ledger, ReturnRule
from poolwright.core.machine import Machine, Move
from poolwright.core.pricing import MachinePrices
from poolwright.core.reading import LiveReading
from poolwright.core.relegation import Judged, Relegation
from poolwright.core.routes import every_gap_counts
from poolwright.core.routing import NoMachine, RoutingRequest, Targets, choose
from poolwright.core.spec import MachineClass, Metric, Objective, PolicySpec
from poolwright.core.split import starting_split
from poolwright.sim.baselines.run_state import PerRun
from poolwright.sim.policy import (
    ClusterView,
    EngineRules,
    MachineView,
    Placement,
    Policy,
    Refusal,
    RoleChange,
    Router,
    Setting,
)
from poolwright.sim.prefix import shared_keys
from poolwright.sim.request import Arrival
from poolwright.sim.step_fit import prices
from poolwright_engine.scheduling.scheduler_config import TbtDeadlines
from poolwright_protocol.roles import Role

SOURCE = "Poolwright's own core; which of its parts a deployed pool has, AS_SHIPPED says"


@dataclass(frozen=True, slots=True)
class Options:
    """What `rebalance` and the engine's options are to a user. The last ones are parts that can be off, to see what
    each is worth. `planned_start`: the first split is the one that the expected load presses least, as a plan made
    beforehand says; else the one that nobody chose."""

    step_tokens: int = 2048
    max_sequences: int = 256
    interval_seconds: float = 60.0
    metrics_window_seconds: float = 120.0
    dwell_seconds: float = 60.0
    max_moves_per_window: int = 2
    window_seconds: float = 300.0
    fast_interval_seconds: float = 5.0
    percentile: int = 90
    return_rule: ReturnRule = ReturnRule.DRAINED
    admission: bool = False
    moves: bool = True
    priced: bool = True
    live: bool = True
    affinity: bool = True
    slack_budget: bool = True
    relegate: bool = True
    relegated_seconds: float = 120.0
    quick_first_tokens: bool = False
    planned_start: bool = True


# What a pool runs as it is installed: moves and routes go by what is measured, and by prefixes that a machine had; the
# budget of engines is fixed, prompts fill it in turn, and the first split is the one that nobody chose.
AS_SHIPPED = Options(priced=False, live=False, relegate=False, slack_budget=False, planned_start=False)
# The same with `rebalance.basis: Work`: prices decide, routers relegate and say what they have outstanding.
AS_SHIPPED_BY_WORK = replace(AS_SHIPPED, priced=True, live=True, relegate=True)


def our_router(options: Options) -> Callable[[Setting], Router]:
    """The router alone, for policies that size pools and say nothing of routing. It is told as much as in `ours`, but
    of no bound on prompts, which is the scaler's to choose."""
    return lambda setting: _Control(setting, options)


def ours(options: Options | None = None, name: str = "ours") -> Policy:
    chosen = options or Options()
    runs = PerRun(lambda setting: _Control(setting, chosen))
    return Policy(
        name=name,
        source=SOURCE,
        router=runs.router,
        scaler=lambda setting: runs.scaler(setting) if chosen.moves else None,
        first_roles=lambda setting: first_roles(setting, chosen),
        rules=lambda setting: dict.fromkeys(Role, _rules(setting, chosen)),
        parameters={
            "step_tokens": chosen.step_tokens,
            "interval_seconds": chosen.interval_seconds,
            "dwell_seconds": chosen.dwell_seconds,
            "max_moves_per_window": chosen.max_moves_per_window,
        },
    )


def spec_of(setting: Setting, options: Options) -> PolicySpec:
    """The resource that a user would write for this."""
    counts: dict[str, int] = {}
    for model in setting.machines:
        counts[model.name] = counts.get(model.name, 0) + 1
    slo = setting.slo
    ttft = slo.ttft_seconds + slo.ttft_seconds_per_token * setting.expected_prompt_tokens
    return PolicySpec(
        objectives=(
            Objective("ttft", Metric.TTFT, options.percentile, ttft),
            Objective("tbt", Metric.TBT, min(99, slo.tbt_percentile), slo.tbt_seconds),
        ),
        classes=tuple(MachineClass(name, count) for name, count in counts.items()),
        interval_seconds=options.interval_seconds,
        metrics_window_seconds=options.metrics_window_seconds,
        dwell_seconds=options.dwell_seconds,
        max_moves_per_window=options.max_moves_per_window,
        window_seconds=options.window_seconds,
        fast_interval_seconds=options.fast_interval_seconds,
    )


def prices_of(setting: Setting, options: Options) -> dict[str, MachinePrices]:
    models = {model.name: model for model in setting.machines}
    return {
        name: prices(model, step_tokens=options.step_tokens, most_streams=options.max_sequences)
        for name, model in models.items()
    }


def first_roles(setting: Setting, options: Options) -> Sequence[Role]:
    spec = spec_of(setting, options)
    split = starting_split(spec)
    roles = [role for role in Role for _ in range(split[role])]
    roles += [Role.MIXED] * (len(setting.machines) - len(roles))
    if options.planned_start and options.priced:
        offered = Offered(
            setting.expected_requests_per_second, setting.expected_prompt_tokens, setting.expected_output_tokens
        )
        names = [model.name for model in setting.machines]
        counts: dict[tuple[str, Role], int] = {}
        for key in zip(names, roles, strict=True):
            counts[key] = counts.get(key, 0) + 1
        steps, _ = Demand(spec, prices_of(setting, options), offered).best(counts, len(roles))
        for name, from_role, to_role in steps:
            place = next(i for i, role in enumerate(roles) if role is from_role and names[i] == name)
            roles[place] = to_role
    return roles


def deadlines_of(setting: Setting) -> TbtDeadlines:
    every_gap = every_gap_counts(setting.slo.tbt_percentile, setting.expected_output_tokens)
    return TbtDeadlines.EACH if every_gap else TbtDeadlines.CUMULATIVE


def _rules(setting: Setting, options: Options) -> EngineRules:
    """The same in every role: a role is a preference of the router."""
    return EngineRules(
        token_budget=None if options.slack_budget else options.step_tokens,
        tbt_target_seconds=setting.slo.tbt_seconds,
        tbt_deadlines=deadlines_of(setting),
        relegated_seconds=options.relegated_seconds,
        quick_first_tokens=options.quick_first_tokens,
        most_tokens=options.step_tokens,
        max_sequences=options.max_sequences,
    )


@dataclass(slots=True)
class _Seen:
    """A machine as `core` knows it, and the view that it was made from."""

    view: MachineView
    machine: Machine


@dataclass(slots=True)
class _Control:
    """Router and scaler of one run."""

    setting: Setting
    options: Options
    spec: PolicySpec = field(init=False)
    prices: Mapping[str, MachinePrices] = field(init=False)
    targets: Targets = field(init=False)
    ledger: Ledger = field(init=False)
    memory: Memory = field(default_factory=Memory)
    tally: Tally = field(default_factory=Tally)
    relegation: Relegation = field(default_factory=Relegation)
    judged: dict[int, Judged] = field(default_factory=dict)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    entries: dict[int, Entry] = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)
    seen: dict[str, _Seen] = field(default_factory=dict)
    moved_at: dict[str, float] = field(default_factory=dict)
    machines: list[Machine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = spec_of(self.setting, self.options)
        self.prices = prices_of(self.setting, self.options) if self.options.priced else {}
        self.targets = Targets(self.setting.slo.ttft_seconds, self.setting.slo.tbt_seconds)
        self.ledger = Ledger(self.options.return_rule)

    # The router.

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Placement | Refusal:
        machines = self._look(view)
        slo = self.setting.slo
        targets = self.targets
        if slo.ttft_seconds_per_token:
            ttft = slo.ttft_seconds + slo.ttft_seconds_per_token * arrival.prompt_tokens
            targets = Targets(ttft, slo.tbt_seconds)
        request = RoutingRequest(
            arrival.prompt_tokens,
            cached_tokens=self._cached(arrival),
            output_tokens=arrival.expected_output_tokens,
        )
        loads = self.ledger.loads(now)
        relegated = False
        if self.prices and self.options.admission:
            admission, self.tally = admit(request, machines, loads, now, targets, self.tally)
            if admission.verdict is Verdict.REJECT:
                return Refusal(admission.reason.value, admission.retry_after_seconds)
            relegated = admission.verdict is Verdict.RELEGATE
        choice = choose(request, machines, loads, now, targets if self.prices else None)
        if isinstance(choice, NoMachine):
            return Refusal(choice.reason)
        if self.prices and self.options.relegate and not self.options.admission:
            judged = self.judged[arrival.number] = self.relegation.judge(request, machines, loads, now, targets, choice)
            relegated = judged.reason is not None
        prompt = choice.prompt or choice.token
        cached = request.cached_tokens.get(prompt.uid, 0)
        stale = self.entries.pop(arrival.number, None)  # of an attempt that was lost with its machine
        if stale is not None:
            stale.close()
        self.entries[arrival.number] = self.ledger.begin(
            choice, arrival.prompt_tokens, now, cached, arrival.expected_output_tokens, relegated
        )
        if self.options.affinity and arrival.prefix:
            keys = shared_keys(arrival, arrival.prefix_block_tokens)
            for uid in dict.fromkeys((prompt.uid, choice.token.uid)):
                self.prefixes.record(uid, keys)
        return Placement(choice.token.uid, choice.prompt.uid if choice.prompt else None, relegated, choice.route.value)

    def first_token(self, now: float, number: int) -> None:
        self.entries[number].first_token(now)
        judged = self.judged.pop(number, None)
        if judged is not None:
            judged.first_token(now)

    def finished(self, now: float, number: int) -> None:
        self.entries.pop(number).close()

    def rebind(self, now: float, arrival: Arrival, placement: Placement, view: ClusterView) -> str | None:
        return None

    def _cached(self, arrival: Arrival) -> Mapping[str, int]:
        if not self.options.affinity or not arrival.prefix:
            return {}
        size = arrival.prefix_block_tokens
        blocks = self.prefixes.blocks(shared_keys(arrival, size))
        return {uid: min(count * size, arrival.prompt_tokens - 1) for uid, count in blocks.items()}

    # The scaler.

    @property
    def period_seconds(self) -> float:
        return self.options.fast_interval_seconds

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        snapshot = Snapshot(
            tuple(self._look(view)),
            view.reading(self.spec.metrics_window_seconds),
            self.prices,
            LiveReading(now, self.ledger.work()) if self.options.live else None,
        )
        decision, self.memory = decide(now, snapshot, self.spec, self.memory)
        changes = [RoleChange(birth.uid, birth.to_role, "born") for birth in decision.births]
        roles = {machine.uid: machine.effective_role for machine in snapshot.machines}
        for move in decision.moves:
            self.moved_at[move.uid] = now
            roles[move.uid] = move.to_role
            bound = decision.bounds.get(move.uid)
            changes.append(RoleChange(move.uid, move.to_role, move.reason.value, max_prefill_tokens=bound))
        moved = {move.uid for move in decision.moves}
        for uid, bound in decision.bounds.items():
            role = roles.get(uid)
            if self.bounds.get(uid) != bound and uid not in moved and role is not None:
                changes.append(RoleChange(uid, role, "bound", max_prefill_tokens=bound))
        self.bounds = dict(decision.bounds)
        for uid in self.seen:
            self._price(uid)
        return changes

    # What `core` knows of machines.

    def _look(self, view: ClusterView) -> list[Machine]:
        seen, changed = self.seen, len(view.machines) != len(self.seen)
        for place in view.machines:
            known = seen.get(place.uid)
            if known is not None and (known.view is place or _is_same(known.view, place)):
                continue
            machine = self._machine(place)
            changed = True
            if known is None:
                seen[place.uid] = _Seen(place, machine)
                self._price(place.uid)
            else:
                known.view, known.machine = place, machine
        if changed:
            alive = [place.uid for place in view.machines]
            if len(alive) != len(seen):
                self.seen = seen = {uid: seen[uid] for uid in alive}
                self.ledger.keep(alive)
                self.prefixes.keep(alive)
            self.machines = [seen[uid].machine for uid in alive]
        return self.machines

    def _machine(self, view: MachineView) -> Machine:
        move = None
        if view.moving_to is not None:
            started = self.moved_at.get(view.uid, view.role_since)
            move = Move(view.role, view.moving_to, started, started + MOVE_DEADLINE_SECONDS)
        return Machine(
            name=view.uid,
            uid=view.uid,
            machine_class=view.model.name,
            host=view.uid,
            ready=view.ready,
            role=None if move else view.role,
            role_epoch=1,
            role_since=None if move else view.role_since,
            move=move,
            created_at=0.0,
        )

    def _price(self, uid: str) -> None:
        place = self.seen[uid].view
        prices = self.prices.get(place.model.name)
        self.ledger.price(uid, prices, self.bounds.get(uid), self.setting.slo.tbt_seconds)


def _is_same(a: MachineView, b: MachineView) -> bool:
    """To `core`, which does not look at queues."""
    return a.role is b.role and a.role_since == b.role_since and a.moving_to is b.moving_to and a.ready == b.ready
