"""Rotary frequencies: the plain ones, and the scalings that a checkpoint may ask for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class RopeScalingUnsupported(Exception):
    """A rotary scaling this engine does not know, or one that lacks a number."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float

    def __call__(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int

    def __call__(self, frequencies: Tensor) -> Tensor:
        turns = self.original_context_length * frequencies / (2 * math.pi)  # wavelengths in the original context
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = blend.clamp(0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


RopeScaling = LinearScaling | Llama3Scaling


def inverse_frequencies(theta: float, head_size: int, scaling: RopeScaling | None = None) -> Tensor:
    """(head_size / 2,) float32: radians per position of each rotated pair. Raises RopeScalingUnsupported."""
    if theta < 1:
        raise RopeScalingUnsupported(f"rope theta {theta} is less than 1")
    frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
    return frequencies if scaling is None else scaling(frequencies)


def parse_scaling(raw: Mapping[str, Any], context_length: int = 0) -> RopeScaling | None:
    """From `rope_scaling` or `rope_parameters` of a config.json. Raises RopeScalingUnsupported."""
    kind = raw.get("rope_type") or raw.get("type") or "default"
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return LinearScaling(_positive(raw["factor"]))
        if kind == "llama3":
            return Llama3Scaling(
                factor=_positive(raw["factor"]),
                low_freq_factor=_positive(raw["low_freq_factor"]),
                high_freq_factor=_positive(raw["high_freq_factor"]),
                original_context_length=int(raw.get("original_max_position_embeddings") or context_length),
            )
    except (KeyError, TypeError, ValueError) as error:
        raise RopeScalingUnsupported(f"rope scaling {kind} lacks a usable number: {error}") from error
    raise RopeScalingUnsupported(f"rope scaling {kind} is not supported (supported: linear, llama3)")


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{number} is not positive")
    return number
