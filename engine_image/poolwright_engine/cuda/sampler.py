"""The sampler's side of a runner on a device: logits to tokens in the order of `cpu.sampler`, without waiting for any.

Only a guide waits: its mask depends on the tokens before, which the host must have read. What a guide or a parameter
makes impossible is an error of its row. Token counts for penalties are kept on the device by slot, guides and biases on
the host. All that a step found travels back as one array of words, which `Drawn` reads.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poolwright_engine.cuda.batch import DeviceBatch, to_device
from poolwright_engine.sampling.guide import GuideError, Guides
from poolwright_engine.sampling.slot_memory import SlotMemory, UnusableParams
from poolwright_engine.scheduling.runner import Row, Seat, Step
from poolwright_engine.scheduling.sequence import SamplingParams, TokenLogprobs
from poolwright_kernels.penalties import bias_logits, mask_logits, penalize, remember_tokens
from poolwright_kernels.sampling import sample_tokens

HEAD_ROWS = 256  # log probabilities of so many tokens are worked out at once
NOT_FINITE = "the model's output is not finite"

Tokens = Callable[[], Sequence[tuple[int, ...]]]
"""Waits for a step's tokens, by row."""


@dataclass(slots=True)
class _Occupant:
    """Of a slot whose sequence needs more of the sampler than parameters. `unread`: of steps since, where in them."""

    memory: SlotMemory
    num_prompt: int
    unread: deque[tuple[Tokens, int]] = field(default_factory=deque)

    def catch_up(self) -> None:
        """Waits. Raises GuideError."""
        while self.unread:
            tokens, index = self.unread.popleft()
            for token_id in tokens()[index]:
                self.memory.note(token_id)


class Samples:
    """The samples of some rows, those after the same number of guesses together: first all rows' first ones."""

    def __init__(self, step: Step, indices: Sequence[int], firsts: Sequence[int]) -> None:
        """indices: of the rows in the step; firsts: of each row's first sampled position among the step's tokens."""
        rows = self.rows = [step.rows[index] for index in indices]
        starts = [step.starts[index] for index in indices]
        self.indices = indices
        offsets = range(max((row.num_draft for row in rows), default=0) + 1)
        self.members = [[i for i, row in enumerate(rows) if row.num_draft >= offset] for offset in offsets]
        self.starts = np.cumsum([0, *map(len, self.members)]).tolist()
        self.at = np.array([firsts[i] + offset for offset in offsets for i in self.members[offset]], dtype=np.int64)
        self.slots = np.array([rows[i].slot for members in self.members for i in members], dtype=np.int64)
        self.positions = np.array(
            [
                starts[i] + rows[i].length - rows[i].num_draft + offset
                for offset in offsets
                for i in self.members[offset]
            ],
            dtype=np.int64,
        )

    def __len__(self) -> int:
        return len(self.at)

    def places(self, member: int) -> list[int]:
        """Of one row's samples, in order."""
        row = self.rows[member]
        return [self.starts[offset] + self.members[offset].index(member) for offset in range(row.num_draft + 1)]


@dataclass(slots=True)
class Drawn:
    """What samples came to, still on the device as `words`: ids, whether each was drawn from numbers, log
    probabilities. `errors`: by row of the samples, from which guess on, and why."""

    samples: Samples
    words: Tensor
    asked: list[int]  # samples with log probabilities
    count: int  # the most alternatives asked for
    errors: dict[int, tuple[int, str]]

    def tokens(self, words: NDArray[np.int32]) -> Iterator[tuple[int, tuple[int, ...], tuple[TokenLogprobs, ...], str]]:
        """Index of the row in its step, tokens, log probabilities, error or nothing; `words` as they came back."""
        size = len(self.samples)
        ids, finite = words[:size].tolist(), words[size : 2 * size].tolist()
        table = words[2 * size :].reshape(len(self.asked), 2 + 2 * self.count)
        place_of = {sample: place for place, sample in enumerate(self.asked)}
        simple = len(self.samples.members) == 1
        for member, (row, index) in enumerate(zip(self.samples.rows, self.samples.indices, strict=True)):
            places = (member,) if simple else self.samples.places(member)
            guesses = row.token_ids[row.length - row.num_draft :] if row.num_draft else ()
            failed_at, error = self.errors.get(member, (len(places), ""))
            found: list[int] = []
            logprobs: list[TokenLogprobs] = []
            for offset, place in enumerate(places):
                if offset > 0 and found[-1] != guesses[offset - 1]:
                    error = ""
                    break
                if offset >= failed_at:
                    break
                if not finite[place]:
                    error = NOT_FINITE
                    break
                found.append(ids[place])
                if row.params.logprobs is not None:
                    logprobs.append(read_logprobs(table[place_of[place]], ids[place], row.params.logprobs))
            yield index, tuple(found), tuple(logprobs), error


class DeviceSampler:
    def __init__(self, batch: DeviceBatch, vocab_size: int, eos_ids: frozenset[int], guides: Guides | None) -> None:
        self._batch = batch
        self._device = batch.device
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._guides = guides
        self._seats: list[Seat | None] = [None] * batch.max_num_seqs  # of sequences that have not sampled since
        self._occupants: list[_Occupant | None] = [None] * batch.max_num_seqs
        words = -(-vocab_size // 32)
        self._prompt_bits = torch.zeros(batch.max_num_seqs, words, dtype=torch.int32, device=self._device)
        self._counts = torch.zeros(batch.max_num_seqs, vocab_size, dtype=torch.int32, device=self._device)

    def warm(self) -> None:
        """What `draw` launches beside the draw itself, of no sample."""
        device = self._device
        logits = torch.zeros(1, self._vocab_size, dtype=torch.float32, device=device)
        nobody, first = (to_device(np.array((number,), dtype=np.int64), device) for number in (-1, 0))
        rate = logits[0, :1].clone()
        for is_prompt in (True, False):
            remember_tokens(nobody, first, is_prompt, self._prompt_bits, self._counts)
        penalize(logits, nobody, self._prompt_bits, self._counts, rate, rate, rate)
        bias_logits(logits, nobody, first, rate)
        mask_logits(logits, torch.full_like(self._prompt_bits[:1], -1))

    def seat(self, rows: Sequence[Row]) -> None:
        """Before a step of these rows is sampled: what slots remembered of other sequences is gone."""
        for row in rows:
            if row.seat is not None:
                self._seats[row.slot], self._occupants[row.slot] = row.seat, None

    @staticmethod
    def is_plain(row: Row) -> bool:
        """`draw_plainly` is all it takes."""
        params = row.params
        return not (
            row.num_draft or params.shapes_logits or params.logprobs is not None or params.prompt_logprobs is not None
        )

    def draw_plainly(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Of rows without history, as words. Nothing but operations of fixed sizes and places on the device."""
        token_ids = self._sample(logits, slots, positions)
        finite = logits.amax(dim=-1).isfinite()
        self._batch.last_sampled.index_copy_(0, slots, token_ids)
        return torch.cat((token_ids.int(), finite.int()))

    def draw(self, samples: Samples, logits: Tensor, tokens: Tokens) -> Drawn:
        """logits: (samples, vocab) float32, changed in place. tokens: of this step, for guides of later ones."""
        device, rows = self._device, samples.rows
        occupants = [self._occupant(row) for row in rows]
        errors = {i: (0, found) for i, found in enumerate(occupants) if isinstance(found, str)}
        known = [None if isinstance(found, str) else found for found in occupants]
        slots, positions = to_device(samples.slots, device), to_device(samples.positions, device)
        asked = [i for i, member in enumerate(_flat(samples)) if rows[member].params.logprobs is not None]
        raw = logits.index_select(0, to_device(np.array(asked, dtype=np.int64), device)) if asked else None

        self._mask(samples, logits, known, errors)
        self._bias(samples, logits, known)
        counted = np.array([slot if self._is_counted(rows[member], known[member]) else -1
                            for slot, member in zip(samples.slots.tolist(), _flat(samples), strict=True)])  # fmt: skip
        counts_matter = bool((counted >= 0).any())
        seats = to_device(counted.astype(np.int64), device)
        guesses = [np.array(_guesses(samples, offset), dtype=np.int64) for offset in range(len(samples.members) - 1)]

        drawn: list[Tensor] = []
        finite: list[Tensor] = []
        alive: Tensor | None = None
        for offset, members in enumerate(samples.members):
            part = slice(samples.starts[offset], samples.starts[offset + 1])
            own, own_slots, own_seats, own_positions = (
                _aligned(column[part]) for column in (logits, slots, seats, positions)
            )
            if offset > 0:
                # Those that go on: of the rows before, in the same order, the guess after their sample was right.
                before = samples.members[offset - 1]
                going_on = to_device(np.array([before.index(i) for i in members], dtype=np.int64), device)
                right = drawn[-1][going_on] == to_device(guesses[offset - 1], device)
                alive = right if alive is None else alive[going_on] & right
            if counts_matter:
                rates = self._batch.params(own_slots)
                penalize(
                    own, own_seats, self._prompt_bits, self._counts, rates.repetition, rates.presence, rates.frequency
                )
            token_ids = self._sample(own, own_slots, own_positions)
            finite.append(own.amax(dim=-1).isfinite())
            drawn.append(token_ids)
            kept, remembered = own_slots, own_seats
            if alive is not None:
                kept = torch.where(alive, kept, self._batch.max_num_seqs)
                remembered = torch.where(alive, remembered, -1)
            self._batch.last_sampled.index_copy_(0, kept, token_ids)
            if counts_matter:
                remember_tokens(remembered, token_ids, False, self._prompt_bits, self._counts)

        for member, (occupant, index) in enumerate(zip(known, samples.indices, strict=True)):
            if occupant is not None and occupant.memory.guide is not None and member not in errors:
                occupant.unread.append((tokens, index))
        ids = torch.cat(drawn)
        words = [ids.int(), torch.cat(finite).int()]
        count = 0
        if raw is not None:
            count = max(_alternatives(rows[m].params.logprobs, self._vocab_size) for m in _flat(samples))
            targets = ids[to_device(np.array(asked, dtype=np.int64), device)]
            words.append(logprob_words(raw, targets, count).flatten())
        return Drawn(samples, torch.cat(words), asked, count, errors)

    def _sample(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        params = self._batch.params(slots)
        token_ids = sample_tokens(
            logits, params.temperature, params.top_k, params.top_p, params.min_p, params.seeds, positions
        )
        # Of a row without numbers any id may come, and the next step looks it up before the host has seen the row fail.
        return token_ids.clamp_(0, self._vocab_size - 1)

    def _occupant(self, row: Row) -> _Occupant | str | None:
        """The text says why the row cannot be sampled."""
        params, slot = row.params, row.slot
        if not params.shapes_logits:
            self._occupants[slot] = None
            return None
        occupant = self._occupants[slot]
        if occupant is None or occupant.memory.params != params:
            seat, self._seats[slot] = self._seats[slot], None
            self._occupants[slot] = None
            try:
                memory = SlotMemory(params, seat, self._vocab_size, self._eos_ids, self._guides)
            except (UnusableParams, GuideError) as error:
                return str(error)
            occupant = self._occupants[slot] = _Occupant(memory, len(seat.prompt_ids) if seat is not None else 0)
            if memory.counts is not None and seat is not None:
                self._count(slot, params, seat)
        return occupant

    def _count(self, slot: int, params: SamplingParams, seat: Seat) -> None:
        self._prompt_bits[slot].zero_()
        self._counts[slot].zero_()
        for ids, is_prompt in ((seat.prompt_ids if params.repetition_penalty != 1 else (), True),
                               (seat.output_ids, False)):  # fmt: skip
            if ids:
                token_ids = to_device(np.array(ids, dtype=np.int64), self._device)
                remember_tokens(torch.full_like(token_ids, slot), token_ids, is_prompt, self._prompt_bits, self._counts)

    @staticmethod
    def _is_counted(row: Row, occupant: _Occupant | None) -> bool:
        return occupant is not None and occupant.memory.counts is not None

    def _mask(
        self,
        samples: Samples,
        logits: Tensor,
        occupants: Sequence[_Occupant | None],
        errors: dict[int, tuple[int, str]],
    ) -> None:
        """What guides and lists of allowed tokens leave, and no ending before its time unless nothing else is left."""
        masks: dict[int, NDArray[np.int32]] = {}
        for member, occupant in enumerate(occupants):
            if occupant is None or not occupant.memory.is_masked:
                continue
            row, memory = samples.rows[member], occupant.memory
            state = memory.guide
            if state is None:
                for place in samples.places(member):
                    num_output = int(samples.positions[place]) - occupant.num_prompt
                    masks[place] = self._bits(memory.allowed(None, num_output))
                continue
            guesses = row.token_ids[row.length - row.num_draft :] if row.num_draft else ()
            offset = 0
            try:
                occupant.catch_up()
                for offset, place in enumerate(samples.places(member)):
                    if offset > 0:
                        allowed = state.allowed()
                        if not allowed[guesses[offset - 1]]:
                            break  # nor will it be sampled
                        state = state.copy() if state is memory.guide else state
                        state.advance((guesses[offset - 1],))
                    masks[place] = self._bits(memory.allowed(state, memory.num_output + offset))
            except (GuideError, UnusableParams) as error:
                errors[member] = (offset, str(error))
        if masks:
            places = to_device(np.array(list(masks), dtype=np.int64), self._device)
            chosen = logits.index_select(0, places)
            mask_logits(chosen, to_device(np.stack(list(masks.values())), self._device))
            logits.index_copy_(0, places, chosen)

    def _bits(self, allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
        words = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        packed = np.packbits(allowed, bitorder="little")
        words.view(np.uint8)[: len(packed)] = packed
        return words

    def _bias(self, samples: Samples, logits: Tensor, occupants: Sequence[_Occupant | None]) -> None:
        """logit_bias, and of rows without a mask the endings that may not come yet."""
        rows: list[NDArray[np.int64]] = []
        ids: list[NDArray[np.int64]] = []
        values: list[NDArray[np.float32]] = []
        for place, (member, position) in enumerate(zip(_flat(samples), samples.positions.tolist(), strict=True)):
            occupant = occupants[member]
            if occupant is None:
                continue
            memory = occupant.memory
            biases = dict(zip(memory.bias_ids.tolist(), memory.biases.tolist(), strict=True))
            if not memory.is_masked and position - occupant.num_prompt < memory.params.min_tokens:
                biases |= dict.fromkeys(memory.ending_ids.tolist(), -np.inf)
            if biases:
                rows.append(np.full(len(biases), place))
                ids.append(np.array(list(biases), dtype=np.int64))
                values.append(np.array(list(biases.values()), dtype=np.float32))
        if rows:
            device = self._device
            bias_logits(
                logits,
                to_device(np.concatenate(rows), device),
                to_device(np.concatenate(ids), device),
                to_device(np.concatenate(values), device),
            )


def logprob_words(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    """(rows, 2 + 2 · count) int32: rank of the target and the bits of its log probability, then ids of the most likely
    and their bits. Ties favour the lower id."""
    parts = []
    for first in range(0, len(targets), HEAD_ROWS):
        own, target = logits[first : first + HEAD_ROWS], targets[first : first + HEAD_ROWS]
        total = own.logsumexp(dim=-1, keepdim=True)
        value = own.gather(1, target[:, None])
        columns = [(own > value).sum(dim=-1, keepdim=True).int() + 1, (value - total).view(torch.int32)]
        if count:
            # One key that orders by logit, then by id: what is largest is one set, however it is found.
            words = (own + 0.0).view(torch.int32)
            keys = (words ^ ((words >> 31) & 0x7FFF_FFFF)).long() << 32
            ids = torch.arange(own.shape[1], device=own.device)
            best = (keys | (0xFFFF_FFFF - ids)).topk(count, dim=-1).values
            top = 0xFFFF_FFFF - (best & 0xFFFF_FFFF)
            columns += [top.int(), (own.gather(1, top) - total).view(torch.int32)]
        parts.append(torch.cat(columns, dim=-1))
    return torch.cat(parts)


def read_logprobs(words: NDArray[np.int32], token_id: int, count: int) -> TokenLogprobs:
    """Of a row of `logprob_words` that may have more alternatives than these; -1: all."""
    size = (len(words) - 2) // 2
    count = size if count < 0 else min(count, size)
    floats = words.view(np.float32)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        top = tuple(zip(words[2 : 2 + count].tolist(), floats[2 + size : 2 + size + count].tolist(), strict=True))
    return TokenLogprobs(token_id, float(floats[1]), top, int(words[0]))


def _aligned(column: Tensor) -> Tensor:
    """At a multiple of 16 bytes: Triton compiles a kernel anew for pointers that are not."""
    return column if column.storage_offset() * column.itemsize % 16 == 0 else column.clone()


def _alternatives(count: int | None, vocab_size: int) -> int:
    if count is None:
        return 0
    return vocab_size if count < 0 else min(count, vocab_size)


def _flat(samples: Samples) -> list[int]:
    return [member for members in samples.members for member in members]


def _guesses(samples: Samples, offset: int) -> list[int]:
    """Of the rows that have one after this many others, the guess there."""
    return [
        samples.rows[i].token_ids[samples.rows[i].length - samples.rows[i].num_draft + offset]
        for i in samples.members[offset + 1]
    ]
