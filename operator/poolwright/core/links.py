"""Where machines stand, how fast KV moves between them, and whom a change of role would leave without a way for its KV.

The rule is DistServe's for slow networks (OSDI 2024, algorithm 2), for machines that exist: what a prompt machine makes
must leave it as fast as it is made, so a machine that decodes must stand near enough. Knows no reason to move anybody.
A link that nobody described has no limit: unknown is neither thin nor thick, and forbids nothing.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from poolwright_protocol import names
from poolwright_protocol.roles import Role

_BYTES_PER_SECOND_OF_A_GBPS = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Place:
    """`island`: machines of one have the fast links between them (a node, a domain of NVLink, a rack with a switch of
    its own). What this machine sends or takes inside it, and out of it; None: not known."""

    island: str
    inside_bytes_per_second: float | None = None
    outside_bytes_per_second: float | None = None

    @classmethod
    def of_labels(cls, labels: Mapping[str, str]) -> "Place | None":
        """Of a node; None without an island. Raises ValueError for a speed that is none."""
        island = labels.get(names.LABEL_KV_ISLAND)
        if not island:
            return None
        inside, outside = (_speed(labels, key) for key in (names.LABEL_KV_INSIDE_GBPS, names.LABEL_KV_OUTSIDE_GBPS))
        return cls(island, inside, outside)

    def __post_init__(self) -> None:
        if not self.island:
            raise ValueError("an island has a name")
        for speed in (self.inside_bytes_per_second, self.outside_bytes_per_second):
            if speed is not None and not 0 < speed < math.inf:
                raise ValueError(f"a speed is a number above 0, not {speed}")


def _speed(labels: Mapping[str, str], key: str) -> float | None:
    text = labels.get(key)
    if text is None:
        return None
    try:
        gbps = float(text)
    except ValueError:
        gbps = math.nan
    if not 0 < gbps < math.inf:
        raise ValueError(f"{key}: expected gigabits a second above 0, not {text!r}")
    return gbps * _BYTES_PER_SECOND_OF_A_GBPS


@dataclass(frozen=True, slots=True)
class Links:
    """`places` by uid of machine, of those whose place is known. `kv_bytes_per_token`: of the model served, where an
    engine has said it."""

    places: Mapping[str, Place]
    kv_bytes_per_token: int | None = None

    def bytes_per_second(self, a: str, b: str) -> float:
        return math.inf if a == b else between(self.places.get(a), self.places.get(b))


def between(a: Place | None, b: Place | None) -> float:
    """The slower end of a link limits it."""
    inside = a is not None and b is not None and a.island == b.island
    speeds = (p.inside_bytes_per_second if inside else p.outside_bytes_per_second for p in (a, b) if p is not None)
    return min((s for s in speeds if s is not None), default=math.inf)


@dataclass(frozen=True, slots=True)
class Reach:
    """Who has a way for its KV. `kv_bytes_per_second`: of all prompt machines together; None: not known, and then only
    links inside its island hold what a prompt machine makes, or links that are no slower."""

    links: Links
    kv_bytes_per_second: float | None = None

    def stranding(self, prompts: Iterable[str], decoding: Iterable[str]) -> Callable[[str, Role], int]:
        """From a machine and its new role to how many prompt machines would have no way for their KV then: of those
        that have one now, and the machine itself."""
        places = self.links.places
        senders = Counter(places.get(uid) for uid in prompts)
        decoders = list(decoding)
        takers = Counter(places.get(uid) for uid in decoders)
        decodes = frozenset(decoders)
        known: dict[tuple[Place | None, bool], int] = {}

        def stranded(uid: str, to_role: Role) -> int:
            if to_role is not Role.PROMPT:
                return 0  # who decodes from now on takes KV from as many as before, and more
            place, decoded = places.get(uid), uid in decodes
            if (place, decoded) not in known:
                known[place, decoded] = self._stranded(senders, takers, place, decoded)
            return known[place, decoded]

        return stranded

    def without_way(self, prompts: Iterable[str], decoding: Iterable[str]) -> int:
        senders = Counter(self.links.places.get(uid) for uid in prompts)
        takers = Counter(self.links.places.get(uid) for uid in decoding)
        each = self._each(senders.total())
        return sum(n for place, n in senders.items() if not self._served(place, takers, each))

    def _stranded(
        self, senders: Counter[Place | None], takers: Counter[Place | None], place: Place | None, decoded: bool
    ) -> int:
        left = takers - Counter({place: 1}) if decoded else takers
        each = self._each(senders.total() + 1)
        others = sum(
            n
            for sender, n in senders.items()
            if self._served(sender, takers, each) and not self._served(sender, left, each)
        )
        return others + (not self._served(place, left, each))

    def _each(self, prompt_machines: int) -> float | None:
        return None if self.kv_bytes_per_second is None else self.kv_bytes_per_second / max(1, prompt_machines)

    @staticmethod
    def _served(sender: Place | None, takers: Mapping[Place | None, int], each: float | None) -> bool:
        for taker in takers:
            speed = between(sender, taker)
            if each is None:
                if sender is None or taker is None or sender.island == taker.island:
                    return True
                if speed >= (sender.inside_bytes_per_second or math.inf):
                    return True
            elif speed >= each:
                return True
        return False
