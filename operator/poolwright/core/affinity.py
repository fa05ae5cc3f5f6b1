"""Which machines are believed to hold the KV of a prompt's beginning: keys of its blocks, as this router sent them.

Owns the bookkeeping, bounded like the caches it mirrors; what a hit is worth is the price list's to say. What keys are
made of is the caller's: equal keys mean equal text up to there.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class PrefixIndex:
    """`most_blocks`: of one machine; the least recently used are forgotten first."""

    def __init__(self, most_blocks: int = 8192) -> None:
        self._most_blocks = most_blocks
        self._held: dict[str, OrderedDict[Hashable, None]] = {}
        self._holders: dict[Hashable, set[str]] = {}

    def record(self, uid: str, keys: Sequence[Hashable]) -> None:
        """This machine has computed, or been given, the KV of these blocks."""
        held = self._held.setdefault(uid, OrderedDict())
        for key in reversed(keys):  # the first block is of most use, so it is the last to be forgotten
            held[key] = None
            held.move_to_end(key)
            self._holders.setdefault(key, set()).add(uid)
        while len(held) > self._most_blocks:
            key, _ = held.popitem(last=False)
            self._drop(uid, key)

    def blocks(self, keys: Sequence[Hashable]) -> dict[str, int]:
        """By machine, how many blocks from the first on it holds; machines that hold none are absent."""
        found: dict[str, int] = {}
        following = self._holders.get(keys[0], set()) if keys else set()
        for depth, key in enumerate(keys):
            holders = self._holders.get(key, set())
            if not following <= holders:  # most often all go on
                found.update(dict.fromkeys(following - holders, depth))
                following = following & holders
                if not following:
                    return found
        found.update(dict.fromkeys(following, len(keys)))
        return found

    def keep(self, uids: Iterable[str]) -> None:
        """These are the machines now."""
        alive = set(uids)
        for uid in [uid for uid in self._held if uid not in alive]:
            for key in self._held.pop(uid):
                self._drop(uid, key)

    def _drop(self, uid: str, key: Hashable) -> None:
        holders = self._holders.get(key)
        if holders is not None:
            holders.discard(uid)
            if not holders:
                del self._holders[key]
