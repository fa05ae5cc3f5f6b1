"""Requests as a trace gives them, and as a policy may see them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """`arrival_seconds` from the start of the trace. `prefix`: one key for each full block of `prefix_block_tokens`
    prompt tokens, equal where the text up to there is equal; empty where the trace does not say."""

    number: int
    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    prefix_block_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a policy may know of a request: not its output length, only what was expected of it at its arrival."""

    number: int
    arrival_seconds: float
    prompt_tokens: int
    expected_output_tokens: float
    prefix: tuple[int, ...] = ()
    prefix_block_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `source` names origin and licence; `horizon_seconds` ends the arrivals."""

    name: str
    requests: Sequence[Request]
    horizon_seconds: float
    source: str = ""

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)
