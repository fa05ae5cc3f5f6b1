"""How many tokens a step may hold so that no running decode misses its target. Pure: time is an argument.

The rule is QoServe's (ASPLOS 2026), deadlines counted from the first token: token i of a request is due at first token
+ i · TBT target. They add up, so a token that came early leaves slack to the next ones. The budget is the largest
multiple of the tile whose predicted step, with a margin, ends within the least slack of the decodes that run.

Steps are predicted as fixed + a · tokens + b · context tokens, separately for steps of decodes alone and for steps with
prefill (other kernels run), and fitted as they are measured.
"""

from dataclasses import dataclass

from poolwright_protocol.step_time import StepCost, StepProfile

_MARGIN = 1.2  # QoServe's
_FORGETTING = 0.98  # weight of a step 50 steps ago: about a third
_TOKEN_SCALE = 256.0  # features of about one make the fit well conditioned
_KV_SCALE = 65536.0
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

    def __init__(self, first: StepCost | None) -> None:
        cost = first or StepCost(0.0, 0.0, 0.0)
        self._weights = [
            cost.fixed_seconds,
            cost.token_seconds * _TOKEN_SCALE,
            cost.kv_token_seconds * _KV_SCALE,
        ]
        # A measured profile is worth some steps; nothing is worth none.
        trust = 1.0 if first is not None else _FIRST_TRUST
        self._covariance = [[trust if i == j else 0.0 for j in range(3)] for i in range(3)]
        self.is_known = first is not None

    def observe(self, work: StepWork, seconds: float) -> None:
        self.is_known = True
        x = (1.0, work.tokens / _TOKEN_SCALE, work.kv_tokens / _KV_SCALE)
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
        return StepCost(fixed, token / _TOKEN_SCALE, kv / _KV_SCALE)


class StepPredictor:
    def __init__(self, profile: StepProfile | None = None) -> None:
        self._decode = _Fit(profile.decode if profile else None)
        self._mixed = _Fit(profile.mixed if profile else None)

    def observe(self, work: StepWork, seconds: float) -> None:
        (self._mixed if work.has_prefill else self._decode).observe(work, seconds)

    def predict(self, work: StepWork) -> float:
        cost = self._mixed.cost if work.has_prefill else self._decode.cost
        return cost.seconds(work.tokens, work.kv_tokens)

    @property
    def prefill_token_seconds(self) -> float | None:
        """What one more prompt token costs; None: nothing is known of it."""
        return self._mixed.cost.token_seconds if self._mixed.is_known else None

    def budget(self, slack_seconds: float, decodes: int, kv_tokens: int, tile_tokens: int, most_tokens: int) -> int:
        """Tokens of the next step, decodes included: at most `most_tokens`, at least one tile beyond the decodes, so
        that no prompt ever stands still. `kv_tokens`: contexts of the decodes and of the first prompt."""
        least = min(most_tokens, (decodes // tile_tokens + 1) * tile_tokens)
        if not self._mixed.is_known:
            return least
        cost = self._mixed.cost
        left = slack_seconds / _MARGIN - cost.fixed_seconds - kv_tokens * cost.kv_token_seconds
        if cost.token_seconds * most_tokens <= left:
            return most_tokens
        # Each prompt token is also one more token of context.
        tokens = int(max(0.0, left) / (cost.token_seconds + cost.kv_token_seconds))
        return min(most_tokens, max(least, tokens - tokens % tile_tokens))
