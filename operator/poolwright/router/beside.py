"""What others than this router have under way on its machines, as engines say when asked; and loads that count it.

An engine counts the requests that generate there, whoever sent them; what is over this router's own is others'. Of
their lengths and of their prompts nothing is said: they are taken to be as this router's own are.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from poolwright.core.routes import Load

_FRESH_SECONDS = 10.0  # an engine that says no more is not taken at its last word for longer


@dataclass(frozen=True, slots=True)
class _Said:
    at: float
    requests: int  # of others
    before: int  # at the look before


class Beside:
    """Of one router. Time is the caller's."""

    def __init__(self) -> None:
        self._own: dict[str, int] = {}
        self._said: dict[str, _Said] = {}
        self._made: dict[str, tuple[Load, int, float, Load]] = {}  # from which load, with how much, what

    def sent(self, uid: str) -> None:
        self._own[uid] = self._own.get(uid, 0) + 1

    def ended(self, uid: str) -> None:
        self._own[uid] -= 1
        if not self._own[uid]:
            del self._own[uid]

    def own(self, uid: str) -> int:
        return self._own.get(uid, 0)

    def heard(self, uid: str, requests: int, own: int, now: float) -> None:
        """`own`: when it was asked. What ended or began meanwhile is nobody else's, and neither is what the engine has
        not yet seen the end of: that is gone at the next look."""
        last = self._said.get(uid)
        others = max(0, requests - max(own, self.own(uid)))
        self._said[uid] = _Said(now, others, last.requests if last is not None else 0)

    def keep(self, uids: Collection[str]) -> None:
        """These are the machines now."""
        self._said = {uid: said for uid, said in self._said.items() if uid in uids}
        self._made = {uid: made for uid, made in self._made.items() if uid in uids}

    def added(self, loads: Mapping[str, Load], now: float, context_tokens: float) -> Mapping[str, Load]:
        """These loads of this router's, and what others have beside it. `context_tokens`: of a stream, where this
        router has none there to go by."""
        others = {
            uid: count
            for uid, said in self._said.items()
            if (count := min(said.requests, said.before)) and now - said.at <= _FRESH_SECONDS and uid in loads
        }
        if not others:
            return loads
        own = sum(self._own.values())
        # Who sends so many streams beside this router's sends their prompts too.
        share = sum(others.values()) / own if own else 0.0
        return {
            uid: self._with(uid, load, others.get(uid, 0), share, now, context_tokens) for uid, load in loads.items()
        }

    def _with(self, uid: str, load: Load, streams: int, share: float, now: float, context_tokens: float) -> Load:
        waits = load.free_at > now
        if not streams and not load.prompt_tokens and not waits:
            return load
        made = self._made.get(uid)
        if made is not None and made[0] is load and (made[1], made[2]) == (streams, share):
            return made[3]
        each = load.context_tokens / load.streams if load.streams else context_tokens
        context = load.context_tokens + streams * each
        total = load.streams + streams
        new = replace(
            load,
            prompt_tokens=round(load.prompt_tokens * (1 + share)),
            free_at=now + (load.free_at - now) * (1 + share) if waits else load.free_at,
            streams=total,
            context_tokens=context,
            next_step_seconds=load.prices.decode_seconds(total + 1, context) if load.prices is not None else 0.0,
            kv_free_tokens=load.kv_free_tokens - streams * each,
        )
        self._made[uid] = (load, streams, share, new)
        return new
