"""From logits to tokens: greedy, or Gumbel-max over what min-p, top-k and top-p leave. No sort, no softmax in memory.

All three restrictions keep the logits from some threshold up. That of min-p is known from the largest logit. The other
two are the smallest number t such that what lies strictly above t weighs less than a limit: k, where each logit weighs
1, or p times the whole, where it weighs its probability. `t` is searched among the 2³² bit patterns of float32 in their
order, with seven pivots a pass over the row, until one logit is left in question: five to eleven passes over a row that
lies in the second-level cache. A tie with the last one kept is kept.

Gumbel-max: Maddison, Tarlow and Minka, "A* Sampling", 2014. Top-p: Holtzman et al., "The Curious Case of Neural Text
Degeneration", 2020. Min-p: Nguyen et al., "Turning Up the Heat", arXiv 2407.01082.
"""

import torch
from torch import Tensor

from poolwright_kernels.jit import ceil_div, jit, power_of_two_from, tl
from poolwright_kernels.noise import gumbel_noise, gumbel_noise_of
from poolwright_kernels.ops import operation, widened

GREEDY_BELOW_TEMPERATURE = 1e-5

SEARCH_BLOCK = 1024  # logits that a program looks at in one turn
SEARCH_WARPS = 16
DRAW_BLOCK = 1024


def sample_tokens_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token id for each row: (rows,) int64.

    logits:       (rows, vocab) float, any row stride, adjacent elements; penalties and masks applied, not temperature
    temperature:  (rows,) float32; below 1e-5 the row is greedy, and the first of the largest logits wins
    top_k:        (rows,) int32; 0 or vocab and more: all
    top_p, min_p: (rows,) float32; 1 and 0: all. min-p first, then top-k, then top-p over what those left
    seeds:        (rows,) int64
    positions:    (rows,) int64: absolute positions of the tokens sampled

    Raises ValueError for shapes that do not fit.
    """
    _check(logits, temperature, top_k, top_p, min_p, seeds, positions)
    wide = widened(logits)
    greedy = temperature < GREEDY_BELOW_TEMPERATURE
    scaled = wide / torch.where(greedy, 1.0, temperature)[:, None]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    kept = ordered >= ordered[:, :1] + torch.log(min_p)[:, None]
    size = logits.shape[1]
    limits = torch.where((top_k <= 0) | (top_k > size), size, top_k).long()
    kept &= ordered >= ordered.gather(1, limits[:, None] - 1)
    probability = torch.where(kept, ordered, -torch.inf).softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability  # of all that are better, or as good and earlier
    inside = (before < top_p[:, None]) | (top_p >= 1.0)[:, None]
    last = (kept & inside).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    kept &= ordered >= ordered.gather(1, last)
    allowed = torch.zeros_like(kept).scatter(1, order, kept)
    noise = gumbel_noise(seeds.tolist(), positions.tolist(), size).to(scaled)
    noisy = torch.where(allowed, scaled, -torch.inf) + noise
    return torch.where(greedy, wide.argmax(dim=-1), noisy.argmax(dim=-1))


def sample_tokens_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    _check(logits, temperature, top_k, top_p, min_p, seeds, positions)
    rows, size = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return token_ids
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    threshold_kernel[(rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        thresholds,
        logits.stride(0),
        VOCAB=size,
        BLOCK=SEARCH_BLOCK,
        num_warps=SEARCH_WARPS,
    )
    parts = ceil_div(size, DRAW_BLOCK)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    draw_kernel[(rows, parts)](
        logits,
        temperature,
        thresholds,
        seeds,
        positions,
        best,
        best_ids,
        logits.stride(0),
        VOCAB=size,
        PARTS=parts,
        BLOCK=DRAW_BLOCK,
        num_warps=4,
    )
    pick_kernel[(rows,)](best, best_ids, token_ids, PARTS=parts, BLOCK=power_of_two_from(parts), num_warps=1)
    return token_ids


@jit
def threshold_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    thresholds,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row: the smallest logit kept, or -inf at once where nothing is restricted."""
    row = tl.program_id(0).to(tl.int64)
    warmth = tl.load(temperature + row)
    count = tl.load(top_k + row)
    nucleus = tl.load(top_p + row)
    least = tl.load(min_p + row)
    counts = (count > 0) & (count < VOCAB)
    drawn = warmth >= 1e-5  # GREEDY_BELOW_TEMPERATURE
    threshold = float("-inf")
    if drawn & (counts | (nucleus < 1.0) | (least > 0.0)):
        start = logits + row * row_stride
        column = tl.arange(0, BLOCK)
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for first in range(0, VOCAB, BLOCK):
            inside = first + column < VOCAB
            highest = tl.maximum(highest, tl.load(start + first + column, mask=inside, other=float("-inf")))
        top = tl.max(highest)
        key = _ordered(float("-inf") + tl.zeros((1,), tl.float32))
        if least > 0.0:
            key = _ordered(tl.zeros((1,), tl.float32) + (top + tl.log(least) * warmth))
        if counts:
            key = _search(start, top, warmth, count.to(tl.float32), key, VOCAB, BLOCK, False)
        if nucleus < 1.0:
            kept = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, VOCAB, BLOCK):
                inside = first + column < VOCAB
                values = tl.load(start + first + column, mask=inside, other=float("-inf")).to(tl.float32)
                kept += tl.where(_ordered(values) >= key, tl.exp((values - top) / warmth), 0.0)
            key = _search(start, top, warmth, nucleus * tl.sum(kept), key, VOCAB, BLOCK, True)
        threshold = tl.max(_unordered(key))
    tl.store(thresholds + row, threshold)


@jit
def _search(  # type: ignore[no-untyped-def]
    start, top, warmth, limit, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr
):
    """The smallest key, `least` or more, above which lies less than the limit. (1,) int32."""
    column = tl.arange(0, BLOCK)
    pivot = tl.arange(0, 8)  # the last of them is the upper end itself
    zero = tl.zeros((1,), tl.int64)
    low = zero + least.to(tl.int64) - 1  # above it lies too much, or it is excluded already
    high = zero + _ordered(top + tl.zeros((1,), tl.float32)).to(tl.int64)  # above it lies nothing
    questioned = 2  # logits in (low, high]
    while (tl.max(high - low) > 1) & (questioned > 1):
        pivots = low + ((high - low) * (pivot + 1) + 7) // 8
        words = pivots.to(tl.int32)
        weights = tl.zeros((BLOCK, 8), tl.float32)
        numbers = tl.zeros((BLOCK, 8), tl.int32)
        for first in range(0, VOCAB, BLOCK):
            inside = first + column < VOCAB
            values = tl.load(start + first + column, mask=inside, other=float("-inf")).to(tl.float32)
            above = (_ordered(values)[:, None] > words[None, :]) & inside[:, None]
            numbers += above.to(tl.int32)
            if MASS:
                weights += tl.where(above, tl.exp((values - top) / warmth)[:, None], 0.0)
        totals = tl.sum(numbers, axis=0)
        sums = tl.sum(weights, axis=0) if MASS else totals.to(tl.float32)
        enough = sums < limit
        high_next = tl.min(tl.where(enough, pivots, high))
        low_next = tl.max(tl.where(enough, low, pivots))
        # Logits above the new ends, from the pivots that they are; above the old low end, more than at any pivot.
        above_high = tl.max(tl.where(enough, totals, 0))
        above_low = tl.min(tl.where(enough, 2147483647, totals))
        high = zero + high_next
        low = zero + low_next
        questioned = above_low - above_high
    return (low + 1).to(tl.int32)


@jit
def _ordered(values):  # type: ignore[no-untyped-def]
    """float32 to int32 of the same order; both zeros are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _unordered(keys):  # type: ignore[no-untyped-def]
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def draw_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    thresholds,
    seeds,
    positions,
    best,
    best_ids,
    row_stride,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each (row, part of the vocabulary): the best noisy logit of the part, and its token."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * row_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    warmth = tl.load(temperature + row)
    if warmth >= 1e-5:  # GREEDY_BELOW_TEMPERATURE
        noise = gumbel_noise_of(tl.load(seeds + row), tl.load(positions + row), token)
        values = tl.where(values >= tl.load(thresholds + row), values / warmth + noise, float("-inf"))
    value, index = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * PARTS + part, value)
    tl.store(best_ids + row * PARTS + part, part * BLOCK + index)


@jit
def pick_kernel(best, best_ids, token_ids, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for each row: the best of its parts, the first where they tie."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    values = tl.load(best + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    _, index = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(token_ids + row, tl.load(best_ids + row * PARTS + index).to(tl.int64))


def _check(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(f"logits {tuple(logits.shape)} are not (rows, vocab) with adjacent elements")
    for name, column in (
        ("temperature", temperature),
        ("top_k", top_k),
        ("top_p", top_p),
        ("min_p", min_p),
        ("seeds", seeds),
        ("positions", positions),
    ):
        if column.shape != logits.shape[:1] or not column.is_contiguous():
            raise ValueError(f"{name} {tuple(column.shape)} is not one number for each of {logits.shape[0]} rows")


sample_tokens = operation(
    "sample_tokens",
    reference=sample_tokens_reference,
    cuda=sample_tokens_triton,
    fake=lambda logits, *others: logits.new_empty(logits.shape[0], dtype=torch.int64),
)
