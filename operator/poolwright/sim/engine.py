"""What a machine's engine is to the simulator: jobs go in, plans of steps come out, and reading a plan says what ended.

Two engines fulfil it: `counting` (fast) and `exact` (the engine's own scheduler). Neither knows time, links or routers.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from poolwright.sim.gaps import Stream
from poolwright.sim.policy import EngineRules
from poolwright.sim.request import Request
from poolwright.sim.step_time import Chunk


class Part(Enum):
    """What a machine does of a request."""

    WHOLE = "prompt and answer"
    PROMPT = "the prompt, for another machine"
    ANSWER = "the answer, with KV from another machine"


class Job:
    """A request's part on one machine. The first block is said when it is made; the rest is the engine's."""

    __slots__ = (
        "arrival",
        "blocks",
        "cached",
        "computed",
        "cross_class",
        "ended",
        "ends_at",
        "epoch",
        "handle",
        "held_until",
        "join_at",
        "join_start",
        "keys",
        "lane",
        "last_crosses",
        "limit",
        "log_start",
        "logged",
        "need",
        "owner",
        "part",
        "plain",
        "preemptions",
        "prefilling",
        "priority",
        "published",
        "request",
        "sampled",
        "seated",
        "serial",
        "stream",
        "table",
        "ungranted",
        "wait_key",
    )

    def __init__(
        self, request: Request, part: Part, stream: Stream, owner: Any, arrival: float, priority: int = 0
    ) -> None:
        self.request = request
        self.part = part
        self.stream = stream
        self.owner = owner
        self.arrival = arrival  # at this machine
        self.priority = priority
        self.limit = request.prompt_tokens + (1 if part is Part.PROMPT else request.output_tokens)
        self.sampled = 0  # tokens, those of steps under way included
        self.computed = (
            0  # tokens whose KV is there or will be by the steps under way; of decodes, as of their last change
        )
        self.prefilling = True
        self.preemptions = 0
        self.cached = -1  # prompt tokens found in the cache when it was first admitted; -1: not admitted yet
        self.seated = False
        self.need = 0  # blocks to be admitted with, hits included
        self.blocks = 0
        self.table: list[int] = []
        self.keys: list[bytes] = []
        self.published = 0
        self.ungranted = False
        self.serial = -1
        self.wait_key: tuple[int, bool, float, int] = (0, True, 0.0, 0)
        self.held_until = -1  # the step whose reading tells its last tokens
        self.epoch = 0
        self.join_at = 0
        self.join_start = 0
        self.ends_at = 0
        self.cross_class = -1
        self.last_crosses = False
        self.logged = False
        self.log_start = -1  # -1: what it decodes is not in the log, or not yet
        self.ended = False
        self.plain = False
        self.lane = 0  # of a machine with pipeline stages
        self.handle: object = None  # the exact engine's sequence

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.sampled

    @property
    def remaining(self) -> int:
        """Tokens to compute before its next one can be sampled in a step with it."""
        return self.request.prompt_tokens + self.sampled - self.computed


class Plan:
    """One step. `context`: KV tokens that its decodes attend to, their own included. `kv_tokens`, `tokens`: of all."""

    __slots__ = ("chunk_jobs", "chunks", "context", "decodes", "finished", "first", "joined", "leaving", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.chunks: list[Chunk] = []
        self.chunk_jobs: list[Job] = []
        self.first: list[Job] = []  # whose prompt ends with this step
        self.decodes = 0
        self.context = 0
        self.joined: list[Job] = []  # decode, and did not in the step before
        self.leaving: list[Job] = []  # decode, and do not in the step behind
        self.finished: list[Job] = []  # sample their last token


class Listener(Protocol):
    """What an engine says while it forms a step or reads one, at the machine's time."""

    def admitted(self, job: Job) -> None:
        """A PROMPT has memory and asks the machine that decodes for its own."""
        ...

    def granted(self, job: Job) -> None:
        """An ANSWER has memory: its KV may be sent."""
        ...

    def first_token(self, job: Job) -> None: ...

    def tokens(self, seconds: float, count: int) -> None:
        """So many gaps of so many seconds were seen by clients."""
        ...

    def finished(self, job: Job) -> None: ...

    def preempted(self, job: Job) -> None: ...


class Desk(Protocol):
    """Where jobs are handed in, and what can be seen from outside."""

    def set_rules(self, rules: EngineRules) -> None: ...

    def why_never(self, request: Request) -> str | None: ...

    def enter(self, job: Job) -> None: ...

    def ask_memory(self, job: Job) -> None: ...

    def granted_to_peer(self, job: Job) -> None:
        """A PROMPT's other machine has memory for it."""
        ...

    def filled(self, job: Job) -> None: ...

    def compute_here(self, job: Job) -> None:
        """The prompt of an ANSWER will not come."""
        ...

    def release(self, job: Job) -> None:
        """End it, whatever it does, and free its memory."""
        ...

    def lose(self, job: Job) -> None:
        """The machine is gone: the tokens that were read are all there is of its stream."""
        ...

    def waiting_prompts(self) -> Sequence[int]: ...

    @property
    def decodes(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def kv_used_tokens(self) -> int: ...

    def hit_tokens(self, request_keys: Sequence[bytes]) -> int: ...


class Engine(Desk, Protocol):
    """Plans are read in the order in which they were formed, and up to two are unread."""

    wake_at: float | None  # with no plan: look again then

    def compose(self, number: int, now: float) -> Plan | None: ...

    def read(self, plan: Plan, now: float) -> None: ...

    def run_steps(self, plan: Plan) -> int:
        """For how many steps from `plan` on, the first, everybody decodes and nobody comes or goes; at least 1."""
        ...

    def advance(self, plan: Plan, steps: int, now: float, seconds: float) -> None:
        """Read so many equal steps at once; `plan` becomes the one behind them."""
        ...
