"""KV cache sizes: one formula for engine, planner and simulator."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token costs. `dtype_bytes` is 4 for float32, 2 for bfloat16 and float16."""

    layers: int
    kv_heads: int
    head_size: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """2 (K and V) · layers · kv_heads · head_size · dtype_bytes."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.dtype_bytes

    def bytes_per_block(self, block_size: int) -> int:
        return self.bytes_per_token * block_size

    def blocks_in(self, capacity_bytes: int, block_size: int) -> int:
        """Whole blocks that fit, the null block included."""
        return capacity_bytes // self.bytes_per_block(block_size)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)
