"""`BlockPool`: who holds which KV block, and which full blocks can be used again. No torch, no sequences.

A block is free or held by references; one that was computed in full may carry a key (`poolwright_protocol.block_hash`),
by which it is found again, held or free, until it is given out for something else. Block 0 is the null block and is
never given out.

Free blocks stand in one list, linked through the blocks themselves, so that a hit takes one out of the middle. Blocks
without a key go to its front (the one freed last is used first: its memory is the warmest), blocks with a key to its
end, the tail of a table before its head: what is evicted is what was not used for longest, and of that the longest
prefixes.

A free may be fenced by a step in flight that can still write the block: then the reference is kept until that step has
been read. A fenced block that carries a key can be hit meanwhile.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

NEVER_WRITTEN = -1


class BrokenInvariant(RuntimeError):
    """The books do not balance: a defect of the engine, never of a request."""


class _Block:
    __slots__ = ("id", "key", "next", "previous", "references")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.references = 0
        self.key: bytes | None = None
        self.previous = self  # of the free list; itself while held
        self.next = self


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0, block_bytes: int = 0) -> None:
        """`num_blocks` counts the null block. Raises ValueError when no other is left."""
        if num_blocks < 2:
            raise ValueError(f"a cache of {num_blocks} blocks holds nothing beside the null block")
        self.total = num_blocks - 1
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.host = HostBlocks(num_host_blocks)
        self.num_free = 0
        self._blocks = [_Block(block_id) for block_id in range(num_blocks)]
        self._ends = self._blocks[0]  # the null block closes the ring: its next is the front, its previous the end
        self._by_key: dict[bytes, _Block] = {}
        self._fenced: deque[tuple[int, tuple[int, ...]]] = deque()
        self._last_read = NEVER_WRITTEN
        for block in self._blocks[1:]:
            self._link(block, self._ends.previous)

    @property
    def num_fenced(self) -> int:
        """Blocks that only a fence holds back. Walks what is fenced."""
        fences = Counter(block_id for _, block_ids in self._fenced for block_id in block_ids)
        return sum(self._blocks[block_id].references == count for block_id, count in fences.items())

    @property
    def num_owned(self) -> int:
        return self.total - self.num_free - self.num_fenced

    @property
    def num_keyed(self) -> int:
        """Blocks that can be hit, held or free."""
        return len(self._by_key)

    def allocate(self, count: int) -> list[int] | None:
        """All of them or None. What they cached before is forgotten."""
        if count > self.num_free:
            return None
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> int:
        """Where one is free."""
        ends = self._ends
        block = ends.next
        ends.next = block.next  # `_unlink` of the first, which steps do all the time
        ends.next.previous = ends
        block.previous = block.next = block
        self.num_free -= 1
        block.references = 1
        if block.key is not None:
            del self._by_key[block.key]
            block.key = None
        return block.id

    def free(self, block_ids: Sequence[int], fence: int = NEVER_WRITTEN) -> None:
        """Give back one reference to each. `fence`: number of the last step that may write them. Raises ValueError,
        changing nothing, when one of them is not held, or named twice."""
        blocks = self._blocks
        if len(set(block_ids)) != len(block_ids) or not all(
            0 < block_id < len(blocks) and blocks[block_id].references for block_id in block_ids
        ):
            raise ValueError(f"blocks {list(block_ids)} are not all held, each once")
        if fence <= self._last_read:
            self._release(block_ids)
        elif block_ids:
            self._fenced.append((fence, tuple(block_ids)))

    def step_read(self, number: int) -> None:
        """Every step up to `number` has ended: what it fenced is free."""
        self._last_read = max(self._last_read, number)
        if not self._fenced:
            return
        still_fenced: deque[tuple[int, tuple[int, ...]]] = deque()
        for fence, block_ids in self._fenced:
            if fence <= self._last_read:
                self._release(block_ids)
            else:
                still_fenced.append((fence, block_ids))
        self._fenced = still_fenced

    # The prefix cache.

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix of these keys that is cached."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block.id)
        return found

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        return sum(not self._blocks[block_id].references for block_id in block_ids)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that `find` found."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if not block.references:
                self._unlink(block)
            block.references += 1

    def publish(self, block_id: int, key: bytes) -> None:
        """A held block's contents are computed, or will be by a step submitted before any that may find them. Where
        the key is taken, the block that has it keeps it: tables never change afterwards."""
        block = self._blocks[block_id]
        if key not in self._by_key and block.key is None:
            block.key = key
            self._by_key[key] = block

    def forget(self) -> None:
        """Nothing is found any more; nothing that is held changes."""
        for block in self._by_key.values():
            block.key = None
        self._by_key.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """`tables`: every block table there is. Raises BrokenInvariant. Walks everything."""
        expected = Counter(block_id for table in tables for block_id in table)
        expected.update(block_id for _, block_ids in self._fenced for block_id in block_ids)
        for block in self._blocks:
            if block.references != expected[block.id]:
                raise BrokenInvariant(f"block {block.id}: {block.references} references, {expected[block.id]} holders")
            if block.key is not None and self._by_key.get(block.key) is not block:
                raise BrokenInvariant(f"block {block.id} has a key by which it is not found")
        if sum(block.key is not None for block in self._blocks) != len(self._by_key):
            raise BrokenInvariant("a key finds a block that does not have it")
        free = set()
        block = self._ends.next
        while block is not self._ends:
            if block.id in free or block.references or block.next.previous is not block:
                raise BrokenInvariant(f"block {block.id} is in the free list twice, or held")
            free.add(block.id)
            block = block.next
        held = sum(block.references > 0 for block in self._blocks)
        if len(free) != self.num_free or len(free) + held != self.total:
            raise BrokenInvariant(f"{len(free)} of {self.num_free} free, {held} held, {self.total} in all")

    def _release(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            block.references -= 1
            if not block.references:
                self._link(block, self._ends if block.key is None else self._ends.previous)

    def _link(self, block: _Block, after: _Block) -> None:
        block.previous, block.next = after, after.next
        after.next.previous = block
        after.next = block
        self.num_free += 1

    def _unlink(self, block: _Block) -> None:
        block.previous.next, block.next.previous = block.next, block.previous
        block.previous = block.next = block
        self.num_free -= 1


class HostBlocks:
    """Blocks of host memory. Copies to and from them are done in order: one that is given back can be used at once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def free(self, host_block_ids: Sequence[int]) -> None:
        self._free.extend(reversed(host_block_ids))

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        held = Counter(block_id for table in tables for block_id in table)
        if sorted([*self._free, *held.elements()]) != list(range(self.total)):
            raise BrokenInvariant("host blocks are not all free or held, each once")
