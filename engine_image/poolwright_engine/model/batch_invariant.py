"""A model whose numbers for a token do not depend on the step that computes it: chunk, neighbours, prefix hits alike.

PyTorch picks the code of an operation by the shapes it gets, and codes differ in the order of their sums. So here every
operation gets one shape: tokens go through the layers in blocks of 16, short ones filled up, and each query attends
alone. What is left to trust is that a row's place within a block of one shape changes nothing, which holds for the
products of oneMKL and oneDNN; element-wise functions that PyTorch may split between threads go row by row, since their
first and last elements may take another code than the rest. One machine with one number of threads is one such world.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_engine.model.llama import KVCache, LlamaModel, Weights
from poolwright_engine.model.model_config import ModelConfig
from poolwright_engine.model.operations import Operations, TorchOperations

_BLOCK_TOKENS = 16


class BatchInvariantModel(LlamaModel):
    """Slower on prompts: products of 16 rows read the weights more often than those of a whole chunk."""

    def __init__(self, config: ModelConfig, weights: Weights, operations: Operations | None = None) -> None:
        super().__init__(
            config, weights, operations or TorchOperations(config, weights.embedding.dtype, invariant=True)
        )

    def hidden(self, token_ids: Tensor, rows: Sequence[AttentionRow], cache: KVCache) -> Tensor:
        singles = [
            AttentionRow(position, 1, row.block_ids)
            for row in rows
            for position in range(row.start, row.start + row.length)
        ]
        parts = []
        for first in range(0, len(singles), _BLOCK_TOKENS):
            ids, block = token_ids[first : first + _BLOCK_TOKENS], singles[first : first + _BLOCK_TOKENS]
            missing = _BLOCK_TOKENS - len(block)
            # The last token again: it writes the same KV to the same place.
            full = torch.cat((ids, ids[-1:].expand(missing)))
            parts.append(super().hidden(full, [*block, *block[-1:] * missing], cache)[: len(block)])
        return torch.cat(parts)

    def logits(self, hidden: Tensor) -> Tensor:
        parts = [torch.empty(0, self.config.vocab_size)]
        for block in hidden.split(_BLOCK_TOKENS):
            full = torch.cat((block, block.new_zeros(_BLOCK_TOKENS - len(block), block.shape[1])))
            parts.append(super().logits(full)[: len(block)])
        return torch.cat(parts)

    def _capped(self, logits: Tensor) -> Tensor:
        return torch.cat([super(BatchInvariantModel, self)._capped(row) for row in logits.split(1)])
