"""`NgramIndex`: guesses what comes next from what came after the same tokens before, in one text. No model, no torch.

Prompt-lookup decoding: answers often repeat runs of their prompt (summaries, edits of code, retrieved text), so what
followed the last few tokens earlier is a cheap guess. A wrong one costs only the rows that checked it.
"""

from collections.abc import Iterable

_LONGEST = 3
_SHORTEST = 2  # one token alone says too little


class NgramIndex:
    def __init__(self, token_ids: Iterable[int]) -> None:
        self._token_ids: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}  # n-gram → where its last follower stands
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        known = self._token_ids
        for token_id in token_ids:
            # The n-grams that end before this token now have a follower.
            for length in range(_SHORTEST, min(_LONGEST, len(known)) + 1):
                self._followed_at[tuple(known[-length:])] = len(known)
            known.append(token_id)

    def guess(self, count: int) -> tuple[int, ...]:
        """At most `count` tokens; empty where the last ones never stood before."""
        known = self._token_ids
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            at = self._followed_at.get(tuple(known[-length:])) if len(known) >= length else None
            if at is not None:
                return tuple(known[at : at + count])
        return ()

    def __len__(self) -> int:
        return len(self._token_ids)
