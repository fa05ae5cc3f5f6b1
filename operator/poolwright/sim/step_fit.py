"""Lines fitted to a machine's step times: what `core` prices work by, and what an engine predicts its steps with.

A profile is lines by definition; here the table is measured at points, as `poolwright-engine profile` measures a
machine. Weights are never negative: a step never costs less for more work.
"""

from dataclasses import dataclass

import numpy as np

from poolwright.core.pricing import MachinePrices
from poolwright.sim.step_time import Chunk, MachineModel, StepTime
from poolwright_engine.scheduling.budget import StepPredictor, StepWork
from poolwright_protocol.least_squares import cost_weights
from poolwright_protocol.step_time import StepCost, StepProfile

_DECODES = (1, 4, 16, 64, 128, 256)
_CONTEXTS = (256, 1024, 4096)
_CHUNKS = (64, 128, 256, 512, 1024, 2048)
_STARTS = (0, 2048)
_BESIDE = ((0, 0), (16, 1024), (64, 1024))  # decodes, and the context of each


@dataclass(frozen=True, slots=True)
class StepFit:
    """`pair_seconds`: attention of a prompt token to one before it, as far as the table shows it apart. `engine`: the
    same without that part, which an engine's own predictor does not have, and `engine_margin` the most by which a step
    of the table exceeds it."""

    profile: StepProfile
    pair_seconds: float
    engine: StepProfile
    engine_margin: float


def fit(step_time: StepTime) -> StepFit:
    decode_rows = [
        ((1.0, float(decodes), float(decodes * context)), step_time.seconds((), decodes, decodes * context))
        for decodes in _DECODES
        for context in _CONTEXTS
    ]
    mixed_rows = [
        (
            (
                1.0,
                float(chunk + decodes),
                float(start + chunk + decodes * context),
                chunk * (start + chunk / 2),
            ),
            step_time.seconds((Chunk(start, chunk),), decodes, decodes * context),
        )
        for chunk in _CHUNKS
        for start in _STARTS
        for decodes, context in _BESIDE
    ]
    decode = StepCost(*cost_weights(decode_rows))
    fixed, token, kv_token, pair = cost_weights(mixed_rows)
    without_pairs = [(features[:3], seconds) for features, seconds in mixed_rows]
    engine = cost_weights(without_pairs)
    return StepFit(
        StepProfile(decode, StepCost(fixed, token, kv_token)),
        pair,
        StepProfile(decode, StepCost(*engine)),
        max(seconds / float(np.dot(features, engine)) for features, seconds in without_pairs),
    )


def prices(model: MachineModel, *, step_tokens: int = 2048, most_streams: int = 256) -> MachinePrices:
    fitted = fit(model.step_time)
    return MachinePrices(
        fitted.profile,
        step_tokens=step_tokens,
        most_streams=most_streams,
        pair_seconds=fitted.pair_seconds,
        kv_capacity_tokens=model.kv_capacity_tokens,
        kv_bytes_per_token=model.kv_bytes_per_token,
    )


class FixedPredictor(StepPredictor):
    """The engine's predictor, fitted once: an engine goes on fitting as it measures, but here the table is the
    measurement."""

    def __init__(self, step_time: StepTime) -> None:
        fitted = fit(step_time)
        super().__init__(fitted.engine, fitted.engine_margin)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Nothing that the table does not say already."""
