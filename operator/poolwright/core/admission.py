"""Whether a request is taken: both latencies predicted for the time when its prefill will end.

Mooncake (FAST 2025) found that to test decode load at arrival makes both pools swing in opposite phase, since that load
comes only after the prefill; so here it is what will be left of today's streams then, and those bound there by then. A
request whose first token cannot be in time is relegated (served after all others, never dropped): it is late in any
case, and in its turn it would make others late too. Where requests may be refused, that is for a share of them
(QoServe: some 5 % keep the rest within their targets), and the others are refused, with the time after which one could
be taken. One that no machine could serve in time even when idle is refused for good, and told so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from poolwright.core.machine import Machine
from poolwright.core.priced_routing import choose_priced, turn_seconds, whole_seconds
from poolwright.core.pricing import HANDOFF_SECONDS
from poolwright.core.routes import IDLE, Load, RoutingRequest, Targets
from poolwright_protocol.roles import Role

MOST_RELEGATED_SHARE = 0.05
# Of the line on a machine, what is counted against a prompt beside what goes before it now: the longer the line, the
# more is yet to come that will overtake it, since the engine computes the shortest first.
OVERTAKEN = 0.5
SURE = 0.9  # of a TTFT target: what is predicted to take longer may well be late, and then makes others late too
_TALLY_REQUESTS = 1000.0  # older ones are forgotten at this rate
_LEAST_RETRY_SECONDS = 1


class Verdict(StrEnum):
    ADMIT = "Admit"
    RELEGATE = "Relegate"
    REJECT = "Reject"


class AdmissionReason(StrEnum):
    """Closed."""

    IN_TIME = "InTime"
    UNPRICED = "Unpriced"  # nothing can be predicted, so everything is taken
    TTFT_LATE = "TTFTLate"
    TBT_LATE = "TBTLate"
    PROMPT_TOO_LONG = "PromptTooLong"
    TBT_INFEASIBLE = "TBTInfeasible"


LATE_FIRST = frozenset({AdmissionReason.TTFT_LATE, AdmissionReason.PROMPT_TOO_LONG})


@dataclass(frozen=True, slots=True)
class Tally:
    """Of late: how many requests were judged, and how many relegated. A value; `counted` gives the next."""

    requests: float = 0.0
    relegated: float = 0.0

    def allows_one_more(self) -> bool:
        return self.relegated + 1 <= MOST_RELEGATED_SHARE * (self.requests + 1)

    def counted(self, relegated: bool) -> "Tally":
        kept = 1 - 1 / _TALLY_REQUESTS if self.requests >= _TALLY_REQUESTS else 1.0
        return Tally(self.requests * kept + 1, self.relegated * kept + relegated)


@dataclass(frozen=True, slots=True)
class Admission:
    """`ttft_seconds`, `tbt_seconds`: predicted. `retry_after_seconds`: None where waiting will not help."""

    verdict: Verdict
    reason: AdmissionReason
    ttft_seconds: float = 0.0
    tbt_seconds: float = 0.0
    retry_after_seconds: int | None = None


def admit(
    request: RoutingRequest,
    machines: Sequence[Machine],
    loads: Mapping[str, Load],
    now: float,
    targets: Targets,
    tally: Tally,
    *,
    may_refuse: bool = True,
) -> tuple[Admission, Tally]:
    """A machine without a price, or none at all, is no reason to refuse: the choice of machines speaks then."""
    usable = [
        (m, loads.get(m.uid, IDLE)) for m in machines if m.ready and not m.deleting and m.uid not in request.tried
    ]
    if not usable or any(load.prices is None for _, load in usable):
        return Admission(Verdict.ADMIT, AdmissionReason.UNPRICED), tally.counted(relegated=False)
    sound = [(m, at) for m, at in usable if at.avoid_until <= now and m.move is None] or usable
    judged = _judge(request, sound, now, targets)
    if not may_refuse:
        verdict = Verdict.RELEGATE if judged.reason in LATE_FIRST else Verdict.ADMIT
        return replace(judged, verdict=verdict, retry_after_seconds=None), tally.counted(verdict is Verdict.RELEGATE)
    if judged.verdict is Verdict.REJECT and judged.retry_after_seconds is not None and tally.allows_one_more():
        judged = replace(judged, verdict=Verdict.RELEGATE, retry_after_seconds=None)
    return judged, tally.counted(judged.verdict is Verdict.RELEGATE)


def _judge(
    request: RoutingRequest, machines: Sequence[tuple[Machine, Load]], now: float, targets: Targets
) -> Admission:
    own = min(
        (
            load.prices.prefill_seconds(request.prompt_tokens, request.cached_tokens.get(machine.uid, 0))
            for machine, load in machines
            if load.prices is not None
        ),
        default=math.inf,
    )
    if own > targets.ttft_seconds:
        return Admission(Verdict.REJECT, AdmissionReason.PROMPT_TOO_LONG, own)
    ttft, line = _first_token_seconds(request, machines, now, targets)

    decoders = [(m, at) for m, at in machines if m.role is not Role.PROMPT] or list(machines)
    predicted = [_step_at_prefill_end(request, load, ttft) for _, load in decoders]
    tbt, leaves = min(predicted, default=(math.inf, math.inf))
    alone = min((at.prices.decode_seconds(1, request.prompt_tokens) for _, at in decoders if at.prices), default=0.0)
    if alone > targets.tbt_seconds:
        return Admission(Verdict.REJECT, AdmissionReason.TBT_INFEASIBLE, ttft, alone)
    late = ttft + OVERTAKEN * line - SURE * targets.ttft_seconds
    if late > 0:
        retry = _seconds_up(late)
        return Admission(Verdict.REJECT, AdmissionReason.TTFT_LATE, ttft, tbt, retry)
    if tbt > targets.tbt_seconds:
        # Streams leave evenly over the time an answer takes: the share that is too many, of that time.
        share = min(1.0, (tbt - targets.tbt_seconds) / max(tbt - alone, 1e-9))
        return Admission(Verdict.REJECT, AdmissionReason.TBT_LATE, ttft, tbt, _seconds_up(share * leaves))
    return Admission(Verdict.ADMIT, AdmissionReason.IN_TIME, ttft, tbt)


def _first_token_seconds(
    request: RoutingRequest, machines: Sequence[tuple[Machine, Load]], now: float, targets: Targets
) -> tuple[float, float]:
    """On the machine that would be chosen, and what all take that wait there."""
    loads = {machine.uid: load for machine, load in machines}
    choice = choose_priced(request, [machine for machine, _ in machines], loads, now, targets)
    candidates = [choice.prompt or choice.token] if choice is not None else [machine for machine, _ in machines]
    soonest = math.inf, 0.0
    for machine in candidates:
        load = loads[machine.uid]
        if load.prices is None:
            continue
        cached = request.cached_tokens.get(machine.uid, 0)
        if choice is not None and choice.prompt is not None:
            seconds = load.prices.prefill_seconds(request.prompt_tokens, cached) + HANDOFF_SECONDS
        else:
            seconds = whole_seconds(load.prices, load, request.prompt_tokens, cached, targets)
        new = max(0, request.prompt_tokens - cached)
        waited = turn_seconds(load.prices, load, new, now, targets)
        soonest = min(soonest, (waited + seconds, max(0.0, load.free_at - now)))
    return soonest


def _step_at_prefill_end(request: RoutingRequest, load: Load, seconds: float) -> tuple[float, float]:
    """(a decode step with this stream in it then, how long an answer takes there now)."""
    prices = load.prices
    if prices is None:
        return math.inf, math.inf
    step = prices.decode_seconds(max(1, load.streams), load.context_tokens)
    answer = max(1.0, request.output_tokens) * step
    decoding = load.streams - load.bound_streams
    left = load.bound_streams + decoding * max(0.0, 1 - seconds / answer)
    context = load.context_tokens * left / load.streams if load.streams else 0.0
    mine = request.prompt_tokens + request.output_tokens / 2
    return prices.decode_seconds(left + 1, context + mine), answer


def _seconds_up(seconds: float) -> int:
    return max(_LEAST_RETRY_SECONDS, math.ceil(min(seconds, 86_400.0)))
