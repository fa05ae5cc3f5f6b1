"""A request and its tokens. No torch.

`Request` is what a client asked for and never changes; `Sequence` is where the engine is with it.
"""

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy. `seed` is always set before a request enters the engine; noise is a function of
    (seed, absolute position of the token sampled), so a draw is the same wherever and whenever it is made."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives; None: no log probabilities


@dataclass(frozen=True, slots=True)
class Request:
    """`prompt_machine` is the raw signed header, checked by the hand-off; None: prefill here."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_seconds: float = field(default_factory=time.monotonic)
    prompt_machine: str | None = None


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of the sampled token, and of the most likely ones, from raw logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One step's news for one request, in order. `finish_reason` comes exactly once, with the last token or alone."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # set when a stop id other than eos ended it
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


class SequenceState(StrEnum):
    WAITING = "waiting"  # holds no memory
    RUNNING = "running"  # holds blocks; prefilling or decoding
    REMOTE = "remote"  # its prompt is being computed on a prompt machine; holds granted blocks once asked for them
    PARKED = "parked"  # computed for another machine; its blocks wait to be sent
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed` counts tokens whose KV is written or being written by a step in flight (it is advanced when the
    step is scheduled). `num_placeholders` counts output tokens sampled by steps in flight, ids still unknown.

    `for_peer`: a prompt computed for another machine. While that one has not granted the memory to send it to, it is
    `ungranted`, and all such prompts together hold no more than a stated share of the blocks.
    """

    request: Request
    state: SequenceState = SequenceState.WAITING
    output_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_placeholders: int = 0
    last_step: int = -1  # number of the last step that may write its blocks: the fence of a free
    slot: int = -1  # -1: no seat
    for_peer: bool = False
    ungranted: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, placeholders included."""
        return self.num_prompt + len(self.output_ids) + self.num_placeholders

    @property
    def max_tokens_total(self) -> int:
        return self.num_prompt + self.request.params.max_tokens

    @property
    def is_prefilling(self) -> bool:
        """Its prompt, or after a lost hand-off its prompt and the tokens already sent, is not all computed."""
        return self.num_computed < max(self.num_prompt, self.num_tokens - 1)

    def token_ids(self, start: int, stop: int) -> Tokens[int]:
        """Known ids of positions [start, stop); a placeholder is not included."""
        prompt = self.request.prompt_ids[start:stop]
        if stop <= self.num_prompt:
            return prompt
        return prompt + tuple(self.output_ids[max(0, start - self.num_prompt) : stop - self.num_prompt])
