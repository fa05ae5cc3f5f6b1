"""The CPU runner: submit returns at once, steps and block copies run in order, and a slot's tokens depend on nothing
but its own sequence."""

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from poolwright_engine.checkpoint.loader import LoadedModel, load_model
from poolwright_engine.cpu import runner as cpu_runner
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_engine.sampling.guide import Guides
from poolwright_engine.scheduling.runner import Seat, StepResult
from poolwright_engine.scheduling.sequence import Guide, GuideKind, SamplingParams, TokenLogprobs
from support.placed import Placed, placed, step_of
from support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.usefixtures("one_torch_thread")

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPT = (7, 100, 42, 250, 3, 3, 81)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def runner(loaded: LoadedModel) -> Iterator[CpuRunner]:
    runner = make_runner(loaded)
    yield runner
    runner.close()


def make_runner(loaded: LoadedModel, duty_percent: int = 100) -> CpuRunner:
    tokenizer = loaded.tokenizer
    return CpuRunner(
        loaded.model,
        64,
        block_size=4,
        max_num_seqs=4,
        cpu_threads=1,
        duty_percent=duty_percent,
        num_host_blocks=8,
        eos_token_ids=tokenizer.eos_ids,
        guides=Guides(tokenizer, loaded.config.vocab_size),
    )


def prompt_row(slot: int, blocks: tuple[int, ...], ids: tuple[int, ...] = PROMPT) -> Placed:
    return placed(slot, 0, len(ids), ids, blocks, samples=True, params=GREEDY)


def decode_row(slot: int, position: int, blocks: tuple[int, ...]) -> Placed:
    return placed(slot, position, 1, (), blocks, samples=True, params=GREEDY, use_last_sampled=True)


def continue_greedily(runner: CpuRunner, slot: int, blocks: tuple[int, ...], start: int, count: int) -> list[int]:
    """All steps are submitted before the first is read."""
    steps = [step_of(i, (decode_row(slot, start + i, blocks),)) for i in range(count)]
    handles = [runner.submit(step) for step in steps]
    return [token_id for handle in handles for (token_id,) in handle.result().token_ids]


def greedy_stream(runner: CpuRunner, slot: int, blocks: tuple[int, ...], count: int) -> list[int]:
    ((first,),) = runner.submit(step_of(0, (prompt_row(slot, blocks),))).result().token_ids
    return [first, *continue_greedily(runner, slot, blocks, len(PROMPT), count - 1)]


def test_a_step_ahead_uses_the_token_that_the_step_before_samples(runner: CpuRunner) -> None:
    """The same tokens as when every id is read and given back."""
    ahead = greedy_stream(runner, 0, (5, 9, 2, 7), 6)
    ids = list(PROMPT)
    for expected in ahead:
        result = runner.submit(step_of(0, (prompt_row(1, (11, 12, 13, 14), tuple(ids)),))).result()
        assert result.token_ids == ((expected,),)
        ids.append(expected)


def test_submit_returns_before_the_step_is_done(loaded: LoadedModel) -> None:
    runner = make_runner(loaded, duty_percent=1)  # each step takes a hundred times its work
    try:
        runner.submit(step_of(0, (prompt_row(0, (1, 2)),))).result()
        began = time.perf_counter()
        handle = runner.submit(step_of(1, (prompt_row(0, (1, 2)),)))
        submitted = time.perf_counter() - began
        result = handle.result()
        assert submitted < 0.5 * result.busy_seconds
        assert not runner.submit(step_of(2, (prompt_row(0, (1, 2)),))).done()
    finally:
        runner.close()


def test_a_capped_runner_rests_for_its_share(loaded: LoadedModel) -> None:
    """Of what it computed, not of what it waited for a core: so this holds on a busy machine too."""
    runner = make_runner(loaded, duty_percent=10)
    row = prompt_row(0, tuple(range(1, 31)), tuple(i % 256 for i in range(120)))
    try:
        began = time.process_time()
        busy = sum(runner.submit(step_of(i, (row,))).result().busy_seconds for i in range(5))
        computed = time.process_time() - began
    finally:
        runner.close()
    assert busy > 5 * computed


def test_a_row_that_does_not_sample_gives_no_token(runner: CpuRunner) -> None:
    chunk = placed(0, 0, 4, PROMPT[:4], (1, 2), samples=False, params=GREEDY)
    result = runner.submit(step_of(3, (chunk, prompt_row(1, (3, 4))))).result()
    assert result.number == 3
    assert result.token_ids[0] == ()
    assert len(result.token_ids[1]) == 1
    rest = placed(0, 4, 3, PROMPT[4:], (1, 2), samples=True, params=GREEDY)
    assert runner.submit(step_of(4, (rest,))).result().token_ids == (result.token_ids[1],)


def test_an_empty_step_is_a_step(runner: CpuRunner) -> None:
    assert runner.submit(step_of(9, ())).result().token_ids == ()


def test_kv_carried_to_other_blocks_of_another_runner_goes_on_with_the_same_tokens(loaded: LoadedModel) -> None:
    here, there = make_runner(loaded), make_runner(loaded)
    try:
        expected = greedy_stream(here, 0, (1, 2, 3, 4), 6)
        ((first,),) = here.submit(step_of(0, (prompt_row(1, (8, 6)),))).result().token_ids
        assert first == expected[0]
        shape = here.kv_shape
        for layers in (range(1), range(1, shape.layers)):
            for heads in (range(1), range(1, shape.kv_heads)):
                data = here.read_blocks(layers, heads, (8, 6)).result()
                assert len(data) == 2 * len(layers) * 2 * 4 * len(heads) * shape.head_size * 4
                there.write_blocks(layers, heads, (20, 3), data)
        blocks = (20, 3, 21, 22)
        arrived = placed(2, len(PROMPT), 1, (first,), blocks, samples=True, params=GREEDY)
        ((second,),) = there.submit(step_of(0, (arrived,))).result().token_ids
        assert [second, *continue_greedily(there, 2, blocks, len(PROMPT) + 1, 4)] == expected[1:]
    finally:
        here.close()
        there.close()


def test_a_read_sees_the_steps_before_it_and_not_those_after(runner: CpuRunner) -> None:
    whole = (range(runner.kv_shape.layers), range(runner.kv_shape.kv_heads), (1, 2))
    handles = []
    for ids in (PROMPT, PROMPT[::-1]):
        runner.submit(step_of(0, (prompt_row(0, (1, 2), ids),)))
        handles.append(runner.read_blocks(*whole))
    before, after = (handle.result() for handle in handles)
    assert before != after
    runner.write_blocks(*whole, before)
    assert runner.read_blocks(*whole).result() == before


@pytest.mark.parametrize(
    ("layers", "heads", "blocks", "says"),
    [
        (range(3), range(2), (0,), "block 0 is outside"),
        (range(3), range(2), (-1,), "block -1 is outside"),
        (range(3), range(2), (64,), "block 64 is outside"),
        (range(4), range(2), (1,), "layers range.* is outside"),
        (range(3), range(-1, 2), (1,), "kv_heads range.* is outside"),
        (range(0, 3, 2), range(2), (1,), "layers range.* is outside"),
    ],
)
def test_an_address_outside_the_cache_is_refused(
    runner: CpuRunner, layers: range, heads: range, blocks: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        runner.read_blocks(layers, heads, blocks)
    with pytest.raises(ValueError, match=says):
        runner.write_blocks(layers, heads, blocks, b"")


def test_data_of_another_length_than_its_blocks_is_refused(runner: CpuRunner) -> None:
    with pytest.raises(ValueError, match="7 bytes for 1 blocks"):
        runner.write_blocks(range(3), range(2), (1,), bytes(7))


def test_what_the_device_raises_is_raised_by_the_result_and_the_next_step_runs(runner: CpuRunner) -> None:
    short_table = runner.submit(step_of(0, (prompt_row(0, (1,)),)))
    good = runner.submit(step_of(1, (prompt_row(0, (1, 2)),)))
    with pytest.raises(ValueError, match="7 tokens need 2 blocks of 4"):
        short_table.result()
    assert good.result().token_ids[0] is not None


def test_close_ends_the_worker(loaded: LoadedModel, tmp_path: Path) -> None:
    runner = make_runner(loaded)
    handle = runner.submit(step_of(0, (prompt_row(0, (1, 2)),)))
    runner.close()
    assert handle.result().token_ids[0] is not None
    with pytest.raises(RuntimeError):
        runner.submit(step_of(1, ()))


# What a slot remembers.

OTHER = (9, 9, 13, 200)
CHOICES = Guide(GuideKind.CHOICE, json.dumps(["a long answer", "a short one", "neither"]))


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, **changes})  # type: ignore[arg-type]


KINDS = {
    "greedy": params(temperature=0.0),
    "random": params(temperature=0.8, seed=42),
    "nucleus": params(temperature=1.2, seed=43, top_p=0.9, top_k=40, min_p=0.02),
    "penalised": params(
        temperature=0.8, seed=44, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4, min_tokens=9
    ),
    "biased": params(temperature=1.0, seed=45, logit_bias=tuple((token, 4.0) for token in range(60, 70))),
    "allowed": params(temperature=1.0, seed=48, allowed_token_ids=(60, 61, 70, 256), min_tokens=9),
    "guided": params(temperature=1.0, seed=46, guide=CHOICES),
    "guided and more": params(
        temperature=1.0, seed=47, guide=Guide(GuideKind.REGEX, "[a-z ]{3,12}"), min_tokens=9, frequency_penalty=0.3
    ),
}


class Stream:
    """One sequence in a runner, as a scheduler would drive it: a seat when it takes a slot, then a step ahead."""

    def __init__(self, runner: CpuRunner, wanted: SamplingParams, slot: int, blocks: range) -> None:
        self.runner, self.wanted, self.slot, self.blocks = runner, wanted, slot, blocks
        self.output: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._in_flight = 0
        self._seated = False
        self._computed = 0

    @property
    def ids(self) -> tuple[int, ...]:
        return (*PROMPT, *self.output)

    def move(self, slot: int, blocks: range) -> None:
        """It lost slot and memory, and takes others."""
        assert self._in_flight == 0
        self.slot, self.blocks, self._seated, self._computed = slot, blocks, False, 0

    def row(self, chunk: int | None = None, guesses: tuple[int, ...] = ()) -> Placed:
        seat = None
        if not self._seated and self.wanted.needs_history:
            seat = Seat(PROMPT, tuple(self.output))
        self._seated = True
        start, known = self._computed, len(PROMPT) + len(self.output) + self._in_flight
        length = min(chunk or known, known - start)
        ahead = self._in_flight > 0
        samples = start + length == known
        row = placed(
            self.slot,
            start,
            length + len(guesses),
            () if ahead else (*self.ids[start : start + length], *guesses),
            tuple(self.blocks),
            samples=samples,
            params=self.wanted,
            use_last_sampled=ahead,
            num_draft=len(guesses),
            seat=seat,
        )
        self._computed += length
        self._in_flight += samples
        return row

    def read(self, result: StepResult, index: int) -> None:
        assert result.errors == ()
        tokens = result.token_ids[index]
        if tokens:
            self._in_flight -= 1
            self._computed += len(tokens) - 1
        self.output.extend(tokens)
        self.logprobs.extend(result.logprobs[index])

    def run(self, count: int, chunk: int | None = None) -> list[int]:
        """Until `count` tokens are there, one step ahead once it decodes."""
        handles = []
        while len(self.output) + self._in_flight < count:
            handles.append(self.runner.submit(step_of(0, (self.row(chunk),))))
            if not self._in_flight:
                self.read(handles.pop().result(), 0)
        for handle in handles:
            self.read(handle.result(), 0)
        return self.output


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> dict[str, list[int]]:
    """What each kind answers in a runner of its own."""
    outputs = {}
    for name, wanted in KINDS.items():
        runner = make_runner(loaded)
        outputs[name] = Stream(runner, wanted, 0, range(1, 9)).run(16)
        runner.close()
    return outputs


def test_kinds_of_requests_differ(alone: dict[str, list[int]]) -> None:
    assert len({tuple(output) for output in alone.values()}) == len(KINDS)


def test_guided_texts_are_in_their_language(loaded: LoadedModel, alone: dict[str, list[int]]) -> None:
    assert loaded.tokenizer.decode(alone["guided"]) in json.loads(CHOICES.text)
    assert re.fullmatch("[a-z ]{9,12}", loaded.tokenizer.decode(alone["guided and more"]))
    assert all(alone[name][-1] in loaded.tokenizer.eos_ids for name in ("guided", "guided and more"))


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_the_same_with_any_neighbours(runner: CpuRunner, alone: dict[str, list[int]], name: str) -> None:
    """Itself again among them, and one that enters late."""
    others = [kind for kind in KINDS if kind != name][:2]
    streams = [
        Stream(runner, KINDS[kind], slot, range(1 + 9 * slot, 10 + 9 * slot)) for slot, kind in enumerate(others)
    ]
    streams += [Stream(runner, KINDS[name], slot, range(1 + 9 * slot, 10 + 9 * slot)) for slot in (2, 3)]
    for turn in range(17):
        present = streams if turn > 0 else streams[:3]
        result = runner.submit(step_of(turn, tuple(stream.row() for stream in present))).result()
        for index, stream in enumerate(present):
            stream.read(result, index)
    for kind, stream in zip([*others, name, name], streams, strict=True):
        assert stream.output[:16] == alone[kind]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("after", [0, 1, 7])
def test_tokens_are_the_same_after_the_slot_was_lost(
    runner: CpuRunner, alone: dict[str, list[int]], name: str, after: int
) -> None:
    """Its old slot goes to another, whose old one it takes; its KV is computed anew, in chunks."""
    stream = Stream(runner, KINDS[name], 0, range(1, 9))
    other = Stream(runner, KINDS["penalised"], 1, range(9, 17))
    stream.run(after)
    other.run(3)
    stream.move(1, range(17, 25))
    other.move(0, range(1, 9))
    other.run(5, chunk=2)
    assert stream.run(16, chunk=5) == alone[name]
    assert other.run(16) == alone["penalised"]


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_the_same_after_a_hand_off(loaded: LoadedModel, alone: dict[str, list[int]], name: str) -> None:
    here, there = make_runner(loaded), make_runner(loaded)
    try:
        first = Stream(here, KINDS[name], 0, range(1, 3)).run(1)
        whole = (range(here.kv_shape.layers), range(here.kv_shape.kv_heads))
        there.write_blocks(*whole, (5, 6), here.read_blocks(*whole, (1, 2)).result())
        stream = Stream(there, KINDS[name], 2, range(5, 13))
        stream.output, stream._computed = list(first), len(PROMPT)
        assert stream.run(16) == alone[name]
    finally:
        here.close()
        there.close()


def test_children_of_one_request_are_requests_with_the_next_seeds(runner: CpuRunner) -> None:
    wanted = [params(temperature=0.9, seed=100 + child) for child in range(3)]
    singles = [Stream(runner, each, 0, range(1, 9)).run(8) for each in wanted]
    streams = [Stream(runner, each, slot, range(1 + 9 * slot, 10 + 9 * slot)) for slot, each in enumerate(wanted)]
    for turn in range(8):
        result = runner.submit(step_of(turn, tuple(stream.row() for stream in streams))).result()
        for index, stream in enumerate(streams):
            stream.read(result, index)
    assert [stream.output for stream in streams] == singles
    assert len({tuple(output) for output in singles}) == 3


def test_memory_is_kept_only_by_slots_whose_request_needs_it(runner: CpuRunner) -> None:
    Stream(runner, KINDS["penalised"], 0, range(1, 9)).run(2)
    Stream(runner, KINDS["random"], 1, range(9, 17)).run(2)
    assert [memory is not None for memory in runner._seats._memories] == [True, False, False, False]
    Stream(runner, KINDS["greedy"], 0, range(1, 9)).run(2)
    assert runner._seats._memories == [None] * 4


# A row that cannot go on.


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"guide": Guide(GuideKind.REGEX, "(")}, "unclosed group"),
        ({"logit_bias": ((5000, 1.0),)}, "logit_bias names a token outside"),
        ({"allowed_token_ids": (5000,)}, "allowed_token_ids names a token outside"),
        ({"presence_penalty": 1.0}, "the tokens so far did not come"),
    ],
)
def test_a_row_that_cannot_go_on_fails_alone(
    runner: CpuRunner, alone: dict[str, list[int]], changes: dict[str, object], says: str
) -> None:
    bad = placed(0, 0, len(PROMPT), PROMPT, (1, 2), samples=True, params=params(**changes))
    if "guide" in changes:
        bad = bad.replaced(seat=Seat(PROMPT, ()))
    good = Stream(runner, KINDS["greedy"], 1, range(9, 17))
    for _ in range(2):  # the step ahead of the one that told of it
        result = runner.submit(step_of(0, (bad, good.row()))).result()
        ((index, text),) = result.errors
        assert index == 0
        assert says in text or "the tokens so far did not come" in text
        assert result.token_ids[0] == ()
        good.output.extend(result.token_ids[1])
        good._in_flight -= 1
        bad = bad.replaced(seat=None)
    assert good.output == alone["greedy"][:2]


def test_a_row_whose_numbers_are_lost_fails_alone(loaded: LoadedModel, runner: CpuRunner) -> None:
    size = runner.kv_shape
    poison = np.full(2 * size.layers * 4 * size.kv_heads * size.head_size, np.nan, dtype=np.float32).tobytes()
    runner.write_blocks(range(size.layers), range(size.kv_heads), (1,), poison)
    lost = placed(0, 4, 1, (5,), (1, 2), samples=True, params=GREEDY)
    result = runner.submit(step_of(0, (lost, prompt_row(1, (3, 4))))).result()
    assert result.errors == ((0, "the model's output is not finite"),)
    assert len(result.token_ids[1]) == 1


# Guesses.


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("right", [0, 1, 3])
def test_guesses_change_how_many_tokens_a_step_gives_and_nothing_else(
    runner: CpuRunner, alone: dict[str, list[int]], name: str, right: int
) -> None:
    stream = Stream(runner, replace(KINDS[name], logprobs=2), 0, range(1, 9))
    neighbour = Stream(runner, KINDS["penalised"], 1, range(9, 17))
    expected = alone[name]
    stream.run(1)
    neighbour.run(1)
    while len(stream.output) < 12:
        done = len(stream.output)
        guesses = list(expected[done : done + 3])
        if right < 3:
            guesses[right] = (guesses[right] + 1) % 256
        result = runner.submit(step_of(0, (neighbour.row(), stream.row(guesses=tuple(guesses))))).result()
        neighbour.read(result, 0)
        stream.read(result, 1)
        assert len(stream.output) - done == right + 1
        assert stream.output == expected[: len(stream.output)]
    assert [entry.token_id for entry in stream.logprobs] == stream.output
    assert neighbour.output == alone["penalised"][: len(neighbour.output)]
    assert stream.run(16) == expected


# Log probabilities of a prompt.


def raw_logits(loaded: LoadedModel, ids: tuple[int, ...]) -> torch.Tensor:
    cache = cpu_runner.KVCache(loaded.config.kv_shape(loaded.model.dtype), 16, 4, loaded.model.dtype)
    rows = [AttentionRow(0, len(ids), tuple(range(1, 16)))]
    return loaded.model.forward(torch.tensor(ids), rows, cache, range(len(ids))).double()


@pytest.mark.parametrize("chunk", [1, 3, len(PROMPT)])
def test_a_prompts_log_probabilities_are_the_same_in_any_chunks(
    loaded: LoadedModel, runner: CpuRunner, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_runner, "_HEAD_ROWS", 2)
    wanted = params(temperature=0.0, prompt_logprobs=2, logprobs=0)
    found: list[TokenLogprobs] = []
    for start in range(0, len(PROMPT), chunk):
        stop = min(start + chunk, len(PROMPT))
        last = stop == len(PROMPT)
        row = placed(0, start, stop - start, PROMPT[start:stop], (1, 2), samples=last, params=wanted)
        row = row.replaced(next_token_id=None if last else PROMPT[stop])
        result = runner.submit(step_of(0, (prompt_row(1, (5, 6), OTHER), row))).result()
        assert result.prompt_logprobs[0] == ()
        found.extend(result.prompt_logprobs[1])
    logits = raw_logits(loaded, PROMPT)
    expected = logits.log_softmax(1)
    assert [entry.token_id for entry in found] == list(PROMPT[1:])
    for position, entry in enumerate(found):
        assert entry.logprob == pytest.approx(float(expected[position, PROMPT[position + 1]]), abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == logits[position].topk(2).indices.tolist()
        assert entry.rank == 1 + int((logits[position] > logits[position, PROMPT[position + 1]]).sum())
    assert result.token_ids[1] == (int(logits[-1].argmax()),)


def test_guesses_and_decodes_have_no_prompt_log_probabilities(runner: CpuRunner) -> None:
    stream = Stream(runner, params(temperature=0.0, prompt_logprobs=0), 0, range(1, 9))
    stream.run(1)
    for guesses in ((), (3, 4)):
        result = runner.submit(step_of(0, (stream.row(guesses=guesses),))).result()
        assert result.prompt_logprobs == ((),)
        stream.read(result, 0)


def test_the_head_runs_on_rows_that_sample_and_a_bounded_number_at_once(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    plain = type(loaded.model).logits

    def counted(self: object, hidden: torch.Tensor) -> torch.Tensor:
        counts.append(len(hidden))
        return plain(self, hidden)  # type: ignore[arg-type]

    monkeypatch.setattr(type(loaded.model), "logits", counted)
    monkeypatch.setattr(cpu_runner, "_HEAD_ROWS", 3)
    runner = make_runner(loaded)
    try:
        chunk = placed(0, 0, 4, PROMPT[:4], (1,), samples=False, params=GREEDY)
        runner.submit(step_of(0, (chunk, prompt_row(1, (3, 4))))).result()
        assert counts == [1]
        runner.submit(step_of(1, (chunk,))).result()
        assert counts == [1]
        counts.clear()
        asks = params(temperature=0.0, prompt_logprobs=0)
        result = runner.submit(step_of(2, (prompt_row(0, (1, 2)).replaced(params=asks),))).result()
        assert counts == [1, 3, 3]
        assert all(math.isfinite(entry.logprob) for entry in result.prompt_logprobs[0])
    finally:
        runner.close()


# Swapping.


def test_swapped_blocks_come_back_to_any_place(runner: CpuRunner) -> None:
    whole = (range(runner.kv_shape.layers), range(runner.kv_shape.kv_heads))
    row = prompt_row(0, (5, 6, 7, 20), tuple(range(1, 15)))
    runner.submit(step_of(0, (row,)))
    before = runner.read_blocks(*whole, (5, 6, 7, 20))
    runner.swap_out((5, 6, 7, 20), (3, 4, 0, 7))
    runner.submit(step_of(1, (prompt_row(0, (5, 6, 7, 20), tuple(range(101, 115))),)))
    runner.swap_in((3, 4, 0, 7), (9, 10, 11, 2)).result()
    assert runner.read_blocks(*whole, (9, 10, 11, 2)).result() == before.result()
    assert runner.read_blocks(*whole, (5, 6, 7, 20)).result() != before.result()


def test_a_sequence_goes_on_after_it_was_swapped(runner: CpuRunner, alone: dict[str, list[int]]) -> None:
    stream = Stream(runner, KINDS["penalised"], 0, range(1, 9))
    stream.run(6)
    computed = stream._computed
    runner.swap_out((1, 2, 3), (0, 1, 2))
    Stream(runner, KINDS["random"], 0, range(1, 9)).run(9)
    runner.swap_in((0, 1, 2), (30, 31, 32))
    stream.move(3, range(30, 38))
    stream._computed = computed
    assert stream.run(16) == alone["penalised"]


@pytest.mark.parametrize(
    ("blocks", "host", "says"),
    [
        ((0,), (0,), "block 0 is outside"),
        ((64,), (0,), "block 64 is outside"),
        ((1,), (8,), "host block 8 is outside"),
        ((1,), (-1,), "host block -1 is outside"),
        ((1, 2), (3,), "2 blocks cannot swap with 1 host blocks"),
    ],
)
def test_a_swap_outside_either_memory_is_refused(
    runner: CpuRunner, blocks: tuple[int, ...], host: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        runner.swap_out(blocks, host)
    with pytest.raises(ValueError, match=says):
        runner.swap_in(host, blocks)
