"""From logits to tokens: greedy, or Gumbel-max under temperature, top-k and top-p; log probabilities on the side.

The noise of a token is a function of (seed, position, token id) and nothing else, so a draw is the same in every batch,
after a restart, and on another machine. Log probabilities come from the raw logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poolwright_engine.sequence import SamplingParams, TokenLogprobs
from poolwright_engine.vml import settle

settle(torch.exp, torch.log, torch.log1p)

GREEDY_BELOW_TEMPERATURE = 1e-5
_NUCLEUS_CANDIDATES = 1024  # a nucleus is nearly always smaller; if not, the whole row is sorted
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprobs: TokenLogprobs | None


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[Sampled]:
    """One token per row. logits: (rows, vocab) float32; positions: absolute position of the token sampled."""
    if len(params) == 0:
        return []
    chosen = logits.argmax(dim=-1)
    drawn = [i for i, p in enumerate(params) if p.temperature >= GREEDY_BELOW_TEMPERATURE]
    if drawn:
        chosen[drawn] = _draw(logits[drawn], [params[i] for i in drawn], [positions[i] for i in drawn])
    logprobs = _logprobs(logits, params, chosen)
    return [Sampled(token_id, row) for token_id, row in zip(chosen.tolist(), logprobs, strict=True)]


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> Tensor:
    """(rows, vocab_size) float32 standard Gumbel noise, element [i, t] a function of (seeds[i], positions[i], t).

    Two rounds of a 32-bit mixer over the token id, keyed by 64 bits hashed from seed and position. Only 32-bit integer
    operations per token, so that a GPU kernel can make the same bits.
    """
    keys = [_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    first = torch.tensor([_signed(key & _WORD) for key in keys], dtype=torch.int32)[:, None]
    second = torch.tensor([_signed(key >> 32) for key in keys], dtype=torch.int32)[:, None]
    bits = _mix(_mix(torch.arange(vocab_size, dtype=torch.int32) ^ first) + second)
    return _gumbel(bits)


def _draw(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    scaled = logits / torch.tensor([p.temperature for p in params])[:, None]
    for row, p in zip(scaled, params, strict=True):
        _restrict(row, p.top_k, p.top_p)
    return (scaled + gumbel_noise([p.seed for p in params], positions, logits.shape[1])).argmax(dim=-1)


def _restrict(row: Tensor, top_k: int, top_p: float) -> None:
    """Sets to -inf what top-k, then top-p over what top-k left, exclude. A tie with the last one kept is kept."""
    size = len(row)
    if 0 < top_k < size:
        row.masked_fill_(row < row.topk(top_k).values[-1], -torch.inf)
    if top_p >= 1.0:
        return
    total = row.logsumexp(0)
    for count in (min(_NUCLEUS_CANDIDATES, size), size):
        best = row.topk(count).values
        before = (best - total).exp().cumsum(0).roll(1)  # probability of all that are better
        before[0] = 0.0
        kept = int((before < top_p).sum())
        if kept < count or count == size:
            row.masked_fill_(row < best[max(kept, 1) - 1], -torch.inf)
            return


def _logprobs(logits: Tensor, params: Sequence[SamplingParams], chosen: Tensor) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = []
    for row, p, token_id in zip(logits, params, chosen.tolist(), strict=True):
        if p.logprobs is None:
            result.append(None)
            continue
        values = row.float().log_softmax(0)
        best = values.topk(min(p.logprobs, len(values)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        result.append(TokenLogprobs(token_id, float(values[token_id]), top))
    return result


def _gumbel(bits: Tensor) -> Tensor:
    """Uniform int32 to finite Gumbel. Small uniforms, which make large noise, keep all of their precision; the largest
    would round to 1 in float32, whose noise is infinite."""
    uniform = ((bits.long() & _WORD).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24)))


def _key(seed: int, position: int) -> int:
    """64 bits from (seed, position): splitmix64 over both."""
    return _splitmix(_splitmix(seed & 0xFFFF_FFFF_FFFF_FFFF) ^ position)


def _splitmix(x: int) -> int:
    mask = 0xFFFF_FFFF_FFFF_FFFF
    x = (x + 0x9E37_79B9_7F4A_7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB) & mask
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    """The finalizer of murmur3 on int32, whose products wrap as unsigned ones do."""
    x = x ^ _shift(x, 16)
    x = x * _signed(0x85EB_CA6B)
    x = x ^ _shift(x, 13)
    x = x * _signed(0xC2B2_AE35)
    return x ^ _shift(x, 16)


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
