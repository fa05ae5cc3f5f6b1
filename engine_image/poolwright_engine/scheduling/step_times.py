"""What steps of this machine take: measured at the start, kept fresh by the steps it serves, fitted when asked.

Owns the measurements and the fit; `budget.StepPredictor` decides the next step from the last ones, this says what the
machine is like over all kinds of steps. A fit over the last steps alone would forget the kinds that are not served
now, and a machine that decodes two streams would claim to know nothing of forty. So kinds of steps are kept apart, by
powers of two of their tokens and of their contexts, and each counts once, however often it was served.
"""

import itertools
import math
from dataclasses import dataclass

from poolwright_engine.scheduling.budget import StepWork
from poolwright_protocol.least_squares import cost_weights
from poolwright_protocol.step_time import StepCost, StepProfile

_MEMORY = 16  # steps of one kind that its mean is over, about
_TRUSTED_AFTER = 3  # steps of one kind; then one that strays far counts as a stray
_MOST_STRAY = 4.0  # over the mean: a pause of the process is no price
_FRESH_STEPS = 4096
_FRESH_WEIGHT = 4  # over a kind that was measured at the start, or not served for so many steps
_LEAST_KINDS = 2
# Of tokens, and of contexts: less does not tell what a token costs from what a step costs, and a context from a token.
_LEAST_SPREAD = 3.0

# Kinds of steps that a fit given as lines is taken at: what was measured to make it is not known here.
_GIVEN_DECODES = tuple(itertools.product((1, 4, 16, 64), (16, 256, 1024)))
_GIVEN_PROMPTS = tuple(itertools.product((16, 64, 256, 1024), (0, 256, 1024)))


@dataclass(slots=True)
class _Kind:
    tokens: float
    kv_tokens: float
    seconds: float
    served: int  # 0: of the start
    last_step: int
    at_start: float | None = None  # its seconds then, of one that has been served since

    def add(self, work: StepWork, seconds: float, step: int) -> None:
        if not self.served:
            self.at_start = self.seconds
            self.tokens, self.kv_tokens, self.seconds = work.tokens, work.kv_tokens, seconds
        else:
            if self.served >= _TRUSTED_AFTER:
                seconds = min(seconds, _MOST_STRAY * self.seconds)
            share = 1 / min(self.served + 1, _MEMORY)
            self.tokens += share * (work.tokens - self.tokens)
            self.kv_tokens += share * (work.kv_tokens - self.kv_tokens)
            self.seconds += share * (seconds - self.seconds)
        self.served += 1
        self.last_step = step


class StepTimes:
    """Used by one thread."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[bool, int, int], _Kind] = {}
        self._steps = 0

    def begin_with(self, work: StepWork, seconds: float) -> None:
        """A step that was measured before anything was served."""
        if _is_time(seconds):
            kind = _Kind(work.tokens, work.kv_tokens, seconds, 0, 0)
            self._kinds[_key(work)] = kind

    def begin_with_profile(self, profile: StepProfile) -> None:
        """What was measured on this machine, or on one like it, at another time."""
        for decodes, context in _GIVEN_DECODES:
            work = StepWork(decodes, decodes * context, False)
            self.begin_with(work, profile.decode.seconds(work.tokens, work.kv_tokens))
        for tokens, context in _GIVEN_PROMPTS:
            work = StepWork(tokens, context + tokens, True)
            self.begin_with(work, profile.mixed.seconds(work.tokens, work.kv_tokens))

    def observe(self, work: StepWork, seconds: float) -> None:
        if not _is_time(seconds):
            return
        self._steps += 1
        key = _key(work)
        kind = self._kinds.get(key)
        if kind is None:
            self._kinds[key] = _Kind(work.tokens, work.kv_tokens, seconds, 1, self._steps)
        else:
            kind.add(work, seconds, self._steps)

    @property
    def decode(self) -> StepCost | None:
        """Of steps without prompts; None: too few kinds of them are known."""
        return self._fitted(has_prefill=False)

    @property
    def mixed(self) -> StepCost | None:
        """Of steps with prompts; None: too few kinds are known, or none that tells what a prompt token costs."""
        cost = self._fitted(has_prefill=True)
        return cost if cost is not None and cost.token_seconds > 0 else None

    def _fitted(self, has_prefill: bool) -> StepCost | None:
        kinds = [kind for key, kind in self._kinds.items() if key[0] is has_prefill]
        tokens = [kind.tokens for kind in kinds]
        if len(kinds) < _LEAST_KINDS or max(tokens) < _LEAST_SPREAD * min(tokens):
            return None
        # Where contexts are all alike, what they cost cannot be told from what tokens cost, and is counted there.
        contexts = [kind.kv_tokens / kind.tokens for kind in kinds]
        of_context = max(contexts) >= _LEAST_SPREAD * min(contexts)
        # A start beside others that start is slow: what was not served since is as much off as what was.
        changed = sorted(k.seconds / k.at_start for k in self._kinds.values() if k.at_start)
        drift = changed[len(changed) // 2] if changed else 1.0
        rows = []
        for kind in kinds:
            fresh = kind.served and self._steps - kind.last_step <= _FRESH_STEPS
            features = (1.0, kind.tokens, kind.kv_tokens) if of_context else (1.0, kind.tokens)
            seconds = kind.seconds if kind.served else kind.seconds * drift
            rows += [(features, seconds)] * (_FRESH_WEIGHT if fresh else 1)
        weights = cost_weights(rows)
        cost = StepCost(weights[0], weights[1], weights[2] if of_context else 0.0)
        return cost if cost.seconds(1, 1) > 0 else None


def _key(work: StepWork) -> tuple[bool, int, int]:
    return work.has_prefill, work.tokens.bit_length(), work.kv_tokens.bit_length()


def _is_time(seconds: float) -> bool:
    return 0 < seconds < math.inf
