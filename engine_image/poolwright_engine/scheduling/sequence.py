"""A request and its tokens. No torch.

`Request` is what a client asked for and never changes; `Sequence` is where the engine is with it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from poolwright_engine.scheduling.ngrams import NgramIndex

if TYPE_CHECKING:
    from poolwright_engine.scheduling.runner import Row

T = TypeVar("T")


class GuideKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"  # text: a JSON list of strings
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Guide:
    """What the output must match. `text` is the schema, expression or grammar; checked before it enters the engine."""

    kind: GuideKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy. `seed` is always set before a request enters the engine; noise is a function of
    (seed, absolute position of the token sampled), so a draw is the same wherever and whenever it is made.

    Order, as vLLM's: raw log probabilities; allowed tokens (the list, the guide, min_tokens) and logit_bias; penalties;
    temperature; min-p, top-k, top-p; noise.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # before it, eos and stop ids cannot be sampled
    presence_penalty: float = 0.0  # of output tokens
    frequency_penalty: float = 0.0  # of output tokens
    repetition_penalty: float = 1.0  # of prompt and output tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # no others are sampled; None: any
    guide: Guide | None = None
    logprobs: int | None = None  # how many alternatives; None: no log probabilities; -1: all of the vocabulary
    prompt_logprobs: int | None = None  # the same for the prompt's tokens

    @property
    def needs_history(self) -> bool:
        """The sampler must know the tokens so far, so a row that takes a seat brings them."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or self.min_tokens > 0
            or self.guide is not None
        )

    @property
    def shapes_logits(self) -> bool:
        """The sampler has more to do to a row of logits than to draw from it."""
        return self.needs_history or bool(self.logit_bias) or self.allowed_token_ids is not None


@dataclass(frozen=True, slots=True)
class Request:
    """`prompt_machine` is the raw signed header, checked by the hand-off; None: prefill here.

    `priority`: lower runs first, under the priority policy only. `relegated`: it will be late in any case, so it runs
    after all that will not, under any policy, until it has waited for long. `cache_salt`: requests share cached blocks
    only with the same salt. `siblings`: requests of one client's n share this name and their prompt."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_seconds: float = field(default_factory=time.monotonic)
    prompt_machine: str | None = None
    priority: int = 0
    relegated: bool = False
    cache_salt: str = ""
    siblings: str | None = None


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of the sampled token, and of the most likely ones, from raw logits. `rank` 1 is the most likely."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


def quick(kind: type[T]) -> Callable[[tuple[object, ...]], T]:
    """Makes, from a tuple of all fields, what is this NamedTuple to all who read one. It is of a class of its own: a
    NamedTuple's constructor is a function in Python, and calling it costs as much as the rest of making one."""
    own = {name: value for name, value in vars(kind).items() if name != "__new__"}
    return type(kind.__name__, (tuple,), own)


class TokenOutput(NamedTuple):
    """One step's news for one request, in order. `finish_reason` comes exactly once, with the last token or alone.

    A tuple, since one is made for every running sequence in every step."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # set when a stop id other than eos ended it
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int | None = None  # with the first token: prompt tokens that came from the prefix cache
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first token: of prompt positions 1 and up


output_of = quick(TokenOutput)  # from a tuple of all fields


class SequenceState(StrEnum):
    WAITING = "waiting"  # holds no blocks of the device; new, or preempted
    RUNNING = "running"  # holds blocks; prefilling or decoding
    REMOTE = "remote"  # its prompt is being computed on a prompt machine; holds granted blocks once asked for them
    PARKED = "parked"  # computed for another machine; its blocks wait to be sent
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed` counts tokens whose KV is written or being written by a step in flight (it is advanced when the
    step is scheduled). `num_placeholders` counts output tokens sampled by steps in flight, ids still unknown.
    `is_prefilling`: its prompt, or after a loss its prompt and the tokens already sent, is not all computed.

    `block_ids` is only ever appended to; who loses its blocks gets another list (see `Row`).

    `for_peer`: a prompt computed for another machine. While that one has not granted the memory to send it to, it is
    `ungranted`, and all such prompts together hold no more than a stated share of the blocks.

    The rest is the scheduler's: see there.
    """

    request: Request
    state: SequenceState = SequenceState.WAITING
    output_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_placeholders: int = 0
    is_prefilling: bool = True
    slot: int = -1  # -1: no seat
    for_peer: bool = False
    ungranted: bool = False

    serial: int = 0  # by order of arrival
    relegated: bool = False  # it runs after all that are not, now
    limit: int = 0  # most tokens, prompt and output
    stop_ids: frozenset[int] = frozenset()
    # Its row of each step in which it decodes one token, neither its first nor its last, while it keeps its seat.
    plain_row: "Row | None" = None
    plain_until: int = 0  # with fewer tokens computed, its next row is that one, and needs no memory
    seat_due: bool = False
    num_preemptions: int = 0
    host_block_ids: list[int] = field(default_factory=list)  # swapped out: its KV, instead of block_ids
    block_keys: list[bytes] = field(default_factory=list)  # of its full blocks, as far as asked for; see block_hash
    num_published: int = 0  # blocks of it that others may find
    num_cached: int | None = None  # prompt tokens found in the cache when it was first admitted
    first_token_seconds: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    guesses: NgramIndex | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_known(self) -> int:
        """Prompt and output tokens, without placeholders."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, placeholders included."""
        return self.num_known + self.num_placeholders

    @property
    def max_tokens_total(self) -> int:
        return self.num_prompt + self.request.params.max_tokens

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Known ids of positions [start, stop); a placeholder is not included."""
        prompt = self.request.prompt_ids[start:stop]
        if stop <= self.num_prompt:
            return prompt
        return prompt + tuple(self.output_ids[max(0, start - self.num_prompt) : stop - self.num_prompt])
