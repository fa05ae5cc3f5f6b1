"""What a routing choice is made from and what it says, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from poolwright.core.machine import Machine
from poolwright.core.pricing import HANDOFF_SECONDS, MachinePrices
from poolwright.core.router_note import RouterNote

# One decoding stream slows a prompt on the same machine about as much as this many more prompt tokens would.
STREAM_TOKENS = 16
# Equal machines measure this differently from one request to the next, so estimates this close count as equal.
ESTIMATE_TOLERANCE = 0.2
HANDOFF_MILLISECONDS = HANDOFF_SECONDS * 1000
# Prompts up to this long may stay on the token machine: about one decode step's work, so nobody's gap grows much.
LOCAL_PROMPT_TOKENS = 32
_NEARLY_NONE = 0.011  # of gaps over the target: a P99 or stricter


def every_gap_counts(percentile: float, output_tokens: float) -> bool:
    """Whether the second token of an answer, which a hand-over delays, must be in time as all others: where nearly no
    gap may be late, and where answers are so short that the second is more than the share that may."""
    missed = 1 - percentile / 100
    return missed <= _NEARLY_NONE or missed * max(1.0, output_tokens - 1) < 1


@dataclass(frozen=True, slots=True)
class Load:
    """What this router has outstanding on one machine, and what it knows of its speed.

    `avoid_until` is the breaker: until then (the caller's clock) the machine is used only if no other can be.
    `recent_tokens` decays; it only breaks ties, so that idle machines take turns.

    With `prices`: `free_at` (the caller's clock) is when the prompts given to it are predicted to be computed,
    `context_tokens` the KV of its streams half way through their answers, `kv_free_tokens` what its memory has left,
    `next_step_seconds` a decode step of its streams and one more without context, `bound_streams` those of its streams
    whose prompt is not computed yet; `prefill_bound` its `maxPrefillTokensPerStep`; `lent`: it works for the other
    pool, as a mixed machine does. `waiting`: tokens and pairs (see `MachineWork`) of prompts that wait there, the
    shortest first.
    """

    prompt_tokens: int = 0  # of prompts sent there to be computed, first token not seen yet
    streams: int = 0  # requests that decode there, or will
    milliseconds_per_token: float = 1.0
    recent_tokens: float = 0.0
    avoid_until: float = float("-inf")
    prices: MachinePrices | None = None
    free_at: float = float("-inf")
    context_tokens: float = 0.0
    next_step_seconds: float = 0.0
    kv_free_tokens: float = float("inf")
    bound_streams: int = 0
    prefill_bound: int | None = None
    lent: bool = False
    waiting: tuple[tuple[int, float], ...] = ()

    @property
    def work_tokens(self) -> int:
        return self.prompt_tokens + self.streams * STREAM_TOKENS


IDLE = Load()


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """`tried` holds uids that failed this request already; they are not chosen again. `cached_tokens`: by uid, how much
    of the prompt its cache holds. `output_tokens`: expected."""

    prompt_tokens: int
    tried: frozenset[str] = frozenset()
    local_prompt_tokens: int = LOCAL_PROMPT_TOKENS
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    output_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request is promised; inf where nothing is. `every_gap`: the second token counts as the others do, which a
    hand-over delays; else it may be late, as where the target is a percentile of many gaps."""

    ttft_seconds: float
    tbt_seconds: float
    every_gap: bool = True

    @classmethod
    def of(cls, note: RouterNote, output_tokens: float) -> "Targets | None":
        """None without both objectives: machines are packed up to a target, which where there is none would be without
        end."""
        if note.ttft_seconds is None or note.tbt_seconds is None:
            return None
        return cls(note.ttft_seconds, note.tbt_seconds, every_gap_counts(note.tbt_percentile or 100.0, output_tokens))


class Route(StrEnum):
    """Why a choice is as it is."""

    SPLIT = "split"
    MIXED = "a mixed machine is the cheapest"
    SHORT_PROMPT = "a short prompt is cheaper where it decodes"
    ONE_SIDED = "no machine for one of the phases, so any machine does both"
    PREFIX = "a cached prefix outweighs the wait"
    BORROWED_FOR_PROMPT = "no pair is in time, and a token machine has slack"
    BORROWED_FOR_TOKENS = "no pair is in time, and a prompt machine has room"


BORROWED = frozenset({Route.BORROWED_FOR_PROMPT, Route.BORROWED_FOR_TOKENS})


@dataclass(frozen=True, slots=True)
class Choice:
    """`prompt` None: the decoding machine computes the prompt too.

    What it was made on, as predicted and no part of what it is: `first_token_seconds` from now, and `step_seconds` of
    the decoding machine with this stream in it; None where that has no price.
    """

    token: Machine
    prompt: Machine | None
    route: Route
    first_token_seconds: float | None = field(default=None, compare=False)
    step_seconds: float | None = field(default=None, compare=False)


class NoRoute(StrEnum):
    """Why no machine is chosen."""

    NO_MACHINE = "NoMachine"
    NONE_READY = "NoneReady"
    ALL_TRIED = "AllTried"


@dataclass(frozen=True, slots=True)
class NoMachine:
    why: NoRoute
    machines: int = 0
    live: int = 0

    @property
    def reason(self) -> str:
        """For whoever asked."""
        match self.why:
            case NoRoute.NO_MACHINE:
                return "the pool has no machine"
            case NoRoute.NONE_READY:
                return f"none of the {self.machines} machines of the pool is Ready"
            case NoRoute.ALL_TRIED:
                return f"none of the {self.live} Ready machines of the pool took the request"
