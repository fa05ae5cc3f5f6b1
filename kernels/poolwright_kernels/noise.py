"""The noise of sampling: one definition, as a PyTorch reference and as the same bits within a Triton kernel.

The noise of a token is a function of (seed, position, token id) and nothing else, so a draw is the same in every batch,
after a restart, and on another machine. Two rounds of murmur3's 32-bit finalizer over the token id are keyed by 64 bits
that splitmix64 makes of seed and position: per token only 32-bit integer operations.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from poolwright_kernels.jit import jit, tl

_WORD = 0xFFFF_FFFF
_LONG = 0xFFFF_FFFF_FFFF_FFFF


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> Tensor:
    """(rows, vocab_size) float32 standard Gumbel noise, element [i, t] a function of (seeds[i], positions[i], t).

    Small uniforms, which make large noise, keep all of their precision; the largest would round to 1 in float32, whose
    noise is infinite.
    """
    bits = noise_bits(seeds, positions, vocab_size).long() & _WORD
    uniform = (bits.float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24)))


def noise_bits(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> Tensor:
    """(rows, vocab_size) int32, uniform over all 32-bit words."""
    keys = [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    first = torch.tensor([_signed(key & _WORD) for key in keys], dtype=torch.int32)[:, None]
    second = torch.tensor([_signed(key >> 32) for key in keys], dtype=torch.int32)[:, None]
    return _mix(_mix(torch.arange(vocab_size, dtype=torch.int32) ^ first) + second)


def noise_key(seed: int, position: int) -> int:
    """64 bits from (seed, position): splitmix64 over both."""
    return _splitmix(_splitmix(seed & _LONG) ^ position)


@jit
def gumbel_noise_of(seed, position, tokens):  # type: ignore[no-untyped-def]
    """Within a kernel: float32 noise of a block of token ids, from a scalar int64 seed and position."""
    uniform = (noise_bits_of(seed, position, tokens).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2⁻³²
    uniform = tl.minimum(uniform, 0.9999999403953552)  # 1 - 2⁻²⁴
    # log1p(-u) by Kahan's form: rounding 1 - u errs, and the quotient takes the same error back.
    rest = 1.0 - uniform
    taken = rest - 1.0
    exact = tl.log(rest) * tl.where(taken == 0.0, 1.0, -uniform / tl.where(taken == 0.0, 1.0, taken))
    return -tl.log(-tl.where(taken == 0.0, -uniform, exact))


@jit
def noise_bits_of(seed, position, tokens):  # type: ignore[no-untyped-def]
    """Within a kernel: the same words as `noise_bits`, as uint32."""
    key = _splitmix_of(_splitmix_of(seed.to(tl.uint64)) ^ position.to(tl.uint64))
    first = (key & 0xFFFFFFFF).to(tl.uint32)
    second = (key >> 32).to(tl.uint32)
    return _mix_of(_mix_of(tokens.to(tl.uint32) ^ first) + second)


@jit
def _splitmix_of(x):  # type: ignore[no-untyped-def]
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def _mix_of(x):  # type: ignore[no-untyped-def]
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


def _splitmix(x: int) -> int:
    x = (x + 0x9E37_79B9_7F4A_7C15) & _LONG
    x = ((x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9) & _LONG
    x = ((x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB) & _LONG
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    """On int32, whose products wrap as unsigned ones do."""
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
