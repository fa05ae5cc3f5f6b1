"""Which requests are served behind all others, since their first token would be late in any case (relegated).

`admission` predicts; here stands how far it is believed. Each prediction of a wait worth the name is held against the
first token that came. Until enough of late have been, nobody is relegated: not known is not late. The first is only
where its prediction, were it too long by as much as any of late, still is over the target. From then on, until nobody
was for as long as a first token may take, all are whose prediction, put right by what is usual of late, is late by the
measure of `admission`: a line that may grow until who comes is surely late makes all of them late.

Of several routers each judges by its own line, which is a part of the real one: so it relegates later.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from poolwright.core.admission import AdmissionReason, Tally, Verdict, admit
from poolwright.core.machine import Machine
from poolwright.core.routes import Choice, Load, Route, RoutingRequest, Targets

_REMEMBERED = 64  # predictions
_ENOUGH = 16  # fewer say nothing of the next one
_FRESH_SECONDS = 120.0
_WAIT_SHARE = 0.25  # of the target: of a shorter wait, little is the line
# By other routes a prompt leaves the line: to the machine that decodes it, or to one that is lent to it.
_IN_LINE = frozenset({Route.SPLIT, Route.MIXED, Route.PREFIX})


@dataclass(slots=True)
class Judged:
    """Of one request. `reason`: why it is behind all others; None: it is not. `heard` is told what its first token
    took, once; None: nobody wants to know."""

    reason: AdmissionReason | None = None
    predicted_seconds: float | None = None
    at: float = 0.0
    heard: Callable[[float, float], None] | None = None

    def first_token(self, now: float) -> None:
        if self.heard is not None:
            self.heard(now - self.at, now)
            self.heard = None

    def tried_again(self) -> None:
        """What it takes now is not what was predicted."""
        self.heard = None


class Relegation:
    """Of one router. Time is the caller's, and does not go back."""

    def __init__(self) -> None:
        self._checked: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # when, and predicted over real
        self._most = self._middle = math.inf
        self._late_until = -math.inf

    def threshold(self, now: float) -> float:
        """How many times as long as it will be a first token is predicted: at most, or usually while some are behind
        all others; inf: not known, so nobody goes behind."""
        if self._checked and self._checked[0][0] < now - _FRESH_SECONDS:
            while self._checked and self._checked[0][0] < now - _FRESH_SECONDS:
                self._checked.popleft()
            self._learn()
        return self._middle if now < self._late_until else self._most

    def judge(
        self,
        request: RoutingRequest,
        machines: Sequence[Machine],
        loads: Mapping[str, Load],
        now: float,
        targets: Targets,
        choice: Choice,
    ) -> Judged:
        """`choice`: of these machines under these loads. `loads` without prices: it is served in its turn."""
        if choice.route not in _IN_LINE:
            return Judged()
        believed = replace(targets, ttft_seconds=targets.ttft_seconds * self.threshold(now))
        admission, _ = admit(request, machines, loads, now, believed, Tally(), may_refuse=False)
        if admission.reason is AdmissionReason.UNPRICED:
            return Judged()
        predicted = admission.ttft_seconds
        # Admission keeps a margin; the first is late without one.
        goes = now < self._late_until or predicted > believed.ttft_seconds
        if admission.verdict is Verdict.RELEGATE and goes:
            if admission.reason is AdmissionReason.TTFT_LATE:  # a prompt that is too long says nothing of the line
                self._late_until = now + targets.ttft_seconds
            return Judged(admission.reason, predicted, now)
        if predicted < targets.ttft_seconds * _WAIT_SHARE:
            return Judged(None, predicted, now)
        return Judged(None, predicted, now, partial(self._check, predicted))

    def _check(self, predicted_seconds: float, seconds: float, now: float) -> None:
        self._checked.append((now, predicted_seconds / max(seconds, 1e-6)))
        self._learn()

    def _learn(self) -> None:
        ratios = sorted(ratio for _, ratio in self._checked)
        if len(ratios) < _ENOUGH:
            self._most = self._middle = math.inf
        else:
            self._most = max(1.0, ratios[-1])
            self._middle = ratios[len(ratios) // 2]
