"""What changes logits before the draw: penalties of tokens that were there, biases, and the tokens allowed.

What the sampler remembers of a sequence is kept by seat, on the device: which ids its prompt has, a bit each, and how
often each id was put out. `remember_tokens` carries both on. The repetition penalty is that of Keskar et al., "CTRL",
2019 (arXiv 1909.05858); presence and frequency penalties are those of OpenAI's API.
"""

import torch
from torch import Tensor

from poolwright_kernels.jit import ceil_div, jit, jit_with_counts, tl
from poolwright_kernels.ops import operation

BLOCK = 1024


def penalize_reference(
    logits: Tensor,
    seats: Tensor,
    prompt_bits: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Changes logits in place: those of ids in prompt or output are divided by `repetition` if above 0, else multiplied
    by it; then `frequency` · count and, where the count is not 0, `presence` are taken off.

    logits:         (rows, vocab) float32, any row stride, adjacent elements
    seats:          (rows,) int64: rows of the two below; -1: the row stays as it is
    prompt_bits:    (seats, ceil(vocab / 32)) int32: bit t % 32 of word t // 32 is id t
    output_counts:  (seats, vocab) int32
    repetition, presence, frequency: (rows,) float32; 1, 0, 0: nothing changes

    Raises ValueError where what is remembered is of another vocabulary.
    """
    _check_state(logits, prompt_bits, output_counts)
    for row, seat in enumerate(seats.tolist()):
        if seat < 0:
            continue
        counts = output_counts[seat]
        seen = (counts > 0) | _bits(prompt_bits[seat], logits.shape[1])
        values = logits[row]
        repeated = torch.where(values > 0, values / repetition[row], values * repetition[row])
        values = torch.where(seen, repeated, values)
        logits[row] = values - frequency[row] * counts - presence[row] * (counts > 0)


def bias_logits_reference(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """logits[rows[i], token_ids[i]] += values[i], in place. logits as for `penalize`; rows, token_ids: (pairs,) int64,
    the pairs distinct, a row of -1 is padding; values: (pairs,) float32, -inf forbids a token."""
    kept = rows >= 0
    place = (rows[kept], token_ids[kept])
    logits[place] = logits[place] + values[kept]


def mask_logits_reference(logits: Tensor, allowed_bits: Tensor) -> None:
    """Sets to -inf, in place, the logits of ids whose bit is 0. logits as for `penalize`; allowed_bits: (rows,
    ceil(vocab / 32)) int32, as guides make them. Raises ValueError for another number of words."""
    if allowed_bits.shape != (logits.shape[0], ceil_div(logits.shape[1], 32)):
        raise ValueError(f"{tuple(allowed_bits.shape)} words of bits for logits {tuple(logits.shape)}")
    for row in range(logits.shape[0]):
        logits[row].masked_fill_(~_bits(allowed_bits[row], logits.shape[1]), -torch.inf)


def remember_tokens_reference(
    seats: Tensor, token_ids: Tensor, prompt: bool, prompt_bits: Tensor, output_counts: Tensor
) -> None:
    """Adds tokens to what is remembered, in place: to the prompt's bits or to the output's counts. seats, token_ids:
    (tokens,) int64, a seat of -1 is padding; an id may come more than once. For the other two see `penalize`."""
    for seat, token_id in zip(seats.tolist(), token_ids.tolist(), strict=True):
        if seat < 0:
            continue
        if prompt:
            bit = 1 << token_id % 32
            prompt_bits[seat, token_id // 32] |= bit - (1 << 32) if bit >= 1 << 31 else bit
        else:
            output_counts[seat, token_id] += 1


def penalize_triton(
    logits: Tensor,
    seats: Tensor,
    prompt_bits: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    _check_state(logits, prompt_bits, output_counts)
    rows, size = logits.shape
    if rows > 0:
        penalize_kernel[(rows, ceil_div(size, BLOCK))](
            logits,
            seats,
            prompt_bits,
            output_counts,
            repetition,
            presence,
            frequency,
            logits.stride(0),
            prompt_bits.stride(0),
            output_counts.stride(0),
            VOCAB=size,
            BLOCK=BLOCK,
            num_warps=4,
        )


def bias_logits_triton(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    if rows.numel() > 0:
        grid = (ceil_div(rows.numel(), BLOCK),)
        bias_logits_kernel[grid](
            logits, rows, token_ids, values, rows.numel(), logits.stride(0), BLOCK=BLOCK, num_warps=4
        )


def mask_logits_triton(logits: Tensor, allowed_bits: Tensor) -> None:
    rows, size = logits.shape
    if allowed_bits.shape != (rows, ceil_div(size, 32)):
        raise ValueError(f"{tuple(allowed_bits.shape)} words of bits for logits {tuple(logits.shape)}")
    if rows > 0:
        mask_logits_kernel[(rows, ceil_div(size, BLOCK))](
            logits, allowed_bits, logits.stride(0), allowed_bits.stride(0), VOCAB=size, BLOCK=BLOCK, num_warps=4
        )


def remember_tokens_triton(
    seats: Tensor, token_ids: Tensor, prompt: bool, prompt_bits: Tensor, output_counts: Tensor
) -> None:
    if seats.numel() > 0:
        remember_tokens_kernel[(ceil_div(seats.numel(), BLOCK),)](
            seats,
            token_ids,
            prompt_bits,
            output_counts,
            seats.numel(),
            prompt_bits.stride(0),
            output_counts.stride(0),
            PROMPT=prompt,
            BLOCK=BLOCK,
            num_warps=4,
        )


@jit
def penalize_kernel(  # type: ignore[no-untyped-def]
    logits,
    seats,
    prompt_bits,
    output_counts,
    repetition,
    presence,
    frequency,
    logits_stride,
    bits_stride,
    counts_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each (row, block of ids)."""
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    if seat >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < VOCAB
        place = logits + row * logits_stride + token
        values = tl.load(place, mask=inside, other=0.0)
        counts = tl.load(output_counts + seat * counts_stride + token, mask=inside, other=0)
        words = tl.load(prompt_bits + seat * bits_stride + token // 32, mask=inside, other=0)
        seen = (counts > 0) | (((words >> (token % 32)) & 1) != 0)
        factor = tl.load(repetition + row)
        values = tl.where(seen, tl.where(values > 0, values / factor, values * factor), values)
        values -= tl.load(frequency + row) * counts.to(tl.float32)
        values -= tl.where(counts > 0, tl.load(presence + row), 0.0)
        tl.store(place, values, mask=inside)


@jit_with_counts("pairs")
def bias_logits_kernel(  # type: ignore[no-untyped-def]
    logits, rows, token_ids, values, pairs, logits_stride, BLOCK: tl.constexpr
):
    """One program for each block of pairs."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + pair, mask=pair < pairs, other=-1)
    kept = row >= 0
    place = logits + row * logits_stride + tl.load(token_ids + pair, mask=kept, other=0)
    value = tl.load(place, mask=kept, other=0.0) + tl.load(values + pair, mask=kept, other=0.0)
    tl.store(place, value, mask=kept)


@jit
def mask_logits_kernel(  # type: ignore[no-untyped-def]
    logits, allowed_bits, logits_stride, bits_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for each (row, block of ids). Only what is forbidden is written."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(allowed_bits + row * bits_stride + token // 32, mask=token < VOCAB, other=-1)
    forbidden = ((words >> (token % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + token, float("-inf"), mask=forbidden & (token < VOCAB))


@jit_with_counts("tokens")
def remember_tokens_kernel(  # type: ignore[no-untyped-def]
    seats,
    token_ids,
    prompt_bits,
    output_counts,
    tokens,
    bits_stride,
    counts_stride,
    PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each block of tokens. Atomics: an id may come twice."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seat = tl.load(seats + index, mask=index < tokens, other=-1)
    kept = seat >= 0
    token = tl.load(token_ids + index, mask=kept, other=0)
    if PROMPT:
        bit = (tl.full((BLOCK,), 1, tl.int32) << (token % 32).to(tl.int32)).to(tl.int32)
        tl.atomic_or(prompt_bits + seat * bits_stride + token // 32, bit, mask=kept)
    else:
        one = tl.full((BLOCK,), 1, tl.int32)
        tl.atomic_add(output_counts + seat * counts_stride + token, one, mask=kept)


def _bits(words: Tensor, size: int) -> Tensor:
    """(words,) int32 to (size,) bool."""
    return ((words[:, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1).flatten()[:size] != 0


def _check_state(logits: Tensor, prompt_bits: Tensor, output_counts: Tensor) -> None:
    if prompt_bits.shape[1] != ceil_div(logits.shape[1], 32) or output_counts.shape[1] != logits.shape[1]:
        raise ValueError(
            f"prompt_bits {tuple(prompt_bits.shape)} and output_counts {tuple(output_counts.shape)} do not fit"
            f" {logits.shape[1]} tokens"
        )


penalize = operation(
    "penalize",
    reference=penalize_reference,
    cuda=penalize_triton,
    fake=lambda logits, *others: None,
    mutates=("logits",),
)
bias_logits = operation(
    "bias_logits",
    reference=bias_logits_reference,
    cuda=bias_logits_triton,
    fake=lambda logits, rows, token_ids, values: None,
    mutates=("logits",),
)
mask_logits = operation(
    "mask_logits",
    reference=mask_logits_reference,
    cuda=mask_logits_triton,
    fake=lambda logits, allowed_bits: None,
    mutates=("logits",),
)
remember_tokens = operation(
    "remember_tokens",
    reference=remember_tokens_reference,
    cuda=remember_tokens_triton,
    fake=lambda seats, token_ids, prompt, prompt_bits, output_counts: None,
    mutates=("prompt_bits", "output_counts"),
)
