"""What a step of an engine holds, in the words of the simulator's step times."""

from typing import NamedTuple

from poolwright.sim.step_time import Chunk
from poolwright_engine.scheduling.runner import Step


class StepContent(NamedTuple):
    chunks: tuple[Chunk, ...]
    decodes: int
    context_tokens: int  # KV that the decodes attend to, their own included


def work_of(step: Step) -> StepContent:
    """A chunk of a single token costs what a decode does, and counts as one."""
    chunks: list[Chunk] = []
    decodes = context = 0
    for start, row in zip(step.starts, step.rows, strict=True):
        if row.length == 1:
            decodes += 1
            context += start + 1
        else:
            chunks.append(Chunk(start, row.length))
    return StepContent(tuple(chunks), decodes, context)
