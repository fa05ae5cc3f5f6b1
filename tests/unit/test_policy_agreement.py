"""The parts of the bench that lays the simulator beside real processes: its device, its measures, its file."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.policy_agreement import many_engines, page
from bench.policy_agreement.client import Answer, Lengths, Load
from bench.policy_agreement.comparison import Row, rows, step_errors
from bench.policy_agreement.measured_network import lone_requests, ways
from bench.policy_agreement.paced_runner import KV_SHAPE, PacedRunner
from bench.policy_agreement.replay import EngineOptions, Latencies, seen, simulated
from bench.policy_agreement.slowed import SlowedStepTime
from bench.policy_agreement.step_work import work_of
from bench.policy_agreement.store import Store
from bench.policy_agreement.watched_runner import WatchedRunner

from poolwright.sim.step_time import Chunk
from poolwright_engine.scheduling.sequence import SamplingParams
from poolwright_protocol.roles import Role
from support.linear_step_time import LinearStepTime, machine_model
from support.placed import Placed, placed, step_of

STEP_TIME = LinearStepTime()
BLOCK = 16
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


class Clock:
    """Time passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def paced(clock: Clock, num_blocks: int = 8) -> PacedRunner:
    return PacedRunner(
        STEP_TIME,
        KV_SHAPE,
        vocab_size=1000,
        num_blocks=num_blocks,
        block_size=BLOCK,
        clock=clock,
        sleep=clock.sleep,
    )


def row(slot: int, start: int, length: int, samples: bool = True) -> Placed:
    return placed(slot, start, length, (1,) * length, [1, 2, 3], samples, GREEDY)


# The device.


def test_the_next_step_begins_when_the_last_one_ends_however_late_the_host_looks() -> None:
    clock = Clock()
    device = paced(clock)
    first, second = (device.submit(step_of(number, (row(0, 40, 1),))) for number in (1, 2))
    step = STEP_TIME.seconds((), 1, 41)
    assert first.result().busy_seconds == pytest.approx(step)
    assert clock.now == pytest.approx(100 + step)
    clock.now += 10 * step  # the host was away; the second step is long done
    second.result()
    assert clock.now == pytest.approx(100 + 11 * step)
    device.submit(step_of(3, (row(0, 41, 1),))).result()
    assert clock.now == pytest.approx(100 + 12 * step, rel=1e-6)


def test_kv_is_read_behind_the_steps_submitted_before_and_comes_as_it_was_written() -> None:
    clock = Clock()
    sender, receiver = paced(clock), paced(clock)
    layers, heads = range(2, 5), range(KV_SHAPE.kv_heads)
    size = 2 * len(layers) * 2 * BLOCK * KV_SHAPE.kv_heads * KV_SHAPE.head_size * KV_SHAPE.dtype_bytes
    data = bytes(index * 31 % 251 for index in range(size))
    sender.write_blocks(layers, heads, [3, 1], data).result()
    sender.submit(step_of(1, (row(0, 0, 100),)))
    read = sender.read_blocks(layers, heads, [3, 1]).result()
    assert clock.now == pytest.approx(100 + STEP_TIME.seconds((Chunk(0, 100),), 0, 0))
    receiver.write_blocks(layers, heads, [2, 7], read).result()
    assert receiver.read_blocks(layers, heads, [2, 7]).result() == data
    assert receiver.read_blocks(range(0, 2), heads, [2, 7]).result().count(0) == size * 2 // 3


def test_a_step_is_chunks_and_decodes() -> None:
    step = step_of(1, (row(0, 40, 1), row(1, 16, 32, samples=False), row(2, 9, 1)))
    assert work_of(step) == ((Chunk(16, 32),), 2, 51)
    result = paced(Clock()).submit(step).result()
    assert [len(tokens) for tokens in result.token_ids] == [1, 0, 1]


def test_a_watched_device_does_the_same_and_leaves_a_line_for_each_step(tmp_path: Path) -> None:
    clock = Clock()
    file = tmp_path / "steps"
    watched, plain = WatchedRunner(paced(clock), file), paced(clock)
    step = step_of(7, (row(0, 40, 1), row(1, 16, 32)))
    assert watched.submit(step).result() == plain.submit(step).result()
    watched.close()
    (line,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert line[1:] == [STEP_TIME.seconds((Chunk(16, 32),), 1, 41), [[16, 32]], 1, 41]
    found = step_errors([line], LinearStepTime(fixed_seconds=2 * line[1], prompt_token_seconds=0, decode_seconds=0))
    assert found.steps == 1
    assert found.mean == pytest.approx(1.0, abs=1e-3)


def test_a_slowed_machine_takes_the_same_steps_in_more_time() -> None:
    slowed = SlowedStepTime(STEP_TIME, 4.0)
    assert slowed.seconds((Chunk(16, 32),), 2, 51) == pytest.approx(4 * STEP_TIME.seconds((Chunk(16, 32),), 2, 51))
    steps, seconds = STEP_TIME.decode_run(3, 300, 0.5, 1000)
    assert slowed.decode_run(3, 300, 2.0, 1000) == (steps, pytest.approx(4 * seconds))


# What is compared.


def latencies(*ttft: float) -> Latencies:
    return Latencies(ttft, (0.05,) * 10)


def test_an_allowance_is_the_limit_or_what_the_real_runs_differ_by() -> None:
    limits = {("ttft", 50): 0.05, ("tbt", 50): 0.05}
    real = [latencies(0.1), latencies(0.12), latencies(0.11)]
    ttft, tbt = rows(real, [latencies(0.121)] * 3, limits)
    assert (ttft.real, ttft.lowest, ttft.highest, ttft.simulated) == (0.11, 0.1, 0.12, 0.121)
    assert ttft.error == pytest.approx(0.1)
    assert ttft.allowance == ttft.spread == pytest.approx(1 / 11)
    assert not ttft.agrees
    assert (tbt.error, tbt.spread, tbt.allowance, tbt.agrees) == (0.0, 0.0, 0.05, True)
    assert Row("ttft", 50, 0.11, 0.1, 0.12, 0.12, 0.05).agrees
    with pytest.raises(ValueError, match="nothing to compare"):
        rows([Latencies((), ())], [latencies(1.0)], limits)


def test_arrivals_are_drawn_once_and_lengths_stay_within_bounds() -> None:
    load = Load(200.0, 4.0, Lengths(100, 1.0, 50, 200), Lengths(10, 0.5, 2, 20), seed=5)
    wanted = load.drawn()
    assert wanted == load.drawn()
    assert len(wanted) == pytest.approx(800, rel=0.15)
    assert all(50 <= each.prompt_tokens <= 200 and 2 <= each.output_tokens <= 20 for each in wanted)
    assert [each.at_seconds for each in wanted] == sorted(each.at_seconds for each in wanted)


def lone_answers(first_way: float, second_way: float, rate: float) -> list[Answer]:
    """As an idle pool would give them."""
    made = []
    for number, asked in enumerate(lone_requests((128, 512), 3)):
        sent = 10.0 * number
        first = sent + first_way + STEP_TIME.seconds((Chunk(0, asked.prompt_tokens),), 0, 0)
        times = [first]
        for context in range(asked.prompt_tokens + 1, asked.prompt_tokens + asked.output_tokens):
            times.append(times[-1] + STEP_TIME.seconds((), 1, context))
        late = second_way + asked.prompt_tokens * machine_model().kv_bytes_per_token / rate if rate else 0.0
        made.append(Answer(sent, asked.prompt_tokens, (first, *(time + late for time in times[1:]))))
    return made


@pytest.mark.parametrize(("handoff", "split_first"), [(0.009, 0.006), (0.002, 0.006)])
def test_a_network_measured_on_the_idle_pool_gives_its_times_again(handoff: float, split_first: float) -> None:
    whole, split = lone_answers(0.004, 0.0, 0.0), lone_answers(split_first, handoff, 1e9)
    found = ways(whole, split, STEP_TIME, machine_model().kv_bytes_per_token)
    assert found.whole_first_seconds == pytest.approx(0.004)
    assert found.split_first_seconds == pytest.approx(split_first)
    assert found.handoff_seconds == pytest.approx(handoff)
    assert found.bytes_per_second == pytest.approx(1e9, rel=1e-6)
    options = EngineOptions(step_tokens=512, most_streams=8)
    for answers, roles in ((whole, [Role.MIXED]), (split, [Role.PROMPT, Role.TOKEN])):
        assert_same(seen(answers), simulated(answers, roles, machine_model(), found.network(), options))


def assert_same(real: Latencies, theirs: Latencies) -> None:
    def near(a: Sequence[float], b: Sequence[float]) -> bool:
        return sorted(a) == pytest.approx(sorted(b), abs=1e-6)

    assert near(real.ttft, theirs.ttft)
    assert near(real.tbt, theirs.tbt)


# The file and the page.


def test_a_file_keeps_what_was_measured_of_the_same_setup(tmp_path: Path) -> None:
    file = tmp_path / "agreement.json"
    setup = {"roles": [Role.PROMPT], "seconds": (1.0, 2.0)}
    store = Store(file, keep=True)
    store.section("a", setup)["repeats"].append({"answers": []})
    store.save()
    assert Store(file, keep=True).section("a", setup)["repeats"] == [{"answers": []}]
    assert Store(file, keep=True).section("a", setup | {"seconds": 3})["repeats"] == []
    assert Store(file, keep=False).section("a", setup)["repeats"] == []


def test_the_page_says_what_the_file_says(tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    target.write_text(page.PAGE.read_text())
    row = Row("ttft", 90, 0.2, 0.19, 0.22, 0.25, 0.05)
    section = {
        "repeats": [{"answers": [[0.0, 10, [0.2, 0.3, 0.4]]], "cpu_share": 0.5}],
        "rows": [row.as_json()],
        "step_errors": asdict(step_errors([], STEP_TIME)) | {"mean": 0.09},
        "step_limit": 0.08,
        "least_gaps": 5000,
        "ways": asdict(ways(lone_answers(0.1, 0, 0), lone_answers(0.1, 0, 1e9), STEP_TIME, 1)),
    }
    about = {"processor": "a processor", "cores": 2}
    page.write({"one engine": section, "many engines": section}, about, target)
    text = target.read_text()
    assert "| TTFT P90 | 200.0 | 190.0 | 220.0 | 250.0 | +25.0 | 10.0 | 10.0 | **no** |" in text
    assert "1 repeats of 1 requests with at least 2 gaps each. **Fewer than the 5000" in text
    assert "at most 8 % **not kept**" in text
    assert text.count("a processor, 2 cores, busy 50 to 50 %") == 2
    good = Row("ttft", 90, 0.2, 0.19, 0.22, 0.21, 0.05).as_json()
    steps = {"step_limit": 0.08, "step_errors": {"mean": 0.07}}
    measured = {"repeats": section["repeats"], "rows": [good], **steps}
    assert page.agrees(measured)
    assert not page.agrees(measured | {"rows": [good, row.as_json()]})
    assert not page.agrees(measured | {"step_errors": {"mean": 0.09}})
    assert page.agrees(measured | {"least_gaps": 2})
    assert not page.agrees(measured | {"least_gaps": 3})


def test_the_whole_bench_asks_for_gaps_and_a_look_for_none() -> None:
    assert many_engines.standard().least_gaps == many_engines.LEAST_GAPS == 5000
    assert many_engines.short().least_gaps == 0
