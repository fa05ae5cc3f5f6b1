"""How many tokens a step may hold so that no running decode misses its target. Pure: time is an argument.

The rule is QoServe's (ASPLOS 2026), deadlines counted from the first token: token i of a request is due at first token
+ i · TBT target. They add up, so a token that came early leaves slack to the next ones. The budget is the largest
multiple of the tile whose predicted step, with a margin, ends within the least slack of the decodes that run. Where
every gap is promised by itself, slack is not saved up: each step has one TBT target.

Steps are predicted as fixed + a · tokens + b · context tokens, separately for steps of decodes alone and for steps with
prefill (other kernels run), and fitted as they are measured.

`PromptPace` serves another end: where steps are slow, none may hold so much of prompts that the machine seems to stand
still. Attention costs by pairs of a token and one before it, which is what makes the last part of a long prompt slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from poolwright_protocol.flops import visible_keys
from poolwright_protocol.step_time import StepCost, StepProfile

# QoServe's margin, until steps tell by how much they exceed what was predicted: then the most of late.
_FIRST_MARGIN = 1.2
_MARGINS = (1.02, 1.5)  # bounds
_MARGIN_KEPT = 0.98  # of what is above 1, a step later: a third after 50 steps
_FORGETTING = 0.98  # weight of a step 50 steps ago: about a third
_TOKEN_SCALE = 256.0  # features of about one make the fit well conditioned
_KV_SCALE = 65536.0
_PAIR_SCALE = 524288.0
_LEAST_TILES = 2
_BEYOND = (0.5, 4.0)  # bounds: a step of few tokens may take any multiple of nearly nothing
_FIRST_TRUST = 100.0  # variance of the first guess over that of a measurement
_MOST_TRUST = 1e4  # bounds what forgetting blows up while nothing varies


@dataclass(frozen=True, slots=True)
class StepWork:
    """`tokens` computed; `kv_tokens` attended to: the lengths of all rows' contexts, summed."""

    tokens: int
    kv_tokens: int
    has_prefill: bool


class _Fit:
    """Recursive least squares with forgetting over (1, tokens, kv tokens), scaled."""

    def __init__(self, first: StepCost | None, kv_scale: float = _KV_SCALE) -> None:
        self._kv_scale = kv_scale
        cost = first or StepCost(0.0, 0.0, 0.0)
        self._weights = [
            cost.fixed_seconds,
            cost.token_seconds * _TOKEN_SCALE,
            cost.kv_token_seconds * kv_scale,
        ]
        # A measured profile is worth some steps; nothing is worth none.
        trust = 1.0 if first is not None else _FIRST_TRUST
        self._covariance = [[trust if i == j else 0.0 for j in range(3)] for i in range(3)]
        self.is_known = first is not None

    def observe(self, work: StepWork, seconds: float) -> None:
        self.is_known = True
        x = (1.0, work.tokens / _TOKEN_SCALE, work.kv_tokens / self._kv_scale)
        p = self._covariance
        px = [sum(p[i][j] * x[j] for j in range(3)) for i in range(3)]
        scale = _FORGETTING + sum(x[i] * px[i] for i in range(3))
        gain = [value / scale for value in px]
        error = seconds - sum(weight * value for weight, value in zip(self._weights, x, strict=True))
        self._weights = [weight + gain[i] * error for i, weight in enumerate(self._weights)]
        grown = [[(p[i][j] - gain[i] * px[j]) / _FORGETTING for j in range(3)] for i in range(3)]
        if max(grown[i][i] for i in range(3)) <= _MOST_TRUST:
            self._covariance = grown

    @property
    def cost(self) -> StepCost:
        """Noise may fit a negative part; a step never costs less for more work."""
        fixed, token, kv = (max(0.0, weight) for weight in self._weights)
        return StepCost(fixed, token / _TOKEN_SCALE, kv / self._kv_scale)


class StepPredictor:
    """`margin`: by how much a step with prompts may exceed what is predicted, as far as is known at the start."""

    def __init__(self, profile: StepProfile | None = None, margin: float = _FIRST_MARGIN) -> None:
        self._decode = _Fit(profile.decode if profile else None)
        self._mixed = _Fit(profile.mixed if profile else None)
        self._margin = min(max(margin, _MARGINS[0]), _MARGINS[1])

    def observe(self, work: StepWork, seconds: float) -> None:
        if work.has_prefill and self._mixed.is_known and (predicted := self.predict(work)) > 0:
            least, most = _MARGINS
            kept = 1 + (self._margin - 1) * _MARGIN_KEPT
            self._margin = min(most, max(least, kept, seconds / predicted))
        (self._mixed if work.has_prefill else self._decode).observe(work, seconds)

    def predict(self, work: StepWork) -> float:
        cost = self._mixed.cost if work.has_prefill else self._decode.cost
        return cost.seconds(work.tokens, work.kv_tokens)

    @property
    def prefill_token_seconds(self) -> float | None:
        """What one more prompt token costs; None: nothing is known of it."""
        return self._mixed.cost.token_seconds if self._mixed.is_known else None

    @property
    def overhead_tokens(self) -> float | None:
        """What a step with prompts costs besides its tokens, in prompt tokens; None: not known."""
        return self._mixed.cost.overhead_tokens if self._mixed.is_known else None

    def budget(self, slack_seconds: float, decodes: int, kv_tokens: int, tile_tokens: int, most_tokens: int) -> int:
        """Tokens of the next step, decodes included: at most `most_tokens`, at least one tile beyond the decodes, so
        that no prompt ever stands still. `kv_tokens`: contexts of the decodes and of the first prompt."""
        least = min(most_tokens, (decodes // tile_tokens + 1) * tile_tokens)
        if not self._mixed.is_known:
            return least
        cost = self._mixed.cost
        left = slack_seconds / self._margin - cost.fixed_seconds - kv_tokens * cost.kv_token_seconds
        if cost.token_seconds * most_tokens <= left:
            return most_tokens
        # Each prompt token is also one more token of context.
        tokens = int(max(0.0, left) / (cost.token_seconds + cost.kv_token_seconds))
        return min(most_tokens, max(least, tokens - tokens % tile_tokens))


def prompts_of_least_wait(overhead_tokens: float, remaining: Sequence[int]) -> int:
    """How many of the prompts that wait together, the first of `remaining`, one step should hold.

    `remaining`: what each has left, in tokens, in the order in which they are served. `overhead_tokens`: what a step
    costs besides its tokens, in tokens. One prompt more lets those before it wait for its tokens, and spares it and
    all after it one overhead, if those then share a step. So steps are small while few wait, and grow with the line up
    to the budget, where throughput is what is short; were nobody else to come, somewhat smaller ones would be best for
    a long line. No prompt is cut for it.
    """
    count, waiting = 1, len(remaining)
    while count < waiting and count * remaining[count] <= (waiting - count) * overhead_tokens:
        count += 1
    return count


class PromptPace:
    """How many tokens a step with prompts may hold so that it takes no longer than `limit_seconds`.

    Begins with what a prompt token cost in one short step, the first seen unless it is given, all of it taken to be the
    token's: too much rather than too little, so that a first long prompt is cut too small and not too large. Until then
    a step holds two tiles. A fit over many steps is slow to learn that others took the cores, so what the last steps
    took beyond it counts at once.
    """

    def __init__(self, limit_seconds: float, token_seconds: float | None) -> None:
        self._limit_seconds = limit_seconds
        self._beyond = 1.0  # what steps take over what the fit says, of late
        self._fit = None if token_seconds is None else _pace_from(token_seconds)

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        """Of a step with prompts. `pairs`: of a token computed and one it attends to, itself included."""
        if self._fit is None:
            self._fit = _pace_from(seconds / tokens)
        predicted = self._fit.cost.seconds(tokens, pairs)
        beyond = seconds / predicted if predicted > 0 else 1.0
        least, most = _BEYOND
        self._beyond += (min(most, max(least, beyond)) - self._beyond) / 2
        self._fit.observe(StepWork(tokens, pairs, True), seconds)

    def most_tokens(self, context: int, decodes: int, tile_tokens: int, most_tokens: int) -> int:
        """Decodes included: the most multiples of the tile, at least two tiles beyond the last that decodes fill.
        `context`: where the prompts stand, of several the longest."""
        # Each chunk reads the whole context before it: smaller ones cost a long prompt more than they give others.
        least = min(most_tokens, (decodes // tile_tokens + _LEAST_TILES) * tile_tokens)
        if self._fit is None:
            return least
        cost, tokens, limit = self._fit.cost, most_tokens, self._limit_seconds / self._beyond
        while tokens > least and cost.seconds(tokens, visible_keys(context, tokens)) > limit:
            tokens = (tokens - 1) // tile_tokens * tile_tokens
        return max(least, tokens)


def _pace_from(token_seconds: float) -> _Fit:
    return _Fit(StepCost(0.0, token_seconds, 0.0), kv_scale=_PAIR_SCALE)
