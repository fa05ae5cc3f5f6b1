"""Tokens of one request turned into latencies, counts and ledger entries, by the usage that events carry."""

from dataclasses import dataclass
from typing import Any

from poolwright.core.ledger import Entry
from poolwright.core.relegation import Judged
from poolwright.router.metrics import RouterMetrics, Waiting


@dataclass(slots=True)
class _Stream:
    """One choice."""

    tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0


class Meter:
    def __init__(
        self,
        metrics: RouterMetrics,
        waiting: Waiting,
        entry: Entry,
        judged: Judged,
        estimate: int,
        choices: int,
    ) -> None:
        self._metrics = metrics
        self._waiting = waiting
        self._entry = entry
        self._judged = judged
        self._estimate = estimate
        self._choices = choices
        self.prompt_tokens: int | None = None  # as the engine counts them
        self.cached_tokens: int | None = None  # of them, as it says
        self._streams: dict[int, _Stream] = {}

    @property
    def begun(self) -> bool:
        """A token has been seen in this attempt."""
        return bool(self._streams)

    @property
    def answer_tokens(self) -> float | None:
        """Of a choice, on average; None before the first."""
        return sum(s.tokens for s in self._streams.values()) / len(self._streams) if self._streams else None

    def tokens(self, choice: int, usage: dict[str, Any], now: float) -> None:
        """Usage so far of one choice. An event with k tokens counts its gap once and k - 1 zeros."""
        stream = self._streams.get(choice)
        before = stream.tokens if stream else 0
        new = usage.get("completion_tokens", 0) - before
        if new <= 0:
            return
        if stream is None:
            stream = self._streams[choice] = _Stream()
        metrics = self._metrics
        if not self._waiting.answered:
            self._waiting.answered = True
            self._entry.first_token(now)
            self._judged.first_token(now)
            metrics.ttft.observe(now - self._waiting.arrived)
            if self._choices == 1:
                self._correct(usage)
        if before == 0:
            stream.first_at = now
            if new > 1:
                metrics.tbt.observe(0.0, new - 1)
                metrics.second_token.observe(0.0)
        else:
            gap = now - stream.last_at
            metrics.tbt.observe(gap)
            if new > 1:
                metrics.tbt.observe(0.0, new - 1)
            if before == 1:
                metrics.second_token.observe(gap)
        stream.tokens = before + new
        stream.last_at = now
        metrics.output_tokens += new

    def whole(self, usage: dict[str, Any]) -> None:
        """Of an answer that came all at once: its counts are known, when its tokens came is not."""
        self._waiting.answered = True
        self._metrics.output_tokens += usage.get("completion_tokens", 0)
        self._correct(usage)

    def total(self, usage: dict[str, Any]) -> None:
        """The last event: usage of all choices together."""
        self._correct(usage)
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if isinstance(cached, int):
            self.cached_tokens = cached

    def finish(self) -> None:
        """The request ended well."""
        for stream in self._streams.values():
            if stream.tokens > 1:
                self._metrics.tpot.observe((stream.last_at - stream.first_at) / (stream.tokens - 1))

    def _correct(self, usage: dict[str, Any]) -> None:
        prompt_tokens = usage.get("prompt_tokens")
        if self.prompt_tokens is None and isinstance(prompt_tokens, int):
            self.prompt_tokens = prompt_tokens
            self._metrics.prompt_tokens.corrected(self._estimate, prompt_tokens)
