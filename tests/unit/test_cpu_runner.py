"""The CPU runner: submit returns at once, steps and block copies run in order, a slot keeps its last token."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from poolwright_engine.cpu_runner import CpuRunner
from poolwright_engine.loader import LoadedModel, load_model
from poolwright_engine.runner import Row, Step
from poolwright_engine.sequence import SamplingParams
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
    return CpuRunner(loaded.model, 32, block_size=4, max_num_seqs=4, cpu_threads=1, duty_percent=duty_percent)


def prompt_row(slot: int, blocks: tuple[int, ...], ids: tuple[int, ...] = PROMPT) -> Row:
    return Row(slot, 0, len(ids), ids, blocks, samples=True, params=GREEDY)


def decode_row(slot: int, position: int, blocks: tuple[int, ...]) -> Row:
    return Row(slot, position, 1, (), blocks, samples=True, params=GREEDY, use_last_sampled=True)


def continue_greedily(runner: CpuRunner, slot: int, blocks: tuple[int, ...], start: int, count: int) -> list[int]:
    """All steps are submitted before the first is read."""
    steps = [Step(i, (decode_row(slot, start + i, blocks),)) for i in range(count)]
    handles = [runner.submit(step) for step in steps]
    return [token_id for handle in handles for (token_id,) in handle.result().token_ids]


def greedy_stream(runner: CpuRunner, slot: int, blocks: tuple[int, ...], count: int) -> list[int]:
    ((first,),) = runner.submit(Step(0, (prompt_row(slot, blocks),))).result().token_ids
    return [first, *continue_greedily(runner, slot, blocks, len(PROMPT), count - 1)]


def test_a_step_ahead_uses_the_token_that_the_step_before_samples(runner: CpuRunner) -> None:
    """The same tokens as when every id is read and given back."""
    ahead = greedy_stream(runner, 0, (5, 9, 2, 7), 6)
    ids = list(PROMPT)
    for expected in ahead:
        result = runner.submit(Step(0, (prompt_row(1, (11, 12, 13, 14), tuple(ids)),))).result()
        assert result.token_ids == ((expected,),)
        ids.append(expected)


def test_submit_returns_before_the_step_is_done(loaded: LoadedModel) -> None:
    runner = make_runner(loaded, duty_percent=1)  # each step takes a hundred times its work
    try:
        runner.submit(Step(0, (prompt_row(0, (1, 2)),))).result()
        began = time.perf_counter()
        handle = runner.submit(Step(1, (prompt_row(0, (1, 2)),)))
        submitted = time.perf_counter() - began
        result = handle.result()
        assert submitted < 0.5 * result.busy_seconds
        assert not runner.submit(Step(2, (prompt_row(0, (1, 2)),))).done()
    finally:
        runner.close()


def test_a_capped_runner_rests_for_its_share(loaded: LoadedModel) -> None:
    full, capped = make_runner(loaded), make_runner(loaded, duty_percent=10)
    row = prompt_row(0, tuple(range(1, 31)), tuple(i % 256 for i in range(120)))
    try:
        fast = min(full.submit(Step(i, (row,))).result().busy_seconds for i in range(5))
        slow = min(capped.submit(Step(i, (row,))).result().busy_seconds for i in range(5))
    finally:
        full.close()
        capped.close()
    assert slow > 5 * fast


def test_a_row_that_does_not_sample_gives_no_token(runner: CpuRunner) -> None:
    chunk = Row(0, 0, 4, PROMPT[:4], (1, 2), samples=False, params=GREEDY)
    result = runner.submit(Step(3, (chunk, prompt_row(1, (3, 4))))).result()
    assert result.number == 3
    assert result.token_ids[0] == ()
    assert len(result.token_ids[1]) == 1
    rest = Row(0, 4, 3, PROMPT[4:], (1, 2), samples=True, params=GREEDY)
    assert runner.submit(Step(4, (rest,))).result().token_ids == (result.token_ids[1],)


def test_an_empty_step_is_a_step(runner: CpuRunner) -> None:
    assert runner.submit(Step(9, ())).result().token_ids == ()


def test_kv_carried_to_other_blocks_of_another_runner_goes_on_with_the_same_tokens(loaded: LoadedModel) -> None:
    here, there = make_runner(loaded), make_runner(loaded)
    try:
        expected = greedy_stream(here, 0, (1, 2, 3, 4), 6)
        ((first,),) = here.submit(Step(0, (prompt_row(1, (8, 6)),))).result().token_ids
        assert first == expected[0]
        shape = here.kv_shape
        for layers in (range(1), range(1, shape.layers)):
            for heads in (range(1), range(1, shape.kv_heads)):
                data = here.read_blocks(layers, heads, (8, 6)).result()
                assert len(data) == 2 * len(layers) * 2 * 4 * len(heads) * shape.head_size * 4
                there.write_blocks(layers, heads, (20, 3), data)
        there.set_last_sampled(2, first)
        assert continue_greedily(there, 2, (20, 3, 21, 22), len(PROMPT), 5) == expected[1:]
    finally:
        here.close()
        there.close()


def test_a_read_sees_the_steps_before_it_and_not_those_after(runner: CpuRunner) -> None:
    whole = (range(runner.kv_shape.layers), range(runner.kv_shape.kv_heads), (1, 2))
    handles = []
    for ids in (PROMPT, PROMPT[::-1]):
        runner.submit(Step(0, (prompt_row(0, (1, 2), ids),)))
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
        (range(3), range(2), (32,), "block 32 is outside"),
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
    with pytest.raises(IndexError):
        runner.set_last_sampled(4, 1)


def test_what_the_device_raises_is_raised_by_the_result_and_the_next_step_runs(runner: CpuRunner) -> None:
    short_table = runner.submit(Step(0, (prompt_row(0, (1,)),)))
    good = runner.submit(Step(1, (prompt_row(0, (1, 2)),)))
    with pytest.raises(ValueError, match="7 tokens need 2 blocks of 4, the table has 1"):
        short_table.result()
    assert good.result().token_ids[0] is not None


def test_close_ends_the_worker(loaded: LoadedModel, tmp_path: Path) -> None:
    runner = make_runner(loaded)
    handle = runner.submit(Step(0, (prompt_row(0, (1, 2)),)))
    runner.close()
    assert handle.result().token_ids[0] is not None
    with pytest.raises(RuntimeError):
        runner.submit(Step(1, ()))
