"""`BlockPool`: who owns which KV block. Block 0 is the null block and is never given out. No torch.

A block is free, owned, or fenced: given back while a step that may still write it is in flight. Fenced blocks become
free when that step has been read. The pool knows block ids and step numbers, no sequences.
"""

from collections import deque
from collections.abc import Sequence

NEVER_WRITTEN = -1


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the null block. Raises ValueError when no other is left."""
        if num_blocks < 2:
            raise ValueError(f"a cache of {num_blocks} blocks holds nothing beside the null block")
        self._free = list(range(num_blocks - 1, 0, -1))
        self._owned: set[int] = set()
        self._fenced: deque[tuple[int, tuple[int, ...]]] = deque()
        self._num_fenced = 0
        self._last_read = NEVER_WRITTEN
        self.total = num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_owned(self) -> int:
        return len(self._owned)

    @property
    def num_fenced(self) -> int:
        return self._num_fenced

    def allocate(self, count: int) -> list[int] | None:
        """All of them or None. The block freed last comes first: its memory is the warmest."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        self._owned.update(taken)
        return taken

    def free(self, block_ids: Sequence[int], fence: int = NEVER_WRITTEN) -> None:
        """`fence`: number of the last step that may write them. Raises ValueError, changing nothing, when one of
        them is not owned."""
        if len(self._owned.intersection(block_ids)) != len(block_ids):
            raise ValueError(f"blocks {list(block_ids)} are not all owned, each once")
        self._owned.difference_update(block_ids)
        if fence <= self._last_read:
            self._free.extend(reversed(block_ids))
        elif block_ids:
            self._fenced.append((fence, tuple(block_ids)))
            self._num_fenced += len(block_ids)

    def step_read(self, number: int) -> None:
        """Every step up to `number` has ended: what it fenced is free."""
        self._last_read = max(self._last_read, number)
        still_fenced: deque[tuple[int, tuple[int, ...]]] = deque()
        for fence, block_ids in self._fenced:
            if fence <= self._last_read:
                self._free.extend(reversed(block_ids))
                self._num_fenced -= len(block_ids)
            else:
                still_fenced.append((fence, block_ids))
        self._fenced = still_fenced
