"""A run of one policy on one trace: arrivals, routing, hand-offs, moves and losses in time, and what became of each.

Everything that decides is a policy's or an engine's; here is only what happens when. The same arguments give the same
outcome. Tokens reach their client `Network.client_seconds` after their step; a message between processes takes
`Network.message_seconds`.
"""

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from poolwright.sim.counting import CountingEngine
from poolwright.sim.engine import Engine, Job, Part, Plan
from poolwright.sim.exact import ExactEngine
from poolwright.sim.gaps import Gaps, Stream
from poolwright.sim.machine import SimMachine, StepMachine
from poolwright.sim.meter import Meter
from poolwright.sim.network import Network, send
from poolwright.sim.outcome import RequestOutcome, RoleInterval, RunOutcome
from poolwright.sim.pipeline import PipelinedMachine
from poolwright.sim.policy import ClusterView, EngineRules, Placement, Policy, Refusal, RoleChange, Setting
from poolwright.sim.prefix import shared_keys
from poolwright.sim.request import Arrival, Request, Trace
from poolwright.sim.step_fit import FixedPredictor
from poolwright.sim.step_time import MachineModel
from poolwright_engine.scheduling.budget import StepPredictor
from poolwright_protocol.roles import Role


@dataclass(frozen=True, slots=True)
class Loss:
    """The machine at this place of the setting dies; another one takes its place, with its role, after so long."""

    machine: int
    at_seconds: float
    back_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the world does to every policy alike. `network` None: the setting's bandwidth, and its other values as they
    are by default. `move_seconds`: from a scaler's word to the engine's switch (label, PUT, verification).
    `expect_output`: the forecast of a request's output; None: the setting's mean for all. `exact`: run the engine's own
    scheduler in every step. `drain_seconds`: how long after the last arrival requests may still end."""

    network: Network | None = None
    scrape_seconds: float = 5.0
    scrape_delay_seconds: float = 0.0
    move_seconds: float = 0.5
    losses: Sequence[Loss] = ()
    expect_output: Callable[[Request], float] | None = None
    exact: bool = False
    drain_seconds: float = 600.0
    max_attempts: int = 2
    models: Sequence[MachineModel] | None = None  # what the machines really are, where the setting's are believed only
    progress: Callable[[float], None] | None = field(default=None, compare=False)


def simulate(
    policy: Policy, trace: Trace, setting: Setting, conditions: Conditions | None = None, *, seed: int = 0
) -> RunOutcome:
    """`seed` names the draw of the trace in the outcome; nothing is drawn here."""
    return _Simulation(policy, trace, setting, conditions or Conditions()).run(seed)


class _Flight:
    """One request on its way."""

    __slots__ = (
        "answer",
        "arrival",
        "attempt",
        "cached",
        "done",
        "finished_at",
        "granted",
        "kv_at",
        "placement",
        "preemptions",
        "prompt",
        "prompt_done",
        "prompt_machine",
        "readable_at",
        "refused",
        "request",
        "restarts",
        "stream",
        "token_machine",
        "unsent",
    )

    def __init__(self, request: Request, arrival: Arrival) -> None:
        self.request = request
        self.arrival = arrival
        self.stream = Stream()
        self.attempt = 0
        self.restarts = 0
        self.preemptions = 0
        self.cached = 0
        self.done = False
        self.finished_at: float | None = None
        self.refused: str | None = None
        self.placement: Placement | None = None
        self.answer: Job | None = None  # or the whole
        self.prompt: Job | None = None
        self.token_machine: SimMachine | None = None
        self.prompt_machine: SimMachine | None = None
        self.granted = False
        self.readable_at = 0.0  # from when on its KV may leave, once granted
        self.prompt_done = False
        self.kv_at = 0.0
        self.unsent: list[tuple[int, float, float]] = []  # tokens, begin and end of their step


class _Simulation:
    def __init__(self, policy: Policy, trace: Trace, setting: Setting, conditions: Conditions) -> None:
        self._policy = policy
        self._trace = trace
        self._setting = setting
        self._conditions = conditions
        self._network = conditions.network or Network(setting.network_bytes_per_second)
        self._rules = policy.rules(setting)
        self._router = policy.router(setting)
        self._scaler = policy.scaler(setting)
        self._meter = Meter(conditions.scrape_delay_seconds)
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._event_number = 0
        self._flights: list[_Flight] = []
        self._arrivals: list[Arrival] = []
        self._arrival_times: list[float] = []
        self._left = len(trace)
        self._intervals: list[RoleInterval] = []
        self._moves = 0
        self._lost_seconds = 0.0
        self._moved_bytes = 0.0
        self._notes: list[str] = []
        self._now = 0.0
        self._predictors: dict[str, StepPredictor] = {}
        self._since: dict[str, float] = {}
        self._interval_reasons: dict[str, str] = {}
        models = conditions.models or setting.machines
        roles = policy.first_roles(setting)
        if len(roles) != len(models):
            raise ValueError(f"{policy.name} gave {len(roles)} roles for {len(models)} machines")
        self._models = models
        self._has_prefixes = any(request.prefix for request in trace.requests)
        self._longest = max((r.prompt_tokens + r.output_tokens for r in trace.requests), default=1)
        self._machines: dict[str, SimMachine] = {}
        self._places: list[str] = []
        for place, (model, role) in enumerate(zip(models, roles, strict=True)):
            self._places.append(f"m{place}")
            self._add_machine(f"m{place}", model, role)
        self._dead_steps = 0

    # The run.

    def run(self, seed: int) -> RunOutcome:
        requests, horizon = self._trace.requests, self._trace.horizon_seconds
        self._expect = self._conditions.expect_output or (lambda _: self._setting.expected_output_tokens)
        self._meter.scrape(0.0)
        if requests:
            self._put(requests[0].arrival_seconds, self._arrive, 0)
        self._put(self._conditions.scrape_seconds, self._scrape, None)
        if self._scaler is not None:
            self._put(self._scaler.period_seconds, self._tick, None)
        for loss in self._conditions.losses:
            self._put(loss.at_seconds, self._lose, loss)
        last = requests[-1].arrival_seconds if requests else 0.0
        limit = max(last, horizon) + self._conditions.drain_seconds
        events = self._events
        pop = heapq.heappop
        while events and self._left:
            now, _, call, argument = pop(events)
            if now > limit:
                self._now = limit
                break
            self._now = now
            call(now, argument)
        end = max(self._now, horizon)
        for machine in self._machines.values():
            machine.settle(self._now)
            self._end_interval(machine, end)
        if self._left:
            self._notes.append(
                f"{self._left} requests had not ended {self._conditions.drain_seconds:.0f} s after the last"
            )
        return RunOutcome(
            policy=self._policy.name,
            trace=self._trace.name,
            seed=seed,
            requests=[self._outcome(flight) for flight in self._flights],
            intervals=self._intervals,
            horizon_seconds=horizon,
            steps=self._dead_steps + sum(machine.steps for machine in self._machines.values()),
            moves=self._moves,
            lost_machine_seconds=self._lost_seconds,
            transferred_bytes=int(self._moved_bytes),
            notes=tuple(self._notes),
        )

    def at(self, seconds: float, call: Callable[[float, int], None], argument: int) -> None:
        self._event_number += 1
        heapq.heappush(self._events, (seconds, self._event_number, call, argument))

    def _put(self, seconds: float, call: Callable[[float, Any], None], argument: Any) -> None:
        self._event_number += 1
        heapq.heappush(self._events, (seconds, self._event_number, call, argument))

    def _outcome(self, flight: _Flight) -> RequestOutcome:
        stream, request = flight.stream, flight.request
        if not flight.done and flight.answer is not None and flight.token_machine is not None:
            flight.token_machine.engine.lose(flight.answer)
        way = self._network.client_seconds
        return RequestOutcome(
            number=request.number,
            arrival_seconds=request.arrival_seconds,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            first_token_seconds=None if stream.first_at is None else stream.first_at + way,
            finished_seconds=None if flight.finished_at is None else flight.finished_at + way,
            gaps=Gaps(stream.pieces),
            refused=flight.refused,
            prompt_uid=flight.prompt_machine.uid if flight.prompt_machine else None,
            token_uid=flight.token_machine.uid if flight.token_machine else None,
            preemptions=flight.preemptions,
            restarts=flight.restarts,
            cached_tokens=flight.cached,
        )

    # Arrivals and routing.

    def _arrive(self, now: float, index: int) -> None:
        requests = self._trace.requests
        if index + 1 < len(requests):
            self._put(requests[index + 1].arrival_seconds, self._arrive, index + 1)
        request = requests[index]
        arrival = Arrival(
            request.number,
            now,
            request.prompt_tokens,
            self._expect(request),
            request.prefix,
            request.prefix_block_tokens,
        )
        flight = _Flight(request, arrival)
        self._flights.append(flight)
        self._arrivals.append(arrival)
        self._arrival_times.append(now)
        self._meter.arrived(request.number, now, request.prompt_tokens)
        self._route(now, flight)
        if self._conditions.progress is not None:
            self._conditions.progress((index + 1) / len(requests))

    def _view(self, now: float) -> ClusterView:
        return ClusterView(
            [machine.view() for machine in self._machines.values()],
            lambda window: self._meter.reading(now, window),
            lambda window: self._recent(now, window),
            self._hit_tokens,
        )

    def _recent(self, now: float, window: float) -> Sequence[Arrival]:
        return self._arrivals[bisect.bisect_right(self._arrival_times, now - window) :]

    def _hit_tokens(self, uid: str, arrival: Arrival) -> int:
        machine = self._machines.get(uid)
        if machine is None or not arrival.prefix:
            return 0
        keys = shared_keys(arrival, self._rules[machine.role].block_tokens)
        return min(machine.engine.hit_tokens(keys), arrival.prompt_tokens - 1)

    def _route(self, now: float, flight: _Flight) -> None:
        if not self._machines:
            self._end_flight(flight, now, refused="no machine")
            return
        answer = self._router.route(now, flight.arrival, self._view(now))
        if isinstance(answer, tuple):
            answer, changes = answer
            for change in changes:
                self._change(now, change, 0.0)
        if isinstance(answer, Refusal):
            self._end_flight(flight, now, refused=answer.reason)
        else:
            self._place(now, flight, answer)

    def _place(self, now: float, flight: _Flight, placement: Placement) -> None:
        token = self._machines.get(placement.token_uid)
        prompt = self._machines.get(placement.prompt_uid) if placement.prompt_uid is not None else token
        if token is None or prompt is None:
            raise ValueError(f"{self._policy.name} chose a machine that is not there: {placement}")
        never = token.engine.why_never(flight.request) or prompt.engine.why_never(flight.request)
        if never is not None:
            self._end_flight(flight, now, refused=never)
            return
        flight.placement = placement
        flight.attempt += 1
        flight.token_machine = token
        flight.granted = flight.prompt_done = False
        flight.unsent = []
        if prompt is token:
            flight.prompt_machine = flight.prompt = None
            flight.answer = self._job(flight, Part.WHOLE)
            token.jobs[flight.answer] = None
            self._put(now + self._network.message_seconds, self._enter, (flight, flight.answer, token))
        else:
            flight.prompt_machine = prompt
            flight.prompt = self._job(flight, Part.PROMPT)
            flight.answer = self._job(flight, Part.ANSWER)
            prompt.jobs[flight.prompt] = None
            token.jobs[flight.answer] = None
            self._bind(token, flight, 1)
            self._put(now + 2 * self._network.message_seconds, self._enter, (flight, flight.prompt, prompt))

    def _job(self, flight: _Flight, part: Part) -> Job:
        relegated = flight.placement is not None and flight.placement.relegated
        return Job(flight.request, part, flight.stream, flight, flight.request.arrival_seconds, int(relegated))

    def _bind(self, machine: SimMachine, flight: _Flight, sign: int) -> None:
        machine.bound_decodes += sign
        machine.bound_context += sign * flight.request.prompt_tokens
        machine.changed()

    def _enter(self, now: float, what: tuple[_Flight, Job, SimMachine]) -> None:
        flight, job, machine = what
        if job in machine.jobs and machine.ready:
            due = flight.placement.due_seconds if flight.placement is not None else None
            job.arrival = now if due is None else due
            machine.engine.enter(job)
            machine.touch(now)

    # Hand-off.

    def _ask_memory(self, now: float, what: tuple[_Flight, Job]) -> None:
        flight, job = what
        machine = flight.token_machine
        if flight.answer is job and machine is not None and job in machine.jobs and job.serial < 0:
            job.arrival = now
            machine.engine.ask_memory(job)
            machine.touch(now)

    def _grant(self, now: float, what: tuple[_Flight, Job]) -> None:
        flight, job = what
        if flight.answer is job and flight.prompt is not None and flight.prompt_machine is not None:
            flight.granted = True
            behind_steps = self._network.reads_behind_steps
            flight.readable_at = flight.prompt_machine.submitted_until(now) if behind_steps else now
            flight.prompt_machine.engine.granted_to_peer(flight.prompt)
            self._send(now, flight)

    def _on_chunks(self, machine: SimMachine, plan: Plan, began: float, ended: float) -> None:
        for job, chunk in zip(plan.chunk_jobs, plan.chunks, strict=True):
            if job.part is Part.PROMPT:
                flight: _Flight = job.owner
                if flight.prompt is job:
                    # What the cache had goes with the first chunk.
                    tokens = chunk.tokens if flight.unsent or chunk.start > job.cached else chunk.tokens + chunk.start
                    flight.unsent.append((tokens, began, ended))
                    if flight.granted:
                        self._send(ended, flight)

    def _send(self, now: float, flight: _Flight) -> None:
        prompt, token = flight.prompt_machine, flight.token_machine
        assert prompt is not None
        assert token is not None
        layered = flight.request.prompt_tokens >= self._network.serial_below_tokens
        for tokens, began, ended in flight.unsent:
            num_bytes = tokens * prompt.model.kv_bytes_per_token
            self._moved_bytes += num_bytes
            begun_at, ended_at = max(began, flight.readable_at), max(ended, flight.readable_at)
            flight.kv_at = send(self._network, prompt.egress, token.ingress, num_bytes, begun_at, ended_at, layered)
        flight.unsent = []
        if flight.prompt_done:
            self._put(max(now, flight.kv_at), self._arrived, (flight, flight.answer))

    def _arrived(self, now: float, what: tuple[_Flight, Job]) -> None:
        """All of its KV is at the machine that decodes."""
        flight, job = what
        token, prompt = flight.token_machine, flight.prompt_machine
        if flight.answer is not job or flight.done or token is None or prompt is None or flight.prompt is None:
            return
        self._drop_prompt(now, flight)
        self._bind(token, flight, -1)
        token.engine.filled(job)
        token.touch(now)

    def _drop_prompt(self, now: float, flight: _Flight) -> None:
        """Nothing more is wanted of the prompt machine."""
        job, machine = flight.prompt, flight.prompt_machine
        flight.prompt = None
        if job is not None and machine is not None and machine.jobs.pop(job, 0) is None and machine.ready:
            machine.settle(now)  # what it writes yet ends with the steps under way now
            machine.engine.release(job)
            machine.touch(now)

    def _rebind(self, now: float, flight: _Flight) -> None:
        assert flight.placement is not None
        uid = self._router.rebind(now, flight.arrival, flight.placement, self._view(now))
        old, job = flight.token_machine, flight.answer
        if uid is None or old is None or job is None or uid == old.uid:
            return
        machine = self._machines.get(uid)
        if machine is None or machine is flight.prompt_machine:
            raise ValueError(
                f"{self._policy.name} bound request {flight.request.number} to {uid}, which cannot take it"
            )
        del old.jobs[job]
        if not job.ended:
            old.settle(now)  # what it writes yet ends with the steps under way now
            old.engine.release(job)
            self._put(now, self._poke, old)
        self._bind(old, flight, -1)
        flight.token_machine = machine
        flight.answer = self._job(flight, Part.ANSWER)
        machine.jobs[flight.answer] = None
        self._bind(machine, flight, 1)
        flight.granted = False
        # Whatever was sent was sent to the other machine.
        flight.unsent = [(flight.request.prompt_tokens, now, now)]
        self._put(now + self._network.message_seconds, self._ask_memory, (flight, flight.answer))

    def _poke(self, now: float, machine: SimMachine) -> None:
        if machine.ready:
            machine.touch(now)

    # What engines say.

    def admitted(self, job: Job) -> None:
        flight: _Flight = job.owner
        if flight.answer is not None:
            self._put(self._now + self._network.message_seconds, self._ask_memory, (flight, flight.answer))

    def granted(self, job: Job) -> None:
        self._put(self._now + self._network.message_seconds, self._grant, (job.owner, job))

    def tokens(self, seconds: float, count: int) -> None:
        self._meter.tokens(seconds, count)

    def preempted(self, job: Job) -> None:
        job.owner.preemptions += 1

    def first_token(self, job: Job) -> None:
        flight: _Flight = job.owner
        now = self._now
        if job.cached > 0:
            flight.cached = job.cached
        self._meter.first_token(flight.request.number, now)
        self._router.first_token(now, flight.request.number)
        if job is flight.prompt:
            if flight.request.output_tokens == 1:
                self._finish(now, flight)
            else:
                self._rebind(now, flight)

    def finished(self, job: Job) -> None:
        flight: _Flight = job.owner
        if job is flight.prompt:
            flight.prompt_done = True
        elif job is flight.answer:
            self._finish(self._now, flight)

    def _finish(self, now: float, flight: _Flight) -> None:
        job, machine = flight.answer, flight.token_machine
        if job is not None and machine is not None:
            if flight.prompt is not None:
                self._bind(machine, flight, -1)
            machine.jobs.pop(job, None)
            if not job.ended:  # its first token was its last
                machine.settle(now)  # what it writes yet ends with the steps under way now
                machine.engine.release(job)
                self._put(now, self._poke, machine)
        if flight.prompt is not None:
            self._put(now, self._drop_after, flight)
        flight.finished_at = now
        self._end_flight(flight, now)
        self._router.finished(now, flight.request.number)

    def _drop_after(self, now: float, flight: _Flight) -> None:
        self._drop_prompt(now, flight)

    def _end_flight(self, flight: _Flight, now: float, refused: str | None = None) -> None:
        flight.done = True
        flight.refused = refused
        self._left -= 1
        self._meter.ended(flight.request.number)

    # The control plane.

    def _scrape(self, now: float, _: None) -> None:
        for machine in self._machines.values():
            machine.settle(now)
        self._meter.scrape(now)
        self._put(now + self._conditions.scrape_seconds, self._scrape, None)

    def _tick(self, now: float, _: None) -> None:
        assert self._scaler is not None
        for change in self._scaler.tick(now, self._view(now)):
            self._change(now, change, self._conditions.move_seconds)
        self._put(now + self._scaler.period_seconds, self._tick, None)

    def _change(self, now: float, change: RoleChange, after_seconds: float) -> None:
        machine = self._machines.get(change.uid)
        if machine is None:
            self._notes.append(f"{now:.1f} s: {change.uid} is not there to become {change.role.value}")
            return
        if machine.moving_to is not None:
            return
        if machine.role is change.role:
            machine.home = change.home or machine.home
            if change.max_prefill_tokens is not None:
                machine.engine.set_rules(self._rules_of(change))
            machine.changed()
            return
        machine.moving_to = change.role
        machine.changed()
        begun = (machine, change, now, machine.busy_seconds)
        self._put(now + after_seconds, self._switch, begun)

    def _switch(self, now: float, begun: tuple[SimMachine, RoleChange, float, float]) -> None:
        machine, change, asked_at, busy_before = begun
        if not machine.ready:
            return

        def done(at: float) -> None:
            self._moves += 1
            self._lost_seconds += max(0.0, at - asked_at - (machine.busy_seconds - busy_before))
            self._intervals.append(
                RoleInterval(
                    machine.uid, old, self._since[machine.uid], at, self._interval_reasons.get(machine.uid, "")
                )
            )
            self._since[machine.uid] = at
            self._interval_reasons[machine.uid] = change.reason
            machine.moving_to = None
            machine.home = change.home or change.role
            machine.changed()

        old = machine.role
        machine.switch(change.role, self._rules_of(change), now, done)

    def _rules_of(self, change: RoleChange) -> EngineRules:
        rules = self._rules[change.role]
        bound = change.max_prefill_tokens
        return rules if bound is None else replace(rules, max_prefill_tokens=bound)

    # Machines.

    def _add_machine(self, uid: str, model: MachineModel, role: Role) -> None:
        rules = self._rules[role]
        predictor = self._predictors.get(model.name)
        if predictor is None:
            predictor = self._predictors[model.name] = FixedPredictor(model.step_time)
        stages = model.pipeline_stages
        lanes = [self._engine(model.kv_capacity_tokens // stages, rules, predictor) for _ in range(stages)]
        machine: SimMachine
        if stages == 1:
            machine = StepMachine(uid, model, role, self, self._on_chunks, lanes[0])
        else:
            machine = PipelinedMachine(uid, model, role, self, self._on_chunks, lanes)
        machine.role_since = machine.idle_since = self._now
        self._machines[uid] = machine
        self._since[uid] = self._now

    def _engine(self, kv_capacity_tokens: int, rules: EngineRules, predictor: StepPredictor) -> Engine:
        if self._conditions.exact:
            return ExactEngine(kv_capacity_tokens, rules, predictor, self, self._has_prefixes, self._longest + 1)
        return CountingEngine(kv_capacity_tokens, rules, predictor, self, self._has_prefixes)

    def _end_interval(self, machine: SimMachine, now: float) -> None:
        reason = self._interval_reasons.get(machine.uid, "")
        self._intervals.append(RoleInterval(machine.uid, machine.role, self._since[machine.uid], now, reason))

    def _lose(self, now: float, loss: Loss) -> None:
        uid = self._places[loss.machine]
        machine = self._machines.pop(uid, None)
        if machine is None:
            return
        machine.settle(now)
        self._end_interval(machine, now)
        self._dead_steps += machine.steps
        machine.stop()
        back = loss.back_after_seconds
        self._lost_seconds += max(0.0, min(back or float("inf"), self._trace.horizon_seconds - now))
        if back is not None:
            self._put(now + back, self._replace, (loss.machine, machine.role))
        for job in tuple(machine.jobs):
            flight: _Flight = job.owner
            if flight.done:
                continue
            if job is flight.prompt:
                self._prompt_lost(now, flight)
            elif job is flight.answer:
                machine.engine.lose(job)
                self._answer_lost(now, flight)

    def _replace(self, now: float, what: tuple[int, Role]) -> None:
        place, role = what
        self._places[place] += "'"
        self._add_machine(self._places[place], self._models[place], role)

    def _prompt_lost(self, now: float, flight: _Flight) -> None:
        """The machine that decodes computes the prompt itself."""
        token, job = flight.token_machine, flight.answer
        flight.prompt = None
        flight.restarts += 1
        if token is not None and job is not None:
            self._bind(token, flight, -1)
            job.sampled = 0 if flight.stream.first_at is None else 1
            if job.serial < 0:
                job.arrival = now
            token.engine.compute_here(job)
            token.touch(now)

    def _answer_lost(self, now: float, flight: _Flight) -> None:
        """As the router does: once more elsewhere while the client has seen nothing."""
        self._drop_prompt(now, flight)
        flight.restarts += 1
        if flight.stream.first_at is None and flight.attempt < self._conditions.max_attempts:
            flight.answer = flight.token_machine = None
            self._route(now, flight)
        else:
            flight.answer = None
            self._end_flight(flight, now)
            self._router.finished(now, flight.request.number)
