"""What this router has sent and not yet seen the end of, per machine; each machine's speed, price and breaker.

Reports of engines are seconds old when they arrive, so the router counts its own work from the moment of choosing, and
where work has a price, takes it as done at that price until a first token says better. Knows no HTTP; time is an
argument (monotonic seconds).
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from poolwright.core.pricing import MachinePrices
from poolwright.core.reading import MachineWork
from poolwright.core.routes import BORROWED, STREAM_TOKENS, Choice, Load, Route
from poolwright_protocol.roles import Role

_HALF_LIFE_SECONDS = 30.0
# A machine starts at the pool's mean speed, which weighs as much as this many measured tokens.
_PRIOR_TOKENS = 256.0
_FIRST_AVOID_SECONDS = 0.5
_LONGEST_AVOID_SECONDS = 15.0
_TRIAL_SECONDS = 1.0
KV_HIGH_WATER = 0.95  # share of KV memory that streams may be given (BlitzScale's)
_LINE = 64  # prompts that a load tells of: as many as an engine looks at for a step


class ReturnRule(StrEnum):
    """When a machine that was lent works for its own pool alone again: once what it does for the other is drained (the
    Splitwise paper, 4.1), or once it does nothing at all (its simulator)."""

    DRAINED = "drained"
    IDLE = "idle"


@dataclass(slots=True)
class _Account:
    prompt_tokens: int = 0
    prompts: int = 0
    relegated_tokens: int = 0  # of prompts that wait behind all others, in none of the other counts of prompts
    bound: int = 0  # of its streams, those without a first token
    streams: int = 0
    failures: int = 0  # in a row
    avoid_until: float = -math.inf
    # Decayed sums, as of `decayed_at`.
    measured_milliseconds: float = 0.0
    measured_tokens: float = 0.0
    recent_tokens: float = 0.0
    decayed_at: float = 0.0
    # Where work has a price.
    prices: MachinePrices | None = None
    prefill_bound: int | None = None
    tbt_seconds: float = math.inf
    prompt_pairs: float = 0.0
    waiting: list[tuple[int, float]] = field(default_factory=list)  # tokens and pairs of each prompt, shortest first
    context_tokens: float = 0.0
    free_at: float = -math.inf
    lent_to: Role | None = None  # the pool it works for besides its own
    load: Load | None = None  # as last said; None once it is out of date

    def decay(self, now: float) -> None:
        left = math.exp2(-max(0.0, now - self.decayed_at) / _HALF_LIFE_SECONDS)
        self.measured_milliseconds *= left
        self.measured_tokens *= left
        self.recent_tokens *= left
        self.decayed_at = now

    def prompts_seconds(self) -> float:
        """In steps that leave the streams which decode there their gaps."""
        if self.prices is None:
            return 0.0
        decodes = self.streams - self.bound
        context = self.context_tokens * decodes / self.streams if decodes > 0 else 0.0
        chunk = self.prefill_bound
        if decodes > 0 and self.tbt_seconds < math.inf:
            within = self.prices.chunk_within(self.tbt_seconds, decodes, context)
            chunk = within if chunk is None else min(chunk, within)
        return self.prices.queue_seconds(
            self.prompt_tokens, self.prompt_pairs, step_tokens=chunk, decodes=decodes, kv_tokens=context
        )

    def kv_free_tokens(self) -> float:
        if self.prices is None or self.prices.kv_capacity_tokens is None:
            return math.inf
        return self.prices.kv_capacity_tokens * KV_HIGH_WATER - self.context_tokens

    def return_if(self, rule: ReturnRule) -> None:
        if self.lent_to is None:
            return
        foreign = self.prompts if self.lent_to is Role.PROMPT else self.streams
        if not foreign and (rule is ReturnRule.DRAINED or not (self.prompts or self.streams)):
            self.lent_to = None
            self.load = None


class Entry:
    """One attempt of one request. Close it once, whatever happened; before that `first_token` at most once."""

    __slots__ = (
        "_closed",
        "_context_tokens",
        "_joined",
        "_pairs",
        "_prompt",
        "_prompt_tokens",
        "_queue_tokens",
        "_relegated",
        "_rule",
        "_sent_at",
        "_token",
        "_waiting",
    )

    def __init__(
        self,
        token: _Account,
        prompt: _Account,
        prompt_tokens: int,
        now: float,
        *,
        cached_tokens: int = 0,
        output_tokens: float = 0.0,
        rule: ReturnRule = ReturnRule.DRAINED,
        relegated: bool = False,
    ) -> None:
        new = max(0, prompt_tokens - cached_tokens)
        self._token = token
        self._prompt = prompt
        self._prompt_tokens = new
        self._pairs = new * (prompt_tokens - new + new / 2)
        self._context_tokens = prompt_tokens + output_tokens / 2
        self._sent_at = now
        self._queue_tokens = prompt.prompt_tokens + prompt.streams * STREAM_TOKENS + new
        self._rule = rule
        self._waiting = True
        self._closed = False
        self._relegated = relegated
        self._joined = False
        if relegated:
            prompt.relegated_tokens += new
        else:
            before = prompt.prompts_seconds()
            prompt.prompt_tokens += new
            prompt.prompt_pairs += self._pairs
            prompt.prompts += 1
            insort(prompt.waiting, (new, self._pairs))
            # Short prompts share their steps, so what counts is what the queue grows by.
            prompt.free_at = max(now, prompt.free_at) + max(0.0, prompt.prompts_seconds() - before)
            token.bound += 1
            self._join()
        for account in (token, prompt) if token is not prompt else (token,):
            account.load = None
            account.decay(now)
            account.recent_tokens += new + STREAM_TOKENS
            if account.failures:  # one request at a time tries a machine that failed last
                account.avoid_until = max(account.avoid_until, now + _TRIAL_SECONDS)

    def first_token(self, now: float) -> None:
        if not self._waiting:
            return
        self._settle()
        if self._relegated:  # what it waited for was not this machine's speed
            self._join()
            return
        prompt = self._prompt
        prompt.decay(now)
        prompt.measured_milliseconds += (now - self._sent_at) * 1000
        prompt.measured_tokens += self._queue_tokens
        prompt.free_at = now + prompt.prompts_seconds()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._waiting:  # it failed, so its share of the wait is gone
            self._settle()
            if not self._relegated:
                self._prompt.free_at = min(self._prompt.free_at, self._sent_at + self._prompt.prompts_seconds())
        token = self._token
        if self._joined:
            token.streams -= 1
            token.context_tokens = max(0.0, token.context_tokens - self._context_tokens) if token.streams else 0.0
        token.load = None
        token.return_if(self._rule)

    def _join(self) -> None:
        """The streams of its machine: as soon as it was sent, or, behind all others, when it begins to decode."""
        self._joined = True
        self._token.streams += 1
        self._token.context_tokens += self._context_tokens
        self._token.load = None

    def _settle(self) -> None:
        if self._waiting:
            self._waiting = False
            self._token.load = None
            prompt = self._prompt
            prompt.load = None
            if self._relegated:
                prompt.relegated_tokens -= self._prompt_tokens
            else:
                self._token.bound -= 1
                prompt.prompts -= 1
                del prompt.waiting[bisect_left(prompt.waiting, (self._prompt_tokens, self._pairs))]
                prompt.prompt_tokens -= self._prompt_tokens
                prompt.prompt_pairs = max(0.0, prompt.prompt_pairs - self._pairs) if prompt.prompts else 0.0
            prompt.return_if(self._rule)


class Ledger:
    def __init__(self, return_rule: ReturnRule = ReturnRule.DRAINED) -> None:
        self._accounts: dict[str, _Account] = {}
        self._return_rule = return_rule

    def begin(
        self,
        choice: Choice,
        prompt_tokens: int,
        now: float,
        cached_tokens: int = 0,
        output_tokens: float = 0.0,
        relegated: bool = False,
    ) -> Entry:
        token = self._account(choice.token.uid)
        prompt = self._account(choice.prompt.uid) if choice.prompt else token
        if choice.route in BORROWED and token.lent_to is None:
            token.lent_to = Role.PROMPT if choice.route is Route.BORROWED_FOR_PROMPT else Role.TOKEN
        return Entry(
            token,
            prompt,
            prompt_tokens,
            now,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            rule=self._return_rule,
            relegated=relegated,
        )

    def failed(self, uid: str, now: float) -> None:
        """No connection, a connection lost, or another machine at its address. Busy is not failed."""
        account = self._account(uid)
        account.failures += 1
        pause = min(_LONGEST_AVOID_SECONDS, _FIRST_AVOID_SECONDS * 2 ** min(account.failures - 1, 10))
        account.avoid_until = max(account.avoid_until, now + pause)
        account.load = None

    def answered(self, uid: str) -> None:
        """It serves, whatever it answered."""
        account = self._accounts.get(uid)
        if account and account.failures:
            account.failures = 0
            account.avoid_until = -math.inf
            account.load = None

    def keep(self, uids: Iterable[str]) -> None:
        """These are the machines now. Entries still open on one that is gone close into the void."""
        self._accounts = {uid: self._account(uid) for uid in uids}

    def price(
        self, uid: str, prices: MachinePrices | None, prefill_bound: int | None = None, tbt_seconds: float = math.inf
    ) -> None:
        """What work costs on this machine, the bound on its chunks and the gap that its streams are promised; None: not
        known, so measured speed counts."""
        account = self._account(uid)
        if (account.prices, account.prefill_bound, account.tbt_seconds) != (prices, prefill_bound, tbt_seconds):
            account.prices, account.prefill_bound, account.tbt_seconds = prices, prefill_bound, tbt_seconds
            account.load = None

    def loads(self, now: float) -> dict[str, Load]:
        measured = [a for a in self._accounts.values() if a.prices is None]
        for account in measured:
            account.decay(now)
        tokens = sum(a.measured_tokens for a in measured)
        milliseconds = sum(a.measured_milliseconds for a in measured)
        mean = milliseconds / tokens if tokens > 1 else 1.0
        return {uid: a.load or self._load(a, mean) for uid, a in self._accounts.items()}

    def work(self) -> dict[str, MachineWork]:
        """For the fast loop."""
        return {
            uid: MachineWork(
                a.prompt_tokens + a.relegated_tokens, a.prompt_pairs, a.streams, a.context_tokens, a.lent_to is not None
            )
            for uid, a in self._accounts.items()
        }

    @staticmethod
    def _load(a: _Account, mean: float) -> Load:
        milliseconds = (a.measured_milliseconds + mean * _PRIOR_TOKENS) / (a.measured_tokens + _PRIOR_TOKENS)
        load = Load(
            prompt_tokens=a.prompt_tokens,
            streams=a.streams,
            milliseconds_per_token=milliseconds,
            recent_tokens=a.recent_tokens,
            avoid_until=a.avoid_until,
            prices=a.prices,
            free_at=a.free_at if a.prompts else -math.inf,
            context_tokens=a.context_tokens,
            next_step_seconds=a.prices.decode_seconds(a.streams + 1, a.context_tokens) if a.prices else 0.0,
            kv_free_tokens=a.kv_free_tokens(),
            bound_streams=a.bound,
            prefill_bound=a.prefill_bound,
            lent=a.lent_to is not None,
            waiting=tuple(a.waiting[:_LINE]),
        )
        if a.prices is not None:
            a.load = load  # speeds that are measured fade with time; prices do not
        return load

    def _account(self, uid: str) -> _Account:
        return self._accounts.setdefault(uid, _Account())
