"""What this router has sent and not yet seen the end of, per machine; each machine's speed and breaker.

Reports of engines are seconds old when they arrive, so the router counts its own work from the moment of choosing.
Knows no HTTP; time is an argument (monotonic seconds).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from poolwright.core.routing import STREAM_TOKENS, Choice, Load

_HALF_LIFE_SECONDS = 30.0
# A machine starts at the pool's mean speed, which weighs as much as this many measured tokens.
_PRIOR_TOKENS = 256.0
_FIRST_AVOID_SECONDS = 0.5
_LONGEST_AVOID_SECONDS = 15.0
_TRIAL_SECONDS = 1.0


@dataclass(slots=True)
class _Account:
    prompt_tokens: int = 0
    streams: int = 0
    failures: int = 0  # in a row
    avoid_until: float = -math.inf
    # Decayed sums, as of `decayed_at`.
    measured_milliseconds: float = 0.0
    measured_tokens: float = 0.0
    recent_tokens: float = 0.0
    decayed_at: float = 0.0

    def decay(self, now: float) -> None:
        left = math.exp2(-max(0.0, now - self.decayed_at) / _HALF_LIFE_SECONDS)
        self.measured_milliseconds *= left
        self.measured_tokens *= left
        self.recent_tokens *= left
        self.decayed_at = now


class Entry:
    """One attempt of one request. Close it once, whatever happened; before that `first_token` at most once."""

    __slots__ = ("_closed", "_prompt", "_prompt_tokens", "_queue_tokens", "_sent_at", "_token", "_waiting")

    def __init__(self, token: _Account, prompt: _Account, prompt_tokens: int, now: float) -> None:
        self._token = token
        self._prompt = prompt
        self._prompt_tokens = prompt_tokens
        self._sent_at = now
        self._queue_tokens = prompt.prompt_tokens + prompt.streams * STREAM_TOKENS + prompt_tokens
        self._waiting = True
        self._closed = False
        token.streams += 1
        prompt.prompt_tokens += prompt_tokens
        for account in {id(a): a for a in (token, prompt)}.values():
            account.decay(now)
            account.recent_tokens += prompt_tokens + STREAM_TOKENS
            if account.failures:  # one request at a time tries a machine that failed last
                account.avoid_until = max(account.avoid_until, now + _TRIAL_SECONDS)

    def first_token(self, now: float) -> None:
        if not self._waiting:
            return
        self._settle()
        self._prompt.decay(now)
        self._prompt.measured_milliseconds += (now - self._sent_at) * 1000
        self._prompt.measured_tokens += self._queue_tokens

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._settle()
        self._token.streams -= 1

    def _settle(self) -> None:
        if self._waiting:
            self._waiting = False
            self._prompt.prompt_tokens -= self._prompt_tokens


class Ledger:
    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def begin(self, choice: Choice, prompt_tokens: int, now: float) -> Entry:
        token = self._account(choice.token.uid)
        prompt = self._account(choice.prompt.uid) if choice.prompt else token
        return Entry(token, prompt, prompt_tokens, now)

    def failed(self, uid: str, now: float) -> None:
        """No connection, a connection lost, or another machine at its address. Busy is not failed."""
        account = self._account(uid)
        account.failures += 1
        pause = min(_LONGEST_AVOID_SECONDS, _FIRST_AVOID_SECONDS * 2 ** min(account.failures - 1, 10))
        account.avoid_until = max(account.avoid_until, now + pause)

    def answered(self, uid: str) -> None:
        """It serves, whatever it answered."""
        account = self._accounts.get(uid)
        if account and account.failures:
            account.failures = 0
            account.avoid_until = -math.inf

    def keep(self, uids: Iterable[str]) -> None:
        """These are the machines now. Entries still open on one that is gone close into the void."""
        self._accounts = {uid: self._account(uid) for uid in uids}

    def loads(self, now: float) -> dict[str, Load]:
        for account in self._accounts.values():
            account.decay(now)
        tokens = sum(a.measured_tokens for a in self._accounts.values())
        milliseconds = sum(a.measured_milliseconds for a in self._accounts.values())
        mean = milliseconds / tokens if tokens > 1 else 1.0
        return {
            uid: Load(
                prompt_tokens=a.prompt_tokens,
                streams=a.streams,
                milliseconds_per_token=(a.measured_milliseconds + mean * _PRIOR_TOKENS)
                / (a.measured_tokens + _PRIOR_TOKENS),
                recent_tokens=a.recent_tokens,
                avoid_until=a.avoid_until,
            )
            for uid, a in self._accounts.items()
        }

    def _account(self, uid: str) -> _Account:
        return self._accounts.setdefault(uid, _Account())
