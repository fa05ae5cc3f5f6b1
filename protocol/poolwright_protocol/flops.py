"""Arithmetic of a forward pass: one count for benches (model FLOP utilization), planner and simulator.

Counts matrix products only, a multiplication and an addition as two; what a mask hides is not counted. Norms, rotary
embedding and softmax are left out, as in PaLM's definition of utilization (Chowdhery et al., 2022, appendix B).
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputeShape:
    """`windows`: one per layer, the keys that a query sees at most; None: all before it."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    windows: tuple[int | None, ...]

    @property
    def linear_flops_per_token(self) -> int:
        """Of all layers; the language-model head not included."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_size * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        return 2 * len(self.windows) * (attention + mlp)

    def attention_flops(self, start: int, length: int) -> int:
        """Of queries at positions [start, start + length) of one sequence: query · key and weight · value."""
        keys = sum(visible_keys(start, length, window) for window in self.windows)
        return 4 * self.heads * self.head_size * keys

    def flops(self, chunks: Iterable[tuple[int, int]], num_logits: int) -> int:
        """Of one step: chunks as (start, length), and rows whose logits are computed."""
        total = 2 * num_logits * self.hidden_size * self.vocab_size
        for start, length in chunks:
            total += length * self.linear_flops_per_token + self.attention_flops(start, length)
        return total


def visible_keys(start: int, length: int, window: int | None = None) -> int:
    """(query, key) pairs of a causal mask: the query at position p sees p + 1 keys, or `window` where that is less."""
    stop = start + length
    if window is None or stop <= window:
        return (start + 1 + stop) * length // 2
    growing = max(0, window - start)  # queries that do not fill the window
    return (start + 1 + start + growing) * growing // 2 + (length - growing) * window
