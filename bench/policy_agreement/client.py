"""The client: requests at their times, open loop, and when each token of an answer came. Knows no simulator."""

import asyncio
import gc
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp

_FIRST_ID, _LAST_ID = 100, 40_000  # of random prompts
_LIMIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Wanted:
    at_seconds: float  # from the start
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from the start: when the request was sent, and when its client had each token."""

    sent_seconds: float
    prompt_tokens: int
    token_seconds: tuple[float, ...]

    @property
    def ttft_seconds(self) -> float:
        return self.token_seconds[0] - self.sent_seconds

    @property
    def gap_seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.token_seconds, self.token_seconds[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal, cut off at `most`. `spread`: the logarithm's standard deviation."""

    median: int
    spread: float
    least: int
    most: int

    def draw(self, chance: random.Random) -> int:
        drawn = self.median * math.exp(chance.gauss(0.0, self.spread))
        return max(self.least, min(self.most, round(drawn)))


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals over `seconds`."""

    seconds: float
    requests_per_second: float
    prompts: Lengths
    outputs: Lengths
    seed: int = 1

    def drawn(self) -> list[Wanted]:
        chance = random.Random(self.seed)
        wanted: list[Wanted] = []
        at = chance.expovariate(self.requests_per_second)
        while at < self.seconds:
            wanted.append(Wanted(at, self.prompts.draw(chance), self.outputs.draw(chance)))
            at += chance.expovariate(self.requests_per_second)
        return wanted


async def send(url: str, model: str, wanted: Sequence[Wanted], seed: int = 0) -> list[Answer]:
    """In the order of `wanted`. Raises RuntimeError where an answer is not what was asked for."""
    chance = random.Random(seed)
    bodies = [_body(model, each, chance) for each in wanted]
    async with _session() as session:
        with _undisturbed():
            began = time.monotonic()
            tasks = [
                asyncio.create_task(_at(session, url, body, each, began))
                for body, each in zip(bodies, wanted, strict=True)
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def send_one_by_one(url: str, model: str, wanted: Sequence[Wanted], pause_seconds: float) -> list[Answer]:
    """Each alone, `pause_seconds` after the end of the one before."""
    chance = random.Random(0)
    answers = []
    async with _session() as session:
        for each in wanted:
            body = _body(model, each, chance)
            began = time.monotonic()
            answers.append(await _one(session, url, body, each, began))
            await asyncio.sleep(pause_seconds)
    return answers


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=_LIMIT_SECONDS)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


def _body(model: str, wanted: Wanted, chance: random.Random) -> bytes:
    ids = [chance.randint(_FIRST_ID, _LAST_ID) for _ in range(wanted.prompt_tokens)]
    fields = {
        "model": model,
        "prompt": ids,
        "max_tokens": wanted.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


async def _at(session: aiohttp.ClientSession, url: str, body: bytes, wanted: Wanted, began: float) -> Answer:
    await asyncio.sleep(began + wanted.at_seconds - time.monotonic())
    return await _one(session, url, body, wanted, began)


async def _one(session: aiohttp.ClientSession, url: str, body: bytes, wanted: Wanted, began: float) -> Answer:
    times: list[float] = []
    rest = b""
    sent = time.monotonic()
    headers = {"content-type": "application/json"}
    try:
        async with session.post(f"{url}/v1/completions", data=body, headers=headers) as response:
            async for data in response.content.iter_any():
                now = time.monotonic() - began
                *events, rest = (rest + data).split(b"\n\n")
                times += [now for event in events if event.startswith(b"data: {")]  # not comments, not [DONE]
            status = response.status
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RuntimeError(f"a request broke: {error!r}") from error
    if status != 200 or len(times) != wanted.output_tokens:
        raise RuntimeError(f"HTTP {status} with {len(times)} events for {wanted.output_tokens} tokens: {rest[:300]!r}")
    return Answer(sent - began, wanted.prompt_tokens, tuple(times))


@contextmanager
def _undisturbed() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
