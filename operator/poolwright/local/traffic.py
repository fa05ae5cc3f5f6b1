"""Real clients for the demo: open-loop or closed-loop streams against one endpoint, measured where the client stands.

Owns requests and their timings; knows no pools, no targets and no verdict.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import aiohttp

_WORDS = (
    "river",
    "stone",
    "winter",
    "garden",
    "letter",
    "mountain",
    "window",
    "paper",
    "silver",
    "morning",
    "history",
    "music",
    "engine",
    "harbor",
    "forest",
    "market",
    "island",
    "teacher",
    "number",
    "captain",
    "yellow",
    "summer",
    "bridge",
    "village",
    "doctor",
    "ocean",
    "candle",
    "journey",
    "animal",
    "planet",
)

# Requests under way at once until the target is missed: the first is over three times what three machines batch.
SATURATING_STREAMS = (12, 18, 27, 40)
SATURATION_SECONDS = 24.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What one kind of request looks like. A word of the list is one or two tokens to most tokenizers."""

    prompt_words: int
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """What came of one request so far. Times are seconds of the loop's clock; gaps lie between consecutive tokens."""

    started_at: float
    ttft_seconds: float | None = None
    gaps_seconds: list[float] = field(default_factory=list)
    gap_ends: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


class Client:
    """Streams completions and keeps every outcome. Use inside one event loop; `close` ends the session."""

    def __init__(self, base_url: str, model: str, seed: int = 0, timeout_seconds: float = 120.0) -> None:
        self._url = f"{base_url}/v1/completions"
        self._model = model
        self._random = random.Random(seed)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_seconds), connector=aiohttp.TCPConnector(limit=0)
        )
        self.begun: list[Outcome] = []  # in order of arrival; those under way have no error yet, and no TTFT perhaps
        self.outcomes: list[Outcome] = []  # in the order in which they ended

    @property
    def sent(self) -> int:
        return len(self.begun)

    @property
    def in_flight(self) -> int:
        return self.sent - len(self.outcomes)

    async def close(self) -> None:
        await self._session.close()

    async def one(self, shape: Shape) -> Outcome:
        """Send one request and read its stream to the end. A failure is in the outcome, never raised."""
        clock = asyncio.get_running_loop().time
        body = {
            "model": self._model,
            "prompt": " ".join(self._random.choice(_WORDS) for _ in range(shape.prompt_words)),
            "max_tokens": shape.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        outcome = Outcome(started_at=clock())
        self.begun.append(outcome)
        last = outcome.started_at
        try:
            async with self._session.post(self._url, json=body) as answer:
                if answer.status != 200:
                    raise ValueError(f"{answer.status}: {(await answer.text())[:200]}")
                finished = False
                async for line in answer.content:
                    if not line.startswith(b"data: "):
                        continue
                    data = line[6:].strip()
                    if data == b"[DONE]":
                        finished = True
                        break
                    event = json.loads(data)
                    if "error" in event:
                        raise ValueError(str(event["error"].get("message", event["error"])))
                    if not event.get("choices"):
                        continue
                    now = clock()
                    if outcome.ttft_seconds is None:
                        outcome.ttft_seconds = now - outcome.started_at
                    else:
                        outcome.gaps_seconds.append(now - last)
                        outcome.gap_ends.append(now)
                    outcome.tokens += 1
                    last = now
                if not finished or outcome.tokens != shape.output_tokens:
                    raise ValueError(f"truncated: {outcome.tokens} of {shape.output_tokens} tokens")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            outcome.error = str(error) or type(error).__name__
        self.outcomes.append(outcome)
        return outcome

    async def open_loop(self, shape: Shape, per_second: Callable[[], float], stop: Callable[[], bool]) -> None:
        """Arrivals at this rate, asked for anew at each, whatever the answers do, until `stop`; then waits for what is
        under way."""
        clock = asyncio.get_running_loop().time
        due = clock()
        async with asyncio.TaskGroup() as group:
            while not stop():
                group.create_task(self.one(shape))
                due += 1.0 / per_second()
                await asyncio.sleep(max(0.0, due - clock()))

    async def closed_loop(self, shape: Shape, streams: int, stop: Callable[[], bool]) -> None:
        """So many streams at once, each starting its next request as the last one ends, until `stop`. Lengths vary by
        half around the shape's, or all streams would end, and ask for their next prompts, together."""

        async def stream() -> None:
            while not stop():
                tokens = max(1, round(shape.output_tokens * self._random.uniform(0.5, 1.5)))
                if (await self.one(replace(shape, output_tokens=tokens))).error is not None:
                    await asyncio.sleep(0.5)

        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(stream())
                await asyncio.sleep(0.2)


async def served_while_missed(client: Client, shape: Shape, target_seconds: float) -> float:
    """First tokens a second while so much waits that half of the requests or more miss this TTFT.

    What machines serve grows with what waits, since they batch it: any fewer requests under way would say too little.
    """
    clock = asyncio.get_running_loop().time
    for streams in SATURATING_STREAMS:
        began, seen = clock(), len(client.outcomes)
        end, filled = began + SATURATION_SECONDS, began + SATURATION_SECONDS / 4

        def over(end: float = end) -> bool:
            return clock() >= end

        await client.closed_loop(shape, streams, over)
        served = [o for o in client.outcomes[seen:] if filled <= first_token_at(o) < end]
        if (percentile(ttfts(served), 50) or 0.0) > target_seconds:
            return len(served) / (end - filled)
    raise TimeoutError(f"{SATURATING_STREAMS[-1]} requests at once are served within {target_seconds * 1000:.0f} ms")


def first_token_at(outcome: Outcome) -> float:
    """Never, for a request that failed before."""
    return float("inf") if outcome.ttft_seconds is None else outcome.started_at + outcome.ttft_seconds


def ttfts(outcomes: Iterable[Outcome]) -> list[float]:
    return [o.ttft_seconds for o in outcomes if o.ttft_seconds is not None]


def percentile(values: list[float], percent: float) -> float | None:
    """Nearest rank of the plain values; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * percent) // 100) - 1))]
