"""CUDA graphs of forward passes, by the shape they are made for: one launch instead of hundreds.

Attention takes its work list, with all counts, from device memory, and its launch grid is fixed; so a mixed step is one
graph too, for a bucket of token counts, and no layer's attention needs to be cut out of it (as piecewise graphs do).
Steps larger than the largest bucket run without a graph: there the device, not the host, is what is waited for.
Captured largest first, so that all graphs share the memory of the largest.

Knows shapes and a function to capture; no model, no batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from poolwright_engine.cuda.batch import StepShape

_MIXED_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Shapes that steps are padded to, ascending: rows of decodes, tokens of mixed steps."""

    decode_rows: tuple[int, ...] = ()
    mixed_tokens: tuple[int, ...] = ()

    def shape(self, rows: int, tokens: int, decodes: bool, max_rows: int) -> StepShape:
        """The smallest that holds the step; the step's own where none does."""
        if decodes:
            size = next((size for size in self.decode_rows if size >= rows), rows)
            return StepShape(size, size, True)
        return StepShape(next((size for size in self.mixed_tokens if size >= tokens), tokens), max_rows, False)

    def shapes(self, max_rows: int) -> list[StepShape]:
        """Largest first."""
        found = [StepShape(size, size, True) for size in self.decode_rows]
        found += [StepShape(size, max_rows, False) for size in self.mixed_tokens]
        return sorted(found, key=lambda shape: shape.tokens, reverse=True)


NO_GRAPHS = GraphSizes()


def graph_sizes(max_num_seqs: int, max_num_batched_tokens: int, most: int = 512) -> GraphSizes:
    """Decodes at 1, 2, 4, 8, 16, 24 … of at most `most` rows; mixed at sizes a third apart or nearer, and the full
    budget where that is no larger than the largest of them."""
    rows = min(max_num_seqs, most)
    tokens = [size for size in _MIXED_TOKENS if size < max_num_batched_tokens]
    if max_num_batched_tokens <= _MIXED_TOKENS[-1]:
        tokens.append(max_num_batched_tokens)
    return GraphSizes(
        decode_rows=tuple(sorted({size for size in (1, 2, 4, *range(8, rows, 8)) if size < rows} | {rows})),
        mixed_tokens=tuple(tokens),
    )


class Graphs:
    """`body` works on memory that keeps its place, and what it returns keeps its place too: the next replay of any
    shape overwrites it."""

    def __init__(self, body: Callable[[StepShape], tuple[Any, ...]]) -> None:
        self._body = body
        self._captured: dict[StepShape, tuple[torch.cuda.CUDAGraph, tuple[Any, ...]]] = {}
        self._pool: Any = None

    def capture(self, shape: StepShape) -> None:
        """The batch is loaded with padding of this shape. The first run compiles what it needs, which a capture may
        not."""
        self._body(shape)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = self._body(shape)
        self._pool = self._pool or graph.pool()
        self._captured[shape] = graph, results

    def run(self, shape: StepShape) -> tuple[Any, ...]:
        found = self._captured.get(shape)
        if found is None:
            return self._body(shape)
        graph, results = found
        graph.replay()
        return results

    def clear(self) -> None:
        self._captured.clear()
