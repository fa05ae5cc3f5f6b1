"""One machine of the simulator: it runs its engine's steps in time.

It knows its engine, its step times and its links; who sends work here, and where KV goes, is the simulation's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from poolwright.sim.engine import Desk, Engine, Job, Plan
from poolwright.sim.network import Link
from poolwright.sim.policy import EngineRules, MachineView
from poolwright.sim.step_time import MachineModel
from poolwright_protocol.roles import Role

_RECENT = 0.9  # weight of the past in the mean of recent gaps


class Clock(Protocol):
    """Events of the simulation: what is due is called once with its argument."""

    def at(self, seconds: float, call: Callable[[float, int], None], argument: int) -> None: ...


class ChunkReader(Protocol):
    """A step with prompt tokens has ended."""

    def __call__(self, machine: "SimMachine", plan: Plan, began: float, ended: float) -> None: ...


class SimMachine(ABC):
    """What a machine is to the simulation, however its steps run."""

    def __init__(
        self, uid: str, model: MachineModel, role: Role, clock: Clock, on_chunks: ChunkReader, engine: Desk
    ) -> None:
        self.uid = uid
        self.model = model
        self.role = role
        self.home = role
        self.role_since = 0.0
        self.ready = True
        self.moving_to: Role | None = None
        self.egress = Link()
        self.ingress = Link()
        self.engine = engine
        self.bound_decodes = 0
        self.bound_context = 0
        self.busy_seconds = 0.0
        self.steps = 0
        self.last_step_seconds = 0.0
        self.decode_step_seconds = 0.0
        self.idle_since: float | None = 0.0
        self.jobs: dict[Job, None] = {}
        self._clock = clock
        self._on_chunks = on_chunks
        self._new_role: tuple[Role, EngineRules] | None = None
        self._on_role: Callable[[float], None] | None = None
        self._version = 0  # of the events that are due here; those of older ones are void
        self._view: MachineView | None = None

    @abstractmethod
    def touch(self, now: float) -> None:
        """Something is new in the engine."""

    @abstractmethod
    def settle(self, now: float) -> None:
        """Account for all steps that have ended by now."""

    @abstractmethod
    def submitted_until(self, now: float) -> float:
        """When the device has done what it was given by the step boundary at which a message of now is heard."""

    def switch(self, role: Role, rules: EngineRules, now: float, done: Callable[[float], None]) -> None:
        """Take another role at the next step boundary; `done` is called then. What runs finishes here."""
        self._new_role = (role, rules)
        self._on_role = done
        self.touch(now)

    def stop(self) -> None:
        """It is gone: nothing that it was doing ends."""
        self._version += 1
        self.ready = False
        self._view = None

    def view(self) -> MachineView:
        """As of the last step boundary."""
        view = self._view
        if view is None:
            engine = self.engine
            view = self._view = MachineView(
                self.uid,
                self.role,
                self.model,
                self.ready,
                self.home,
                self.role_since,
                tuple(engine.waiting_prompts()),
                engine.decodes,
                engine.context_tokens,
                self.bound_decodes,
                self.bound_context,
                engine.kv_used_tokens,
                self.last_step_seconds,
                self.decode_step_seconds,
                self.idle_since,
                self.moving_to,
            )
        return view

    def changed(self) -> None:
        """Something that a view shows is new."""
        self._view = None

    def _apply_role(self, now: float) -> None:
        if self._new_role is not None:
            role, rules = self._new_role
            self._new_role = None
            self.role = role
            self.role_since = now
            self.engine.set_rules(rules)
            if self._on_role is not None:
                self._on_role(now)

    def _note_gap(self, seconds: float) -> None:
        past = self.decode_step_seconds
        self.decode_step_seconds = seconds if not past else past * _RECENT + seconds * (1 - _RECENT)


class StepMachine(SimMachine):
    """One step at a time, and the next one formed when it begins, as the engine's loop does. Runs of steps in which
    everybody decodes are one event, until something is new."""

    def __init__(
        self, uid: str, model: MachineModel, role: Role, clock: Clock, on_chunks: ChunkReader, engine: Engine
    ) -> None:
        super().__init__(uid, model, role, clock, on_chunks, engine)
        self._steps_of = engine
        self._current: Plan | None = None
        self._next: Plan | None = None
        self._began = 0.0
        self._number = 0
        self._run = 0  # steps of the run of decodes under way; 0: one step, and what comes behind it is formed
        self._forming = False

    def touch(self, now: float) -> None:
        """It is looked at when the step after the one that runs is formed."""
        self._view = None
        if self._forming:
            return
        if self._current is None:
            self._begin(now)
        elif self._run > 1:
            self._cut(now)

    def stop(self) -> None:
        super().stop()
        self._current = self._next = None
        self._run = 0

    def settle(self, now: float) -> None:
        plan = self._current
        if plan is None or self._run < 2:
            return
        step_time = self.model.step_time
        begun, _ = step_time.decode_run(plan.decodes, plan.context, now - self._began, self._run)
        if begun > 1:
            done, seconds = step_time.decode_run(plan.decodes, plan.context, float("inf"), begun - 1)
            left = self._run - done
            self._advance(plan, done, self._began + seconds, seconds)
            self._began += seconds
            self._run = left

    def submitted_until(self, now: float) -> float:
        """It is heard when the step that runs ends; the one behind that has been formed by then."""
        plan, step_time = self._current, self.model.step_time
        if plan is None:
            return now
        if self._run:
            begun, _ = step_time.decode_run(plan.decodes, plan.context, now - self._began, self._run)
            _, seconds = step_time.decode_run(plan.decodes, plan.context, float("inf"), min(begun + 1, self._run))
        else:
            behind = self._next
            seconds = step_time.seconds(plan.chunks, plan.decodes, plan.context)
            if behind is not None:
                seconds += step_time.seconds(behind.chunks, behind.decodes, behind.context)
        return self._began + seconds

    def _boundary(self, now: float, version: int) -> None:
        if version != self._version or self._current is None:
            return
        self._view = None
        self._forming = True
        plan, began = self._current, self._began
        seconds = now - began
        if self._run:
            self._advance(plan, self._run, now, seconds)
        else:
            self.busy_seconds += seconds
            self.steps += 1
            self.last_step_seconds = seconds
            if plan.decodes:
                self._note_gap(seconds)
            self._current, self._next = self._next, None
            self._steps_of.read(plan, now)
            if plan.chunks:
                self._on_chunks(self, plan, began, now)
        self._apply_role(now)
        if self._current is None:
            self._current = self._compose(now)
        self._go(now)
        self._forming = False

    def _begin(self, now: float) -> None:
        """From idleness."""
        self._forming = True
        self._apply_role(now)
        self._current = self._compose(now)
        if self._current is not None:
            self.idle_since = None
        self._go(now)
        self._forming = False

    def _go(self, now: float) -> None:
        """Start what is formed, and form what comes behind it."""
        plan = self._current
        if plan is None:
            if self.idle_since is None:
                self.idle_since = now
            wake = self._steps_of.wake_at
            if wake is not None:
                self._version += 1
                self._clock.at(max(now, wake), self._wake, self._version)
            return
        self._began = now
        self._version += 1
        step_time = self.model.step_time
        steps = self._steps_of.run_steps(plan)
        if steps > 1:
            self._run, seconds = step_time.decode_run(plan.decodes, plan.context, float("inf"), steps)
        else:
            self._run = 0
            seconds = step_time.seconds(plan.chunks, plan.decodes, plan.context)
            self._next = self._compose(now)
        self._clock.at(now + seconds, self._boundary, self._version)

    def _wake(self, now: float, version: int) -> None:
        if version == self._version and self._current is None:
            self._begin(now)

    def _compose(self, now: float) -> Plan | None:
        plan = self._steps_of.compose(self._number, now)
        if plan is not None:
            self._number += 1
        return plan

    def _cut(self, now: float) -> None:
        """The run ends with the step that runs now; the one behind it was formed when that began."""
        plan = self._current
        assert plan is not None
        steps, seconds = self.model.step_time.decode_run(plan.decodes, plan.context, now - self._began, self._run)
        if steps < self._run:
            self._run = steps
            self._version += 1
            self._clock.at(self._began + seconds, self._boundary, self._version)

    def _advance(self, plan: Plan, steps: int, now: float, seconds: float) -> None:
        self.busy_seconds += seconds
        self.steps += steps
        self.last_step_seconds = seconds / steps
        self._note_gap(seconds / steps)
        self._number += steps
        self._steps_of.advance(plan, steps, now, seconds)
        self._run = 0
        self._view = None
