"""The fixed latency buckets of every Poolwright histogram.

Log-spaced from 1 ms to 120 s with ratio ≤ 1.25: with coarse buckets a steady 1.05 s reads as a P90 of 2.35 s, wider
than the control band. Bounds are rounded to three significant digits so that every process prints the same text.
"""

import math

_FIRST_SECONDS = 0.001
_LAST_SECONDS = 120.0
_RATIO = 1.25


def _bounds() -> tuple[float, ...]:
    steps = math.ceil(math.log(_LAST_SECONDS / _FIRST_SECONDS) / math.log(_RATIO))
    ratio = (_LAST_SECONDS / _FIRST_SECONDS) ** (1 / steps)
    return tuple(float(f"{_FIRST_SECONDS * ratio**i:.4g}") for i in range(steps + 1))


LATENCY_BUCKETS_SECONDS: tuple[float, ...] = _bounds()
