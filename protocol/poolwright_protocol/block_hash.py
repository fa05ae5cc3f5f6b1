"""Keys of full KV blocks: equal wherever, and only where, the cached KV is the same. One formula for all processes.

A key covers all tokens from the first on, since each names its parent; the first one's parent is the root, which names
whatever else KV depends on (the model, a tenant's salt). It knows no pool and no requests.
"""

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b

KEY_BYTES = 16  # two of 2^40 blocks share a key with probability 2^-49
_ROOT = b"poolwright kv block 1"


def root_key(**extra: str) -> bytes:
    """The parent of first blocks. Fields that are empty count as absent, so that a new one changes no older key."""
    digest = blake2b(_ROOT, digest_size=KEY_BYTES)
    for name, value in sorted(extra.items()):
        if value:
            for part in (name.encode(), value.encode()):
                digest.update(struct.pack("<I", len(part)) + part)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Of a full block with these tokens (ids below 2^32), behind the block or root `parent`."""
    return blake2b(parent + struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=KEY_BYTES).digest()


def block_keys(root: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Of the full blocks of these tokens, in order."""
    key = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        key = block_key(key, token_ids[start : start + block_size])
        yield key
