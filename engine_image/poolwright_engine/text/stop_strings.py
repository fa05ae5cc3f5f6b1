"""Stop strings: where a text ends, and what must be held back until that is known.

Knows characters only; no token, no request.
"""

from collections.abc import Sequence


class StopStrings:
    """Cuts text at the stop string whose end comes first (in a tie, the one listed first).

    What could still become a stop string is held back and nothing more: the longest end of the text that begins one.
    Only what is pushed is searched, so a prompt never matches.
    """

    def __init__(self, stops: Sequence[str] = (), include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """Text that may be sent, and the stop string met. After a match, push nothing more. `may_end` False: a stop
        string that ends in this text does not count."""
        if not self._stops:
            return text, None
        old, held = len(self._held), self._held + text
        ends = ((self._end_of(stop, held, old), order) for order, stop in enumerate(self._stops))
        found = [(end, order) for end, order in ends if end]
        if found and may_end:
            end, order = min(found)
            stop = self._stops[order]
            self._held = ""
            return held[: end if self._include_in_output else end - len(stop)], stop
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    @staticmethod
    def _end_of(stop: str, held: str, old: int) -> int:
        """Where it first ends, beyond the `old` characters that were searched before; 0: nowhere."""
        at = held.find(stop, max(0, old - len(stop) + 1))
        return at + len(stop) if at >= 0 else 0

    def flush(self) -> str:
        """What was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
