"""Keys of KV blocks for requests without text: equal where the trace says that the prompts are equal up to there."""

import struct
from collections.abc import Sequence

from poolwright.sim.request import Arrival, Request


def block_keys(request: Request, block_tokens: int) -> list[bytes]:
    """Of all its full blocks, answer included."""
    full = (request.prompt_tokens + request.output_tokens) // block_tokens
    keys = shared_keys(request, block_tokens)
    own = request.number
    return keys + [struct.pack("<Bqq", 1, own, index) for index in range(len(keys), full)]


def shared_keys(request: Request | Arrival, block_tokens: int) -> list[bytes]:
    """Of the full blocks that lie in prefix blocks the trace names."""
    named = len(request.prefix) * request.prefix_block_tokens
    count = min(named, request.prompt_tokens) // block_tokens
    return [_named(request.prefix, index * block_tokens, request.prefix_block_tokens) for index in range(count)]


def _named(prefix: Sequence[int], position: int, size: int) -> bytes:
    return struct.pack("<Bqq", 0, prefix[position // size], position)
