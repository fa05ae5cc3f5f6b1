"""From one row of logits to a token and its log probabilities, on a CPU. A row is all it sees: no batch can change it.

In this order, each stage only if the request asks for it:

1.  log probabilities and rank, of the raw logits;
2.  allowed tokens: those of the list and of the guide; no ending before `min_tokens`, unless nothing else is left; then
    `logit_bias` is added;
3.  penalties: repetition (of prompt and output: a positive logit is divided, another multiplied), frequency (times the
    count in the output), presence (in the output at all);
4.  the most likely token, if greedy; otherwise temperature;
5.  min-p against the most likely token, top-k, and top-p over what those two left;
6.  Gumbel noise; the largest sum is the token drawn.

The noise of a token is a function of (seed, position, token id) and nothing else, so a draw is the same in every batch,
after a restart, and on another machine. In NumPy, whose loops over one row cost a fraction of PyTorch's.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from poolwright_engine.sampling.slot_memory import SlotMemory, TokenCounts
from poolwright_engine.scheduling.sequence import SamplingParams, TokenLogprobs
from poolwright_kernels.noise import noise_key

GREEDY_BELOW_TEMPERATURE = 1e-5
_LARGEST = 1e30  # a float32 that stays finite also when divided by the lowest temperature
_NUCLEUS_CANDIDATES = 1024  # a nucleus is nearly always smaller; if not, the whole row is sorted

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprobs: TokenLogprobs | None


class NoFiniteLogits(Exception):
    """The model computed no number for this row, or it was left no token to choose from."""


def sample(logits: Logits, params: SamplingParams, position: int, memory: SlotMemory | None = None) -> Sampled:
    """The token at absolute `position`. logits: (vocab,), left as they are. `memory` is there if the request has a use
    for it; the caller notes the token in it. Raises NoFiniteLogits, and what `memory` raises."""
    best = _most_likely(logits)
    token_id = best
    if memory is not None:
        shaped = _shaped(logits, params, memory)
        best = _most_likely(shaped)
        token_id = best if _is_greedy(params) else _draw(shaped, shaped[best], params, position)
    elif not _is_greedy(params):
        token_id = _draw(logits, logits[best], params, position)
    return Sampled(token_id, None if params.logprobs is None else logprobs_of(logits, token_id, params.logprobs))


def logprobs_of(logits: Logits, token_id: int, count: int) -> TokenLogprobs:
    """Of one token and of the `count` most likely ones, best first; -1: of all. Ties in rank and list favour the lower
    id, and tokens as likely as one another have one rank."""
    highest = logits.max()
    total = highest + np.log(np.exp(logits - highest).sum())
    value = logits[token_id]
    rank = int(np.count_nonzero(logits > value)) + 1
    size = len(logits)
    if count == 0:
        return TokenLogprobs(token_id, float(value - total), (), rank)
    if 0 < count < size:
        ids = np.flatnonzero(logits >= np.partition(logits, size - count)[size - count])
        ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
    else:
        ids = np.argsort(-logits, kind="stable")
    top = tuple(zip(ids.tolist(), (logits[ids] - total).tolist(), strict=True))
    return TokenLogprobs(token_id, float(value - total), top, rank)


def gumbel_noise(seed: int, position: int, token_ids: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Standard Gumbel noise of some tokens, from the same bits as `poolwright_kernels.noise`. Finite: small uniforms,
    which make large noise, keep all of their precision, and the largest would round to 1, whose noise is infinite."""
    uniform = noise_bits(seed, position, token_ids).astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2.0**-32)
    np.minimum(uniform, np.float32(1.0 - 2.0**-24), out=uniform)
    for function in (np.negative, np.log1p, np.negative, np.log, np.negative):
        function(uniform, out=uniform)
    return uniform


def noise_bits(seed: int, position: int, token_ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
    key = noise_key(seed, position)
    bits = token_ids ^ np.uint32(key & 0xFFFF_FFFF)
    scratch = np.empty_like(bits)
    _mix(bits, scratch)
    bits += np.uint32(key >> 32)
    _mix(bits, scratch)
    return bits


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW_TEMPERATURE


def _most_likely(logits: Logits) -> int:
    """A NaN anywhere is what argmax finds."""
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise NoFiniteLogits("the model's output is not finite")
    return best


def _shaped(logits: Logits, params: SamplingParams, memory: SlotMemory) -> Logits:
    """A copy that allowed tokens, biases and penalties have been applied to."""
    shaped = logits.copy()
    if memory.is_masked:
        shaped[~memory.allowed(memory.guide, memory.num_output)] = -np.inf
    elif not memory.may_end:
        shaped[memory.ending_ids] = -np.inf
    if len(memory.bias_ids):
        shaped[memory.bias_ids] += memory.biases
    if memory.counts is not None:
        _penalise(shaped, params, memory.counts)
    return shaped


def _penalise(logits: Logits, params: SamplingParams, counts: TokenCounts) -> None:
    values, allowed = logits[counts.ids], logits[counts.ids] > -np.inf
    with np.errstate(over="ignore"):  # what overflows is clipped below
        if params.repetition_penalty != 1:
            penalty = np.float32(np.clip(params.repetition_penalty, 1 / _LARGEST, _LARGEST))
            values = np.where(values > 0, values / penalty, values * penalty)
        values -= _bounded(params.frequency_penalty) * counts.outputs
        values -= _bounded(params.presence_penalty) * (counts.outputs > 0)
    logits[counts.ids] = np.where(allowed, np.clip(values, -_LARGEST, _LARGEST), -np.inf)


def _bounded(value: float) -> np.float32:
    return np.float32(np.clip(value, -_LARGEST, _LARGEST))


def _draw(logits: Logits, highest: np.float32, params: SamplingParams, position: int) -> int:
    temperature = _bounded(params.temperature)
    scaled = logits if temperature == 1 else logits / temperature
    floor = _floor(scaled, highest / temperature, params)
    if floor == -np.inf:
        noise = gumbel_noise(params.seed, position, np.arange(len(scaled), dtype=np.uint32))
        noise += scaled
        return int(noise.argmax())
    ids = np.flatnonzero(scaled >= floor)
    if len(ids) == 1:
        return int(ids[0])
    return int(ids[(scaled[ids] + gumbel_noise(params.seed, position, ids.astype(np.uint32))).argmax()])


def _floor(scaled: Logits, highest: np.float32, params: SamplingParams) -> np.float32:
    """The lowest logit that min-p, top-k and top-p leave. A tie with the last one kept is kept."""
    floor, size = np.float32(-np.inf), len(scaled)
    if params.min_p > 0:
        floor = highest + np.log(np.float32(params.min_p))
    if 0 < params.top_k < size:
        floor = max(floor, np.partition(scaled, size - params.top_k)[size - params.top_k])
    if params.top_p < 1:
        left = scaled if floor == -np.inf else scaled[scaled >= floor]
        floor = max(floor, _nucleus(left, highest, params.top_p))
    return floor


def _nucleus(logits: Logits, highest: np.float32, top_p: float) -> np.float32:
    """The lowest logit of the fewest best tokens whose probabilities reach top_p."""
    size, total = len(logits), np.exp(logits - highest).sum()
    count = min(_NUCLEUS_CANDIDATES, size)
    while True:
        best = logits if count == size else np.partition(logits, size - count)[size - count :]
        best = np.sort(best)[::-1]
        reached = np.cumsum(np.exp(best - highest), dtype=np.float64) >= top_p * total
        if reached.any():
            return np.float32(best[reached.argmax()])
        if count == size:
            return np.float32(best[-1])
        count = size


def _mix(bits: NDArray[np.uint32], scratch: NDArray[np.uint32]) -> None:
    """murmur3's 32-bit finalizer, in place."""
    for shift, factor in ((16, 0x85EB_CA6B), (13, 0xC2B2_AE35)):
        np.right_shift(bits, shift, out=scratch)
        bits ^= scratch
        bits *= np.uint32(factor)
    np.right_shift(bits, 16, out=scratch)
    bits ^= scratch
