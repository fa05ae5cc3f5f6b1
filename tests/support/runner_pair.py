"""Random work for two runners at once, as an engine would drive them; what one answers, the other must answer too."""

import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from poolwright_engine.scheduling.runner import Handle, ModelRunner, Row, Seat, Step, StepResult
from poolwright_engine.scheduling.sequence import Guide, GuideKind, SamplingParams, TokenLogprobs

CHOICES = Guide(GuideKind.CHOICE, json.dumps(["a long answer", "a short one", "neither"]))
WORDS = Guide(GuideKind.REGEX, "[a-z ]{3,12}")


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, **changes})  # type: ignore[arg-type]


PARAMS = (
    params(temperature=0.0),
    params(temperature=0.0, logprobs=3, prompt_logprobs=2),
    params(temperature=0.9, seed=2**63 + 5),
    params(temperature=1.2, seed=43, top_p=0.9, top_k=40, min_p=0.02, logprobs=0),
    params(temperature=0.8, seed=44, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4, min_tokens=9),
    params(temperature=1.0, seed=45, logit_bias=tuple((token, 4.0) for token in range(60, 70)), logprobs=-1),
    params(temperature=1.0, seed=46, guide=CHOICES),
    params(temperature=1.0, seed=49, allowed_token_ids=tuple(range(60, 90)), logprobs=2),
    params(temperature=1.0, seed=50, allowed_token_ids=(70, 256, 90), min_tokens=6, repetition_penalty=1.2),
    params(temperature=1.0, seed=51, allowed_token_ids=tuple(range(40, 319)), guide=WORDS),
    params(temperature=1.0, seed=47, guide=WORDS, min_tokens=9, frequency_penalty=0.3),
    params(temperature=0.7, seed=48, presence_penalty=1.5, prompt_logprobs=0),
)


@dataclass(eq=False)
class Sequence_:
    prompt: tuple[int, ...]
    params: SamplingParams
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0  # tokens sampled and not read
    guessing: bool = False  # a row with guesses is not read
    unread_rows: int = 0
    seated: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)


class RunnerPair:
    """`one` and `other` get the same calls; every result of both is compared."""

    def __init__(self, one: ModelRunner, other: ModelRunner, max_num_seqs: int, random: random.Random) -> None:
        self.runners = (one, other)
        self.random = random
        self.free = list(range(1, one.num_blocks))
        self.free_host = list(range(one.num_host_blocks))
        self.slots = list(range(max_num_seqs))
        self.pending: deque[tuple[list[tuple[Sequence_, int]], list[Handle[StepResult]]]] = deque()
        self.sequences: list[Sequence_] = []
        self.known: dict[tuple[tuple[int, ...], SamplingParams], tuple[int, ...]] = {}
        self.number = 0
        self.tokens = 0
        self.drafts_kept = 0
        self.moves = 0

    def run(self, turns: int) -> None:
        for _ in range(turns):
            if len(self.sequences) < 6 and self.random.random() < 0.4:
                self.sequences.append(self._new())
            self._move_some()
            self._step()
            while len(self.pending) > self.random.randint(0, 1):
                self._read()
        while self.pending:
            self._read()

    def _new(self) -> Sequence_:
        """Often one that was there before."""
        if self.known and self.random.random() < 0.5:
            return Sequence_(*self.random.choice(list(self.known)))
        length = self.random.randint(1, 21)
        return Sequence_(tuple(self.random.randrange(256) for _ in range(length)), self.random.choice(PARAMS))

    def _step(self) -> None:
        rows, starts, members = [], [], []
        for sequence in self.random.sample(self.sequences, len(self.sequences)):
            if sequence.guessing or self.random.random() < 0.2:
                continue
            if sequence.slot < 0 and not self._enter(sequence):
                continue
            known = len(sequence.ids) + sequence.in_flight
            left = known - sequence.computed
            length = self.random.choice((left, left, self.random.randint(1, left)))
            samples = length == left
            ahead = sequence.in_flight > 0
            guesses: tuple[int, ...] = ()
            if samples and not ahead and sequence.output and self.random.random() < 0.4:
                guesses = self._guesses(sequence, self.random.randint(1, 3))
            if not self._grow(sequence, sequence.computed + length + len(guesses)):
                continue
            start, stop = sequence.computed, sequence.computed + length
            is_prompt = stop < len(sequence.prompt)
            seat = None
            if not sequence.seated and sequence.params.needs_history:
                seat = Seat(sequence.prompt, tuple(sequence.output))
            sequence.seated = True
            rows.append(
                Row(
                    sequence.slot,
                    length + len(guesses),
                    () if ahead else (*sequence.ids[start:stop], *guesses),
                    sequence.blocks,
                    samples=samples,
                    params=sequence.params,
                    use_last_sampled=ahead,
                    num_draft=len(guesses),
                    seat=seat,
                    next_token_id=sequence.prompt[stop] if is_prompt and not samples else None,
                )
            )
            starts.append(start)
            sequence.computed += length
            sequence.in_flight += samples
            sequence.unread_rows += 1
            sequence.guessing = bool(guesses)
            members.append((sequence, len(guesses)))
        step = Step(self.number, tuple(rows), tuple(starts))
        self.number += 1
        self.pending.append((members, [runner.submit(step) for runner in self.runners]))

    def _guesses(self, sequence: Sequence_, count: int) -> tuple[int, ...]:
        """Right ones too: what a sequence of the same prompt and parameters, drawn before, went on with."""
        after = self.known.get((sequence.prompt, sequence.params), ())[len(sequence.output) :]
        return tuple(after[i] if i < len(after) else self.random.randrange(256) for i in range(count))

    def _read(self) -> None:
        members, handles = self.pending.popleft()
        first, second = (handle.result() for handle in handles)
        assert_same(first, second)
        failed = dict(first.errors)
        for index, (sequence, num_draft) in enumerate(members):
            tokens = first.token_ids[index]
            sequence.unread_rows -= 1
            if tokens:
                sequence.in_flight -= 1
                sequence.output.extend(tokens)
                self.tokens += len(tokens)
                key, known = (sequence.prompt, sequence.params), tuple(sequence.output)
                shared = min(len(known), len(self.known.get(key, ())))
                assert self.known.get(key, ())[:shared] == known[:shared]
                self.known[key] = max(known, self.known.get(key, ()), key=len)
            if num_draft:
                sequence.computed += len(tokens) - 1
                sequence.guessing = False
                self.drafts_kept += len(tokens) - 1
            if (index in failed or len(sequence.output) > 20) and sequence in self.sequences:
                self._leave(sequence)
                self.sequences.remove(sequence)

    def _enter(self, sequence: Sequence_) -> bool:
        if not self.slots:
            return False
        if sequence.host:
            blocks = self._take(len(sequence.host))
            if blocks is None:
                return False
            for runner in self.runners:
                runner.swap_in(tuple(sequence.host), tuple(blocks))
            self.free_host.extend(sequence.host)
            sequence.host, sequence.blocks = [], blocks
        sequence.slot = self.slots.pop(self.random.randrange(len(self.slots)))
        return True

    def _move_some(self) -> None:
        """Somebody loses slot and memory: to be computed anew, swapped, or carried by way of bytes."""
        for sequence in self.sequences:
            if sequence.slot < 0 or sequence.unread_rows or self.random.random() > 0.15:
                continue
            self.moves += 1
            how = self.random.choice(("recompute", "swap", "carry"))
            if how == "swap" and sequence.computed and len(sequence.blocks) <= len(self.free_host):
                sequence.host = [self.free_host.pop() for _ in sequence.blocks]
                for runner in self.runners:
                    runner.swap_out(tuple(sequence.blocks), tuple(sequence.host))
                self._leave(sequence, computed=sequence.computed)
            elif how == "carry" and sequence.computed:
                self._carry(sequence)
            else:
                self._leave(sequence)

    def _carry(self, sequence: Sequence_) -> None:
        """To other blocks of both runners, as the first one has it."""
        blocks = self._take(len(sequence.blocks))
        if blocks is None:
            return
        shape = self.runners[0].kv_shape
        used = sequence.computed
        for layers in (range(1), range(1, shape.layers)):
            heads = range(shape.kv_heads)
            read = [runner.read_blocks(layers, heads, tuple(sequence.blocks)).result() for runner in self.runners]
            size = (2, len(layers), -1, len(heads), shape.head_size)
            one, other = (np.frombuffer(data, np.float32).reshape(size)[:, :, :used] for data in read)
            np.testing.assert_allclose(one, other, atol=1e-4)
            for runner in self.runners:
                runner.write_blocks(layers, heads, tuple(blocks), read[0])
        computed, self.free = sequence.computed, self.free + sequence.blocks
        sequence.blocks, sequence.computed = blocks, computed

    def _leave(self, sequence: Sequence_, computed: int = 0) -> None:
        if sequence.slot >= 0:
            self.slots.append(sequence.slot)
        self.free.extend(sequence.blocks)
        sequence.slot, sequence.blocks, sequence.seated, sequence.computed = -1, [], False, computed

    def _grow(self, sequence: Sequence_, tokens: int) -> bool:
        needed = -(-tokens // self.runners[0].block_size) - len(sequence.blocks)
        taken = self._take(max(0, needed))
        sequence.blocks.extend(taken or ())
        return taken is not None

    def _take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        self.random.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        return taken


def assert_same(one: StepResult, other: StepResult) -> None:
    assert one.number == other.number
    assert one.token_ids == other.token_ids
    assert one.errors == other.errors
    for ours, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            assert_same_logprobs(left, right)


def assert_same_logprobs(one: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs]) -> None:
    """But for the order of what is as likely as not."""
    assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
    for ours, theirs in zip(one, other, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert abs(ours.rank - theirs.rank) <= 1
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)
        mine, others = dict(ours.top), dict(theirs.top)
        shared = mine.keys() & others.keys()
        assert len(shared) >= len(mine) - 1
        assert [mine[i] for i in shared] == pytest.approx([others[i] for i in shared], abs=1e-4)
