"""Forecasts of the next interval that published planners use: the last value, and a level with a trend.

Auto-ARIMA, which Dynamo and DOPD default to, returns the last value until it has five intervals (15 minutes of theirs)
and is not here beyond that: it needs a model search at every run. Level and trend is Dynamo's Kalman filter.
"""

from typing import Protocol


class Forecast(Protocol):
    def add(self, value: float) -> None: ...

    def next(self) -> float: ...


class LastValue:
    """Zeros before the first other value are no values."""

    def __init__(self) -> None:
        self._last = 0.0

    def add(self, value: float) -> None:
        self._last = value

    def next(self) -> float:
        return self._last


class Kalman:
    """Level and trend of one series, one step ahead (`planner/core/load/predictors.py` at wxsms/dynamo @2a6da14)."""

    def __init__(
        self,
        level_variance: float = 1.0,
        trend_variance: float = 0.1,
        measurement_variance: float = 10.0,
        least_points: int = 5,
    ) -> None:
        self._variances = (level_variance, trend_variance, measurement_variance)
        self._least_points = least_points
        self._points = 0
        self._last = 0.0
        self._level = self._trend = 0.0
        self._covariance = (1000.0, 0.0, 1000.0)  # of level; of both; of trend
        self._ahead: float | None = None

    def add(self, value: float) -> None:
        if value == 0 and not self._points:
            return
        self._points += 1
        self._last = value
        if self._points == 1:
            self._level = value
            return
        if self._ahead is None:
            self._predict()
        p, q, r = self._covariance
        noise = self._variances[2]
        level_gain, trend_gain = p / (p + noise), q / (p + noise)
        error = value - self._level
        self._level += level_gain * error
        self._trend += trend_gain * error
        self._covariance = (p * (1 - level_gain), q * (1 - level_gain), r - trend_gain * q)
        self._ahead = None

    def next(self) -> float:
        """Asked again before the next value it says the same."""
        if self._points < self._least_points:
            return self._last
        if self._ahead is None:
            self._predict()
            self._ahead = self._level
        return self._ahead

    def _predict(self) -> None:
        p, q, r = self._covariance
        self._level += self._trend
        self._covariance = (p + 2 * q + r + self._variances[0], q + r, r + self._variances[1])
