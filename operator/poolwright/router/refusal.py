"""Who is refused, where that is allowed: requests that would be late, beyond the few served behind all others.

`core.admission` predicts both latencies, `core.relegation` says how far its predictions of first tokens are believed.
A target that no machine can hold at all refuses nobody, since nobody would be served.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from poolwright.core.admission import LATE_FIRST, AdmissionReason, Tally, Verdict, admit
from poolwright.core.machine import Machine
from poolwright.core.relegation import Judged, Relegation
from poolwright.core.routes import IDLE, Load, RoutingRequest, Targets
from poolwright.core.routing import is_live
from poolwright_protocol.roles import Role

REASONS = LATE_FIRST | {AdmissionReason.TBT_LATE}


@dataclass(frozen=True, slots=True)
class Refusal:
    """`predicted_seconds`: of what is late, beside its target. `retry_seconds`: None where waiting will not help.
    `pace_seconds`: what one such request takes from those behind it; inf: not known."""

    reason: AdmissionReason
    predicted_seconds: float
    target_seconds: float
    retry_seconds: float | None
    pace_seconds: float = math.inf

    def __str__(self) -> str:
        late, target = f"{self.predicted_seconds:.2f} s", f"{self.target_seconds:.2f} s"
        match self.reason:
            case AdmissionReason.PROMPT_TOO_LONG:
                return f"The prompt alone takes {late} on an idle machine; the pool promises a first token in {target}."
            case AdmissionReason.TBT_LATE:
                return f"Gaps between tokens are predicted to be {late}; the pool promises {target}."
            case _:
                return f"The first token is predicted after {late}; the pool promises it in {target}."


class Refusals:
    """Of one router."""

    def __init__(self, relegation: Relegation) -> None:
        self._relegation = relegation
        self._tally = Tally()

    def judge(
        self,
        request: RoutingRequest,
        machines: Sequence[Machine],
        loads: Mapping[str, Load],
        now: float,
        targets: Targets,
        judged: Judged,
        relegates: bool,
    ) -> Refusal | None:
        """`judged`: by the same relegation, of the same request. None: it is served, as judged."""
        ratio = self._relegation.threshold(now)
        believed = replace(targets, ttft_seconds=targets.ttft_seconds * ratio)
        tally = self._tally if relegates else Tally()  # an empty one lets nobody be late
        admission, self._tally = admit(request, machines, loads, now, believed, tally)
        if admission.verdict is not Verdict.REJECT or admission.reason not in REASONS:
            return None
        retry = admission.retry_after_seconds
        if admission.reason is AdmissionReason.TBT_LATE:
            return Refusal(admission.reason, admission.tbt_seconds, targets.tbt_seconds, retry)
        if judged.reason is None or not math.isfinite(ratio):
            return None
        return Refusal(
            admission.reason,
            admission.ttft_seconds / ratio,
            targets.ttft_seconds,
            None if retry is None else retry / ratio,
            _pace_seconds(request, machines, loads, now) / ratio,
        )


def _pace_seconds(request: RoutingRequest, machines: Sequence[Machine], loads: Mapping[str, Load], now: float) -> float:
    """Of such prompts, one after another on all machines that compute prompts."""
    rate = 0.0
    for machine in machines:
        load = loads.get(machine.uid, IDLE)
        if machine.role is Role.TOKEN or not is_live(machine) or load.prices is None or load.avoid_until > now:
            continue
        seconds = load.prices.prefill_seconds(request.prompt_tokens, request.cached_tokens.get(machine.uid, 0))
        rate += 1 / max(seconds, 1e-6)
    return 1 / rate if rate else math.inf
