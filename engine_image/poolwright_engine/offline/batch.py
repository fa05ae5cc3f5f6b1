"""`poolwright-engine batch`: a file of requests in OpenAI's batch format, answered into another.

Owns the two files: each answer is one whole line, written at once, and what has one is not asked again. Requests go
through the very API that `serve` offers, without a port; whole prompts, throughput first.
"""

import asyncio
import fcntl
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from poolwright_engine.api.server import Served, Service, create_app
from poolwright_engine.offline.throughput import Throughput
from poolwright_engine.process import assembly
from poolwright_engine.process.config import ConfigError, EngineConfig
from poolwright_engine.process.last_words import EXIT_ENGINE_DIED, EXIT_SOME_FAILED, fail, told_when_cut_off
from poolwright_engine.process.progress import request_bar, say

URLS = ("/v1/completions", "/v1/chat/completions")
_SYNC_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Line:
    """One request. `refused`: why it is none; it then has no body."""

    number: int
    custom_id: str | None
    url: str = ""
    body: dict[str, Any] | None = None
    refused: str | None = None

    @property
    def key(self) -> str | int:
        """What an answer is known by: the client's name for it, or the line that has none."""
        return self.number if self.custom_id is None else self.custom_id


def run(config: EngineConfig, requests: Path, answers: Path, cost_per_hour: float | None = None) -> int:
    """The exit code. Raises ConfigError."""
    if cost_per_hour is not None and cost_per_hour <= 0:
        raise ConfigError(f"--cost-per-hour: expected a positive number, not {cost_per_hour:g}")
    try:
        total = sum(1 for _ in read_requests(requests))
        with _Answers(answers) as written, told_when_cut_off(lambda: _say_what_is_left(written, total)):
            return asyncio.run(_answer_all(config, requests, total, written, cost_per_hour))
    except OSError as error:
        raise ConfigError(f"{error.filename or answers}: {error.strerror or error}") from error


def _say_what_is_left(written: "_Answers", total: int) -> None:
    # Counted in the file: a signal may have come between a line and the count of it.
    say(f"Cut off: {written.lines_in_file()} of {total} requests are answered; the same command goes on from there")


def read_requests(file: Path) -> Iterator[Line]:
    """Raises OSError."""
    seen: set[str] = set()
    with file.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            if text.strip():
                line = _parsed(number, text)
                if line.custom_id is not None and line.custom_id in seen:
                    line = Line(number, None, refused=f"custom_id {line.custom_id!r} stands on an earlier line too")
                seen.add(line.custom_id or "")
                yield line


def _parsed(number: int, text: bytes) -> Line:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Line(number, None, refused=f"not JSON: {error}")
    if not isinstance(fields, dict):
        return Line(number, None, refused="not an object")
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return Line(number, None, refused="custom_id must be a text that is not empty")
    if fields.get("method") != "POST":
        return Line(number, custom_id, refused=f"method must be POST, not {fields.get('method')!r}")
    if url not in URLS:
        return Line(number, custom_id, refused=f"url must be one of {', '.join(URLS)}, not {url!r}")
    if not isinstance(body, dict):
        return Line(number, custom_id, refused="body must be an object")
    if body.get("stream"):
        return Line(number, custom_id, refused="an answer in a file cannot be streamed")
    return Line(number, custom_id, url, body)


class _Answers:
    """The output file, held by one process at a time. A line that a killed run left unfinished is cut off: its request
    is asked again. Raises ConfigError, OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._synced = time.monotonic()
        self.answered: set[str | int] = set()
        self.failed = 0
        self.count = 0  # of whole lines in the file

    def __enter__(self) -> "_Answers":
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"{self._path} is being written by another process") from error
            self._take_up()
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.fsync(self._file)
        os.close(self._file)

    def append(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        while data:  # one call, unless a signal or a full disk cuts it
            data = data[os.write(self._file, data) :]
        self.count += 1
        if time.monotonic() - self._synced >= _SYNC_SECONDS:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def lines_in_file(self) -> int:
        with self._path.open("rb") as lines:
            return sum(text.endswith(b"\n") for text in lines)

    def _take_up(self) -> None:
        end = 0
        with self._path.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                try:
                    answer = json.loads(text)
                    custom_id, error, _ = answer["custom_id"], answer["error"], answer["response"]
                    key = custom_id if custom_id is not None else error["line"]
                except (ValueError, KeyError, TypeError) as wrong:
                    if not text.endswith(b"\n"):
                        break
                    raise ConfigError(f"{self._path}:{number} is no answer of a batch; it is left alone") from wrong
                if not text.endswith(b"\n"):
                    break
                end += len(text)
                self.answered.add(key)
                self.count += 1
                self.failed += _failed(answer)
        os.ftruncate(self._file, end)


async def _answer_all(
    config: EngineConfig, requests: Path, total: int, written: _Answers, cost_per_hour: float | None
) -> int:
    before = len(written.answered)
    if before:
        print(f"{before} of {total} requests are answered already")
    if before == total:
        return EXIT_SOME_FAILED if written.failed else 0
    say(f"Loading {config.model} to answer {total - before} requests")
    async with assembly.running(config) as running:
        say("Loaded; answering")
        parts = running.parts
        aliases = config.served_model_names[1:]
        service = Service(config.served_model_name, config.model, config.pod_uid, running.metrics, aliases=aliases)
        service.served = Served(
            running.engine,
            parts.tokenizer,
            parts.vocab_size,
            parts.max_chars_per_token,
            parts.guides,
            parts.sampling_defaults,
        )
        counted, began = Throughput(), time.monotonic()
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:  # noqa: S113
            with request_bar(total - before, told=True) as bar:
                todo = (line for line in read_requests(requests) if line.key not in written.answered)
                async for answer in _in_flight(client, todo, running.at_once):
                    if not running.engine.healthy:
                        return fail("the engine's loop died; its error is in the log", EXIT_ENGINE_DIED)
                    written.append(answer)
                    usage = _usage(answer)
                    counted.add(usage.get("prompt_tokens", 0), usage.get("completion_tokens") or 0, _failed(answer))
                    bar.advance(1, counted.rates(time.monotonic() - began))
        print("\n".join(counted.report(time.monotonic() - began, cost_per_hour)))
    return EXIT_SOME_FAILED if written.failed or counted.failed else 0


async def _in_flight(client: httpx.AsyncClient, lines: Iterator[Line], at_once: int) -> AsyncIterator[dict[str, Any]]:
    """Answers as they come, with no more than `at_once` requests open: a file may be longer than the memory."""
    open_tasks: set[asyncio.Task[dict[str, Any]]] = set()
    try:
        more = True
        while more or open_tasks:
            while more and len(open_tasks) < at_once:
                line = next(lines, None)
                if line is None:
                    more = False
                else:
                    open_tasks.add(asyncio.create_task(_answer(client, line)))
            if open_tasks:
                done, open_tasks = await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
    finally:
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)


async def _answer(client: httpx.AsyncClient, line: Line) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": line.custom_id}
    if line.refused is not None:
        error = {"code": "invalid_request", "message": f"line {line.number}: {line.refused}", "line": line.number}
        return {**answer, "response": None, "error": error}
    reply = await client.post(line.url, json=line.body)
    response = {
        "status_code": reply.status_code,
        "request_id": reply.headers.get("x-request-id", ""),
        "body": reply.json(),
    }
    return {**answer, "response": response, "error": None}


def _failed(answer: dict[str, Any]) -> bool:
    response = answer.get("response")
    return not isinstance(response, dict) or response.get("status_code") != 200


def _usage(answer: dict[str, Any]) -> dict[str, Any]:
    response = answer["response"] or {}
    usage = (response.get("body") or {}).get("usage")
    return usage if isinstance(usage, dict) else {}
