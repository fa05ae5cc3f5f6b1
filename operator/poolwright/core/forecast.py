"""Offered work, forecast from arrivals alone: a level and a trend for requests and prompt tokens a second.

Decode work follows from the same arrivals, so nothing here is measured on work served: a jam would read as calm (the
oscillation that Mooncake reports, FAST 2025). Each series is a Kalman filter of level and trend, as in Dynamo's
planner; the noise of a measurement is that of counting, its size learned from how far counts strayed (dispersion).
"""

import math
from dataclasses import dataclass, field, replace

from poolwright.core.reading import MetricsReading

# Share of its value by which a level, and its slope over a minute, may change in a minute.
_LEVEL_DRIFT = 0.1
_SLOPE_DRIFT = 0.05
_MINUTE = 60.0
_SHIFT_DEVIATIONS = 3.0
# Old lengths of answers are forgotten with this half-life, in windows.
_LENGTH_HALF_LIFE_WINDOWS = 5.0
_MOST_GAP_WINDOWS = 10.0
_DISPERSION_WEIGHT = 0.2
_MOST_DISPERSION = 16.0
_MOST_COUNTED = 1e15  # no window of any pool counts more: a larger number is none


@dataclass(frozen=True, slots=True)
class Trend:
    """`level` and `slope` (a second) with their covariance, as of `at`."""

    at: float
    level: float
    slope: float = 0.0
    level_variance: float = 0.0
    covariance: float = 0.0
    slope_variance: float = 0.0

    def at_time(self, when: float) -> float:
        """Never below zero, nor more than double or half the level: a trend of two windows is no promise."""
        ahead = self.level + self.slope * max(0.0, when - self.at)
        return min(2 * self.level, max(self.level / 2, ahead))

    def observed(self, at: float, value: float, variance: float) -> "Trend":
        seconds = at - self.at
        drift = (_LEVEL_DRIFT * self.level / _MINUTE) ** 2 * _MINUTE
        slope_drift = (_SLOPE_DRIFT * self.level / _MINUTE**2) ** 2 * _MINUTE
        level = self.level + self.slope * seconds
        spread = (
            self.level_variance
            + 2 * seconds * self.covariance
            + seconds * seconds * self.slope_variance
            + drift * seconds
        )
        shared = self.covariance + seconds * self.slope_variance
        slope_variance = self.slope_variance + slope_drift * seconds
        total = spread + max(variance, 1e-12)
        gain, slope_gain = spread / total, shared / total
        error = value - level
        if error * error > _SHIFT_DEVIATIONS**2 * total:
            return Trend(at, value, 0.0, max(variance, 1e-12))  # other traffic now, not a stray count
        return Trend(
            at,
            max(0.0, level + gain * error),
            self.slope + slope_gain * error,
            (1 - gain) * spread,
            (1 - gain) * shared,
            slope_variance - slope_gain * shared,
        )


@dataclass(frozen=True, slots=True)
class Offered:
    """Work that arrives. `dispersion`: variance over mean of counts; 1 is Poisson."""

    requests_per_second: float
    prompt_tokens: float  # of a request, on average
    output_tokens: float  # of a request, on average
    dispersion: float = 1.0

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.requests_per_second * self.prompt_tokens

    @property
    def decodes_per_second(self) -> float:
        """Tokens that a decode step makes: all but each answer's first."""
        return self.requests_per_second * max(0.0, self.output_tokens - 1)

    @property
    def context_tokens(self) -> float:
        """Of a stream, averaged over its decode steps: the prompt, and half an answer (of the size-biased mean)."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Forecast:
    """A value: what was learned, to be kept in the policy's memory. Empty after a restart; one reading fills it."""

    requests: Trend | None = None
    prompt_tokens: Trend | None = None
    gaps: float = 0.0  # decayed sums of what ended tokens tell of the length of answers
    firsts: float = 0.0
    dispersion: float = 1.0
    read_at: float = field(default=-math.inf)

    def read(self, now: float, reading: MetricsReading) -> "Forecast":
        """With one more reading. A window is dated by its middle. What is not a number teaches nothing."""
        window = reading.window_seconds
        numbers = (window, reading.arrivals, reading.prompt_tokens, reading.ttft.count, reading.tbt.count)
        if not all(0 <= n <= _MOST_COUNTED for n in numbers) or window <= 0 or not math.isfinite(now):
            return self
        middle = now - window / 2
        past = self
        elapsed = now - self.read_at
        if not 0 < elapsed <= _MOST_GAP_WINDOWS * window:
            past = replace(self, requests=None, prompt_tokens=None)  # too long ago, or the clock was set back
            elapsed = window
        rate = reading.arrivals / window
        expected = past.requests.at_time(middle) if past.requests else rate
        strayed = (reading.arrivals - expected * window) ** 2 / max(1.0, expected * window)
        dispersion = past.dispersion + _DISPERSION_WEIGHT * (min(_MOST_DISPERSION, strayed) - past.dispersion)
        dispersion = max(1.0, dispersion)
        length = reading.prompt_tokens / reading.arrivals if reading.arrivals > 0 else 0.0
        counted = max(1.0, reading.arrivals) * past.dispersion  # variance of the count
        kept = math.exp2(-min(elapsed, _MOST_GAP_WINDOWS * window) / (_LENGTH_HALF_LIFE_WINDOWS * window))
        return Forecast(
            requests=_observed(past.requests, middle, rate, counted / window**2),
            prompt_tokens=_observed(
                past.prompt_tokens, middle, reading.prompt_tokens / window, 2 * counted * length**2 / window**2
            ),
            gaps=past.gaps * kept + reading.tbt.count,
            firsts=past.firsts * kept + reading.ttft.count,
            dispersion=dispersion,
            read_at=now,
        )

    def offered(self, when: float) -> Offered | None:
        """What will have to be served then; None while nothing is known."""
        if self.requests is None or self.prompt_tokens is None:
            return None
        requests = self.requests.at_time(when)
        if requests <= 0:
            return Offered(0.0, 0.0, 0.0)
        return Offered(
            requests,
            self.prompt_tokens.at_time(when) / requests,
            1.0 + (self.gaps / self.firsts if self.firsts > 0 else 0.0),
            self.dispersion,
        )


def _observed(trend: Trend | None, at: float, value: float, variance: float) -> Trend:
    if trend is None or at <= trend.at:
        return Trend(at, value, 0.0, max(variance, 1e-12))
    return trend.observed(at, value, variance)
