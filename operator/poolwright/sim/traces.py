"""Traces: recorded ones, what is made of them, and generated ones. Every function is pure; chance comes from `seed`.

A rate is raised by repeating arrivals a few seconds away, never by compressing time, which would shrink bursts below
the period of a controller. Sets grow with the rate: all requests of a smaller factor are in a larger one of the same
seed, so that a bisection over rates is one over supersets. Knows no machines and no policies.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from poolwright.sim import data_files
from poolwright.sim.request import Request, Trace

SLICE_SECONDS = 600.0
JITTER_SECONDS = 30.0
MOONCAKE_BLOCK_TOKENS = 512
_COPY_KEYS = 1 << 40  # a copy's prefixes are its own: as many hits as in the original, no more

_NORMAL_P90 = 1.2815515655446004


class Copies(StrEnum):
    """What a repeated arrival asks for: JITTERED the same lengths again; SHUFFLED those of another request, which
    keeps the bursts of arrivals but not that of long prompts."""

    JITTERED = "jittered"
    SHUFFLED = "shuffled"


def azure_code(at: Path | None = None) -> Trace:
    """One hour of a code completion service (AzureLLMInferenceTrace_code, 2023; CC-BY-4.0)."""
    return _recorded("azure-code", "azure_code.csv", "Azure/AzurePublicDataset, CC-BY-4.0", "arrival_us", 1e-6, at)


def azure_conversation(at: Path | None = None) -> Trace:
    """One hour of a conversation service (AzureLLMInferenceTrace_conv, 2023; CC-BY-4.0)."""
    source = "Azure/AzurePublicDataset, CC-BY-4.0"
    return _recorded("azure-conversation", "azure_conversation.csv", source, "arrival_us", 1e-6, at)


def mooncake_conversation(at: Path | None = None) -> Trace:
    """One hour of conversations with the prefixes that they share (Mooncake, FAST 2025; Apache-2.0)."""
    source = "kvcache-ai/Mooncake FAST25-release, Apache-2.0"
    return _recorded("mooncake-conversation", "mooncake_conversation.csv", source, "arrival_ms", 1e-3, at)


RECORDED: dict[str, Callable[[Path | None], Trace]] = {
    "azure-code": azure_code,
    "azure-conversation": azure_conversation,
    "mooncake-conversation": mooncake_conversation,
}


def recorded(name: str, at: Path | None = None) -> Trace:
    """Raises KeyError for a name that RECORDED does not have."""
    return RECORDED[name](at)


def _recorded(name: str, file: str, source: str, clock: str, unit_seconds: float, at: Path | None) -> Trace:
    requests = [
        Request(
            number=number,
            arrival_seconds=int(row[clock]) * unit_seconds,
            prompt_tokens=int(row["prompt_tokens"]),
            output_tokens=int(row["output_tokens"]),
            prefix=_full_blocks(row.get("blocks_of_512", ""), int(row["prompt_tokens"])),
            prefix_block_tokens=MOONCAKE_BLOCK_TOKENS,
        )
        for number, row in enumerate(data_files.rows(file, at))
    ]
    # The last arrival is inside.
    return made(name, requests, math.floor(max(r.arrival_seconds for r in requests)) + 1.0, source)


def _full_blocks(ranges: str, prompt_tokens: int) -> tuple[int, ...]:
    """Mooncake gives the last block a key even where it is not full."""
    keys: list[int] = []
    for part in ranges.split():
        first, _, last = part.partition("-")
        keys.extend(range(int(first), int(last or first) + 1))
    return tuple(keys[: prompt_tokens // MOONCAKE_BLOCK_TOKENS])


def made(name: str, requests: Iterable[Request], horizon_seconds: float, source: str = "") -> Trace:
    """Requests in order of arrival, numbered anew."""
    ordered = sorted(requests, key=lambda r: r.arrival_seconds)
    return Trace(name, tuple(_placed(r, r.arrival_seconds, n) for n, r in enumerate(ordered)), horizon_seconds, source)


def _placed(
    request: Request, arrival_seconds: float, number: int = 0, prefix: tuple[int, ...] | None = None
) -> Request:
    """`dataclasses.replace`, five times as quick."""
    keys = request.prefix if prefix is None else prefix
    lengths = request.prompt_tokens, request.output_tokens
    return Request(number, arrival_seconds, *lengths, keys, request.prefix_block_tokens)


def between(trace: Trace, start_seconds: float, stop_seconds: float, name: str | None = None) -> Trace:
    """The arrivals in [start, stop), from 0."""
    times = [r.arrival_seconds for r in trace.requests]
    first, last = bisect_left(times, start_seconds), bisect_left(times, stop_seconds)
    cut = (_placed(r, r.arrival_seconds - start_seconds) for r in trace.requests[first:last])
    label = name or f"{trace.name}[{start_seconds:g}:{stop_seconds:g}]"
    return made(label, cut, stop_seconds - start_seconds, trace.source)


def slices(trace: Trace, seconds: float = SLICE_SECONDS) -> list[Trace]:
    """Whole ones only, one after the other."""
    count = int(trace.horizon_seconds / seconds)
    return [between(trace, i * seconds, (i + 1) * seconds) for i in range(count)]


def scaled(
    trace: Trace,
    factor: float,
    seed: int,
    *,
    copies: Copies = Copies.JITTERED,
    jitter_seconds: float = JITTER_SECONDS,
) -> Trace:
    """Every arrival `factor` times: as it is, and repeated up to `jitter_seconds` earlier or later; a fraction of
    them for the rest of `factor`, and for less than one. Raises ValueError."""
    if not (0 <= factor < math.inf):
        raise ValueError(f"a rate cannot be scaled by {factor}")
    result: list[Request] = []
    for copy in range(math.ceil(factor)):
        share = factor - copy
        chance = random.Random(f"{seed}:{copy}")
        lent = list(trace.requests)
        if copy and copies is Copies.SHUFFLED:
            chance.shuffle(lent)
        for request, other in zip(trace.requests, lent, strict=True):
            kept, moved = chance.random() < share, chance.uniform(-jitter_seconds, jitter_seconds)
            if not kept:
                continue
            if copy == 0:
                result.append(request)
                continue
            arrival = _reflected(request.arrival_seconds + moved, trace.horizon_seconds)
            result.append(_copied(other, arrival, copy))
    return made(f"{trace.name} ×{factor:g} {copies}", result, trace.horizon_seconds, trace.source)


def _copied(request: Request, arrival_seconds: float, copy: int) -> Request:
    prefix = tuple(key + copy * _COPY_KEYS for key in request.prefix)
    return _placed(request, arrival_seconds, prefix=prefix)


def _reflected(at: float, horizon: float) -> float:
    """Into [0, horizon), so that the ends are neither thinner nor denser."""
    at = abs(at) % (2 * horizon)
    return min(at if at < horizon else 2 * horizon - at, math.nextafter(horizon, 0.0))


def shuffled(trace: Trace, seed: int) -> Trace:
    """The same arrival times and the same lengths, each request at another's time."""
    lent = list(trace.requests)
    random.Random(seed).shuffle(lent)
    pairs = zip(trace.requests, lent, strict=True)
    moved = (_placed(other, own.arrival_seconds) for own, other in pairs)
    return made(f"{trace.name} shuffled", moved, trace.horizon_seconds, trace.source)


def alternated(first: Trace, second: Trace, period_seconds: float = SLICE_SECONDS) -> Trace:
    """`first` in even periods and `second` in odd ones, as long as both last."""
    horizon = min(first.horizon_seconds, second.horizon_seconds)

    def taken(trace: Trace, parity: int) -> Iterator[Request]:
        for request in trace.requests:
            at = request.arrival_seconds
            if at < horizon and int(at / period_seconds) % 2 == parity:
                # Keys of two traces may be equal by chance.
                yield _placed(request, at, prefix=tuple(2 * key + parity for key in request.prefix))

    source = first.source if first.source == second.source else f"{first.source}; {second.source}"
    name = f"{first.name} ↔ {second.name} every {period_seconds:g} s"
    return made(name, [*taken(first, 0), *taken(second, 1)], horizon, source)


def with_burst(
    trace: Trace,
    at_seconds: float,
    seed: int,
    *,
    factor: float = 5.0,
    rise_seconds: float = 2.0,
    hold_seconds: float = 30.0,
) -> Trace:
    """The rate grows `factor`-fold within `rise_seconds`, stays for `hold_seconds`, and falls at once. BlitzScale
    (OSDI 2025) reports five-fold growth within 2 s."""
    end = at_seconds + rise_seconds + hold_seconds
    extra: list[Request] = []
    for copy in range(1, math.ceil(factor)):
        chance = random.Random(f"{seed}:{copy}")
        for request in trace.requests:
            draw, moved = chance.random(), chance.uniform(-rise_seconds, rise_seconds)
            arrival = request.arrival_seconds + moved
            if not (at_seconds <= arrival < min(end, trace.horizon_seconds)):
                continue
            risen = min(1.0, (arrival - at_seconds) / rise_seconds) if rise_seconds else 1.0
            if draw < 1.0 + (factor - 1.0) * risen - copy:
                extra.append(_copied(request, arrival, copy))
    name = f"{trace.name} burst ×{factor:g} at {at_seconds:g} s"
    return made(name, [*trace.requests, *extra], trace.horizon_seconds, trace.source)


def with_flood(trace: Trace, at_seconds: float, seconds: float, requests_per_second: float, seed: int) -> Trace:
    """Poisson arrivals on top, with lengths of requests of the trace."""
    chance = random.Random(seed)
    extra: list[Request] = []
    arrival, stop = at_seconds, min(at_seconds + seconds, trace.horizon_seconds)
    while (arrival := arrival + chance.expovariate(requests_per_second)) < stop:
        extra.append(_copied(chance.choice(trace.requests), arrival, 1))
    name = f"{trace.name} flood {requests_per_second:g}/s at {at_seconds:g} s"
    return made(name, [*trace.requests, *extra], trace.horizon_seconds, trace.source)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal prompts and outputs by two percentiles each; a request of more than `most_tokens` is drawn again."""

    name: str
    prompt_p50: float
    prompt_p90: float
    output_p50: float
    output_p90: float
    most_tokens: int
    source: str

    def draw(self, chance: random.Random) -> tuple[int, int]:
        while True:
            prompt = _log_normal(chance, self.prompt_p50, self.prompt_p90)
            output = _log_normal(chance, self.output_p50, self.output_p90)
            if prompt + output <= self.most_tokens:
                return prompt, output


def _log_normal(chance: random.Random, p50: float, p90: float) -> int:
    sigma = math.log(p90 / p50) / _NORMAL_P90
    return max(1, round(chance.lognormvariate(math.log(p50), sigma)))


# Percentiles and cuts of Sarathi-Serve (OSDI 2024), table 2: the data sets that its tables are measured on.
OPENCHAT = Lengths("openchat-sharegpt4", 1730, 5696, 415, 834, 8192, "Sarathi-Serve, OSDI 2024, table 2")
ARXIV = Lengths("arxiv-summarization", 7059, 12985, 208, 371, 16384, "Sarathi-Serve, OSDI 2024, table 2")


def arxiv_lengths(at: Path | None = None) -> list[tuple[int, int]]:
    """(prompt, output) tokens of arXiv summarization, at most 4,096 (Vidur; MIT)."""
    return [(int(r["prompt_tokens"]), int(r["output_tokens"])) for r in data_files.rows("arxiv_lengths.csv", at)]


def generated(
    lengths: Lengths | Sequence[tuple[int, int]],
    requests_per_second: float,
    horizon_seconds: float,
    seed: int,
    name: str = "generated",
) -> Trace:
    """Poisson arrivals. A sequence of lengths is drawn from with replacement."""
    # Times and lengths have each their own chance: the same requests at every rate.
    clock, chance = random.Random(f"{seed}:arrivals"), random.Random(f"{seed}:lengths")
    requests: list[Request] = []
    arrival = 0.0
    while (arrival := arrival + clock.expovariate(1.0) / requests_per_second) < horizon_seconds:
        prompt, output = lengths.draw(chance) if isinstance(lengths, Lengths) else chance.choice(lengths)
        requests.append(Request(len(requests), arrival, prompt, output))
    label = lengths.name if isinstance(lengths, Lengths) else name
    source = lengths.source if isinstance(lengths, Lengths) else ""
    return made(f"{label} {requests_per_second:g}/s", requests, horizon_seconds, source)


@dataclass(frozen=True, slots=True)
class Means:
    """What the fluid bound and forecasts need of a trace. `decode_context_tokens`: the sum of the context over a
    request's decode steps, n + 1 … n + o - 1 for n prompt and o output tokens."""

    requests_per_second: float
    prompt_tokens: float
    output_tokens: float
    decode_steps: float
    decode_context_tokens: float


def means(trace: Trace) -> Means:
    """Raises ValueError for a trace without requests."""
    count = len(trace)
    if not count:
        raise ValueError(f"{trace.name} has no requests")
    return Means(
        count / trace.horizon_seconds,
        sum(r.prompt_tokens for r in trace) / count,
        sum(r.output_tokens for r in trace) / count,
        sum(r.output_tokens - 1 for r in trace) / count,
        sum(decode_context_tokens(r.prompt_tokens, r.output_tokens) for r in trace) / count,
    )


def decode_context_tokens(prompt_tokens: int, output_tokens: int) -> float:
    steps = output_tokens - 1
    return steps * prompt_tokens + steps * (steps + 1) / 2
