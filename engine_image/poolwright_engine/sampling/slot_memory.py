"""What the sampler remembers of the sequence in a slot, beyond its last token: token counts, guide, list, biases.

Owns how that is built from the tokens so far and carried on token by token; both give the same, so a sequence that
loses its slot and takes another, here or on another machine, goes on as if nothing had been. Knows no batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poolwright_engine.sampling.guide import Guides, GuideState
from poolwright_engine.scheduling.runner import Seat
from poolwright_engine.scheduling.sequence import SamplingParams


class UnusableParams(Exception):
    """The sampler cannot honour what the request asks for; one line for its client."""


class SlotMemory:
    """Built when the sequence first samples, not while its prompt is computed. Raises UnusableParams, and GuideError
    where a guide is compiled, continued or asked.

    `ending_ids` cannot be sampled before `min_tokens`: stop ids, and what ends a text unless the request ignores that.
    """

    def __init__(
        self,
        params: SamplingParams,
        seat: Seat | None,
        vocab_size: int,
        eos_ids: frozenset[int],
        guides: Guides | None,
    ) -> None:
        if seat is None and params.needs_history:
            raise UnusableParams("the tokens so far did not come with the row")
        seat = seat or Seat((), ())
        self.params = params
        self.num_output = len(seat.output_ids)
        self.bias_ids = _ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)
        self.biases = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        if not np.isfinite(self.biases).all():
            raise UnusableParams("logit_bias holds a value that is not finite")
        eos_ids = frozenset() if params.ignore_eos else eos_ids
        self.ending_ids = _ids("stop_token_ids", [*params.stop_token_ids, *eos_ids], vocab_size)
        self._listed: NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            self._listed = np.zeros(vocab_size, dtype=np.bool_)
            self._listed[_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)] = True
            if not self._listed.any():
                raise UnusableParams("allowed_token_ids names no token")
        self.counts: TokenCounts | None = None
        if params.repetition_penalty != 1:
            self.counts = TokenCounts(seat.prompt_ids, seat.output_ids)
        elif params.presence_penalty != 0 or params.frequency_penalty != 0:
            self.counts = TokenCounts((), seat.output_ids)
        self.guide: GuideState | None = None
        if params.guide is not None:
            if guides is None:
                raise UnusableParams("guided output is not available on this machine")
            self.guide = guides.start(params.guide, seat.output_ids)

    @property
    def may_end(self) -> bool:
        return self.num_output >= self.params.min_tokens

    @property
    def is_masked(self) -> bool:
        """`allowed` says which tokens may come."""
        return self._listed is not None or self.guide is not None

    def allowed(self, guide: GuideState | None, num_output: int) -> NDArray[np.bool_]:
        """(vocab_size,): after so many output tokens, where the guide is in this state, what the guide and the list of
        allowed tokens have in common; no ending before `min_tokens`, unless that leaves nothing. Not to be changed.
        Raises UnusableParams where they have nothing in common, and GuideError."""
        allowed = self._listed
        if guide is not None:
            allowed = guide.allowed() if allowed is None else guide.allowed() & allowed
            if not allowed.any():
                raise UnusableParams("the guide leaves no token that is among the allowed ones")
        if allowed is None:
            raise ValueError("nothing is masked")
        if num_output < self.params.min_tokens:
            going_on = allowed.copy()
            going_on[self.ending_ids] = False
            allowed = going_on if going_on.any() else allowed
        return allowed

    def note(self, token_id: int) -> None:
        """It was sampled."""
        self.num_output += 1
        if self.counts is not None:
            self.counts.add(token_id)
        if self.guide is not None:
            self.guide.advance((token_id,))


class TokenCounts:
    """The distinct tokens so far, and how often each was output (0: in the prompt only)."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        ids, places = np.unique(np.array((*prompt_ids, *output_ids), dtype=np.int64), return_inverse=True)
        outputs = np.bincount(places[len(prompt_ids) :], minlength=len(ids))
        self._size = len(ids)
        self._ids: NDArray[np.int64] = ids
        self._outputs: NDArray[np.float32] = outputs.astype(np.float32)
        self._place: dict[int, int] = {token_id: place for place, token_id in enumerate(ids.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def outputs(self) -> NDArray[np.float32]:
        return self._outputs[: self._size]

    def add(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids, self._outputs = _doubled(self._ids), _doubled(self._outputs)
            self._ids[place], self._outputs[place] = token_id, 0
            self._size += 1
        self._outputs[place] += 1


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate((array, np.zeros(max(16, len(array)), dtype=array.dtype)))


def _ids(name: str, token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    ids = np.array(token_ids, dtype=np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise UnusableParams(f"{name} names a token outside [0, {vocab_size})")
    return ids
