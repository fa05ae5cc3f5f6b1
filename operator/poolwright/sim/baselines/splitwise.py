"""Splitwise's cluster scheduler with its mixed pool: the paper's, and the one that its authors' simulator has.

They differ in when a lent machine goes home: the paper sends it back once the work of the other kind is drained, the
simulator once it is wholly idle. The simulator's choices were recorded from Mutinifni/splitwise-sim @8f99e7d (MIT),
`MixedPoolScheduler`. Corrected here, since copied they would flatter it or nobody could build them: a decode's memory
is reserved for the expected answer, not the true one; KV sizes, decode times and transfers are the simulator's own
(splitwise-sim ignores grouped-query attention and predicts decode times almost flat in the batch).
`token_max_pending_batch_tokens` is configured there and never read; so it is not here.

Source: Patel et al., Splitwise, ISCA '24, sections 4.1 and 4.2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from poolwright.sim.baselines.pools import split_roles
from poolwright.sim.baselines.routers import NO_MACHINE, QuietRouter, Routed, placed
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.baselines.run_state import PerRun
from poolwright.sim.policy import ClusterView, EngineRules, MachineView, Policy, RoleChange, Setting
from poolwright.sim.request import Arrival
from poolwright_engine.scheduling.scheduler_config import Batching
from poolwright_protocol.roles import Role

PROMPT_QUEUE_TOKENS = 8192
PROMPT_BATCH_TOKENS = 2048
RETURN_PERIOD_SECONDS = 0.1


@dataclass(slots=True)
class Seat:
    """One machine: tokens given and not done (a decode counts one), whether prompts wait, KV tokens spoken for."""

    uid: str
    identity: Role  # survives a stay in the mixed pool
    room_tokens: float
    pending_tokens: int = 0
    queued: bool = False
    reserved_tokens: float = 0.0


@dataclass(slots=True)
class MixedPool:
    """Three pools, in the order in which machines entered them."""

    prompt: list[Seat] = field(default_factory=list)
    mixed: list[Seat] = field(default_factory=list)
    token: list[Seat] = field(default_factory=list)
    prompt_queue_tokens: int = PROMPT_QUEUE_TOKENS

    def add(self, seat: Seat) -> None:
        {Role.PROMPT: self.prompt, Role.TOKEN: self.token, Role.MIXED: self.mixed}[seat.identity].append(seat)

    def seats(self) -> Iterable[Seat]:
        return (*self.prompt, *self.mixed, *self.token)

    def pair(self, prompt_tokens: int, output_tokens: float) -> tuple[Seat, Seat, list[Seat]]:
        """Machine for the prompt, machine for the answer, and those lent to the mixed pool for it."""
        prompt = self._prompt_seat(self.prompt, prompt_tokens) or self._prompt_seat(self.mixed, prompt_tokens)
        need = prompt_tokens + 1 + output_tokens
        token = self._token_seat(self.token, need) or self._token_seat(self.mixed, need)
        lent = []
        if prompt is None and self.token:
            prompt = min(self.token, key=lambda s: s.pending_tokens)
            self.token.remove(prompt)
            self.mixed.append(prompt)
            lent.append(prompt)
        if token is None and self.prompt:
            token = min(self.prompt, key=lambda s: s.reserved_tokens)
            self.prompt.remove(token)
            self.mixed.append(token)
            lent.append(token)
        if prompt is None or token is None:
            prompt = token = min(self.seats(), key=lambda s: s.pending_tokens)
        return prompt, token, lent

    def go_home(self, seat: Seat) -> None:
        self.mixed.remove(seat)
        (self.prompt if seat.identity is Role.PROMPT else self.token).append(seat)

    def _prompt_seat(self, pool: Sequence[Seat], prompt_tokens: int) -> Seat | None:
        if not pool:
            return None
        seat = min(pool, key=lambda s: s.pending_tokens)
        too_long = seat.queued and seat.pending_tokens + prompt_tokens > self.prompt_queue_tokens
        return None if too_long else seat

    def _token_seat(self, pool: Sequence[Seat], tokens: float) -> Seat | None:
        if not pool:
            return None
        seat = min(pool, key=lambda s: s.reserved_tokens)
        return None if seat.reserved_tokens + tokens >= seat.room_tokens else seat


class SplitwiseRun(QuietRouter):
    """Router and scaler of one run. `until_idle`: the simulator's rule for going home."""

    def __init__(self, until_idle: bool) -> None:
        self._until_idle = until_idle
        self._pools = MixedPool()
        self._by_uid: dict[str, Seat] = {}
        self._reserved: dict[int, list[tuple[str, float]]] = {}  # of each request: prompt machine's, token machine's

    @property
    def period_seconds(self) -> float:
        return RETURN_PERIOD_SECONDS

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        homes = self._look(view)
        if not self._by_uid:
            return NO_MACHINE
        prompt, token, lent = self._pools.pair(arrival.prompt_tokens, arrival.expected_output_tokens)
        kv = arrival.prompt_tokens + 1.0
        reserved = [(token.uid, kv + arrival.expected_output_tokens)]
        if prompt is not token:
            reserved.append((prompt.uid, kv))
        self._reserved[arrival.number] = reserved
        for uid, tokens in reserved:
            self._by_uid[uid].reserved_tokens += tokens
        changes = homes + [RoleChange(s.uid, Role.MIXED, "lent to the mixed pool", s.identity) for s in lent]
        machines = {m.uid: m for m in view.machines}
        return placed(machines[prompt.uid], machines[token.uid]), changes

    def first_token(self, now: float, number: int) -> None:
        """The prompt machine's copy of the KV goes with the transfer."""
        reserved = self._reserved.get(number, [])
        if len(reserved) > 1:
            self._release([reserved.pop()])

    def finished(self, now: float, number: int) -> None:
        self._release(self._reserved.pop(number, []))

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        return self._look(view)

    def _release(self, reserved: Iterable[tuple[str, float]]) -> None:
        for uid, tokens in reserved:
            if uid in self._by_uid:
                self._by_uid[uid].reserved_tokens -= tokens

    def _look(self, view: ClusterView) -> list[RoleChange]:
        """Takes over what the machines say; sends home who is done."""
        here = {m.uid: m for m in view.machines if m.ready}
        for uid in [uid for uid in self._by_uid if uid not in here]:
            gone = self._by_uid.pop(uid)
            for pool in (self._pools.prompt, self._pools.mixed, self._pools.token):
                if gone in pool:
                    pool.remove(gone)
        for uid, machine in here.items():
            seat = self._by_uid.get(uid)
            if seat is None:
                seat = self._by_uid[uid] = Seat(uid, machine.home, machine.model.kv_capacity_tokens)
                self._pools.add(seat)
            seat.pending_tokens = machine.waiting_tokens + machine.decodes + machine.bound_decodes
            seat.queued = len(machine.waiting_prompts) > 1  # the first is being computed
        changes = []
        for seat in list(self._pools.mixed):
            if seat.identity is not Role.MIXED and self._done(here[seat.uid], seat.identity):
                self._pools.go_home(seat)
                changes.append(RoleChange(seat.uid, seat.identity, "back from the mixed pool"))
        return changes

    def _done(self, machine: MachineView, identity: Role) -> bool:
        others = machine.waiting_prompts if identity is Role.TOKEN else machine.decodes + machine.bound_decodes
        if self._until_idle:
            return not (machine.waiting_prompts or machine.decodes or machine.bound_decodes)
        return not others


def splitwise(prompt: int, until_idle: bool = False) -> Policy:
    """`prompt`: machines of the prompt pool at the start; the rest decode."""
    runs = PerRun(lambda setting: SplitwiseRun(until_idle))

    def rules(setting: Setting) -> dict[Role, EngineRules]:
        # Whole prompts first, in batches of 2,048 tokens; decodes of a mixed machine wait for them (section 4.2).
        prompts_first = EngineRules(Batching.PREFILL_FIRST, PROMPT_BATCH_TOKENS, max_sequences=512)
        return {**split_rules(setting), Role.PROMPT: prompts_first, Role.MIXED: prompts_first}

    return Policy(
        name="Splitwise, as its simulator" if until_idle else "Splitwise",
        source="Splitwise, ISCA '24; Mutinifni/splitwise-sim @8f99e7d, MIT" if until_idle else "Splitwise, ISCA '24",
        router=runs.router,
        scaler=runs.scaler,
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=rules,
        parameters={"prompt": prompt, "prompt_queue_tokens": PROMPT_QUEUE_TOKENS},
    )
