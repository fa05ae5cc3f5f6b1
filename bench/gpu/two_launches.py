"""The baseline that one launch is to beat: chunks and decodes in a launch of their own each, on two streams at once."""

from collections.abc import Callable

import torch
from bench.gpu.paged import PagedBatch
from torch import Tensor


def two_launches(batch: PagedBatch) -> Callable[[], Tensor]:
    """Sequences with one query lie together, before or after the others. Both kernels are those of the one launch, with
    the tiles and the grid that each would choose alone."""
    parts = [
        batch.part([i for i, (query, _) in enumerate(batch.lens) if (query == 1) == is_decode])
        for is_decode in (False, True)
    ]
    chunks, decodes = (part.ours() for part in parts)
    if batch.device.type != "cuda":
        return lambda: (chunks(), decodes())[1]
    side = torch.cuda.Stream()

    def call() -> Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        chunks()
        with torch.cuda.stream(side):
            output = decodes()
        main.wait_stream(side)
        return output

    return call
