"""Step times from tables: they are what was measured, and behave as a step time has to."""

import csv
import math
import random
from collections.abc import Sequence
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolwright.sim import data_files, profiles
from poolwright.sim.profiles import Mixed, ProfileStepTime, TableStepTime
from poolwright.sim.step_time import Chunk, MachineModel, StepTime
from poolwright_protocol.step_time import StepCost, StepProfile

DOCUMENT = {
    "format": 1,
    "decode": {"fixed_seconds": 0.01, "token_seconds": 2e-4, "kv_token_seconds": 3e-8},
    "mixed": {"fixed_seconds": 0.012, "token_seconds": 1e-4, "kv_token_seconds": 2e-8},
    "points": [],
}
MACHINES: dict[str, MachineModel] = {
    **profiles.machines(),
    "profiled": profiles.profiled_machine(DOCUMENT, "profiled", 100_000, 1024),
}
names = st.sampled_from(sorted(MACHINES))
counts = st.integers(0, 600)
contexts = st.floats(0, 2e6)
chunks = st.lists(st.builds(Chunk, st.integers(0, 30_000), st.integers(1, 3000)), max_size=4)


def milliseconds(time: StepTime, prompt: int, decodes: int, context: float) -> float:
    return time.seconds([Chunk(0, prompt)] if prompt else [], decodes, decodes * context) * 1e3


def test_kernel_tables_are_met_where_they_were_measured() -> None:
    errors: dict[str, list[float]] = {}
    for row in data_files.rows("iteration_times_ms.csv"):
        name = f"{row['hw'].removesuffix('_sxm')}-{row['model']}-tp{row['tp']}"
        time = profiles.machine(name).step_time
        args = int(row["prefill_tokens"]), int(row["decode_batch"]), float(row["decode_ctx"])
        errors.setdefault(name, []).append(milliseconds(time, *args) / float(row["iter_ms"]) - 1)
    assert len(errors) == 9
    for name, found in errors.items():
        assert max(map(abs, found)) < 0.002, name


@pytest.mark.parametrize(
    ("name", "prompts", "line"),
    [
        # Milliseconds of prompts of 128, 512, 2048, 8192; of B decodes with contexts c: a + b·B + c·B·context.
        ("h100-llama-70b-tp8", (14, 26, 88, 353), (10.77, 0.0330, 1.31e-5)),
        ("h200-llama-70b-tp8", (12, 25, 81, 340), (8.68, 0.0322, 9.25e-6)),
        ("a100-llama-70b-tp8", (28, 78, 229, 846), (17.76, 0.0887, 2.64e-5)),
        ("h100-llama-8b-tp1", (8.1, 12.3, 45, 204), (6.90, 0.0131, 4.19e-5)),
        ("splitwise-h100-llama2-70b-tp8", (52, 53, 137, 845), (29.80, 0.2016, 1.778e-4)),
        ("splitwise-a100-llama2-70b-tp8", (65, 93, 274, 1550), (44.16, 0.2000, 3.100e-4)),
        ("splitwise-a100-bloom-176b-tp8", (80, 174, 540, 3593), (48.03, 0.4440, 4.025e-4)),
    ],
)
def test_times_agree_with_the_fits_made_of_them(
    name: str, prompts: Sequence[float], line: tuple[float, float, float]
) -> None:
    time = profiles.machine(name).step_time
    for tokens, expected in zip((128, 512, 2048, 8192), prompts, strict=True):
        assert milliseconds(time, tokens, 0, 0) == pytest.approx(expected, rel=0.025)
    a, b, c = line
    errors = [
        abs(milliseconds(time, 0, batch, context) / (a + b * batch + c * batch * context) - 1)
        for batch in (1, 8, 32, 64, 128)
        for context in (512, 1024, 2048)
    ]
    assert mean(errors) < 0.08


def test_decodes_of_splitwise_are_keyed_by_their_number() -> None:
    """Its own model answers 30.7 ms for 64 decodes, whose row in the same table says 50.2."""
    time = profiles.machine("splitwise-h100-llama2-70b-tp8").step_time
    assert milliseconds(time, 0, 64, 576) == pytest.approx(50.2, rel=0.03)


def test_kv_of_splitwise_counts_kv_heads() -> None:
    assert profiles.machine("splitwise-a100-llama2-70b-tp8").kv_bytes_per_token == 327_680
    assert profiles.machine("splitwise-a100-bloom-176b-tp8").kv_bytes_per_token == 70 * 14_336 * 4


def test_distserve_coefficients_are_its_own() -> None:
    time = profiles.machine("distserve-a100-opt-66b-tp4").step_time
    # 29.44 + .1514 · 2048 + 8.317e-6 · 2048²; two prompts of 1024 have half the squares.
    assert milliseconds(time, 2048, 0, 0) == pytest.approx(29.4416 + 0.1513522 * 2048 + 8.31745e-6 * 2048**2, rel=1e-4)
    two = time.seconds([Chunk(0, 1024), Chunk(0, 1024)], 0, 0) * 1e3
    assert two == pytest.approx(29.4416 + 0.1513522 * 2048 + 8.31745e-6 * 2 * 1024**2, rel=1e-4)
    assert milliseconds(time, 0, 32, 500) == pytest.approx(30.76028 + 4.519476e-4 * 32 * 500 + 0.0632842 * 32, rel=1e-4)
    assert milliseconds(time, 0, 200, 500) == pytest.approx(
        27.47082 + 4.046846e-4 * 200 * 500 + 0.1248067 * 200, rel=1e-4
    )


def test_unknown_costs_are_none_and_known_ones_are_of_table_one() -> None:
    a100, h100, h200 = (profiles.machine(f"{gpu}-llama-70b-tp8") for gpu in ("a100", "h100", "h200"))
    assert (a100.dollars_per_hour, a100.watts) == (pytest.approx(17.6), 3200)
    assert (h100.dollars_per_hour, h100.watts) == (pytest.approx(38.0), 5600)
    assert h200.dollars_per_hour is None
    assert MACHINES["profiled"].dollars_per_hour is MACHINES["profiled"].watts is None


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="h100-llama-70b-tp8"):
        profiles.machine("h100")


@pytest.mark.parametrize("name", ["h100-llama-70b-tp8", "a100-llama-8b-tp1", "distserve-a100-opt-13b-tp1"])
@pytest.mark.parametrize("size", [64, 512, 1000])
def test_chunks_of_a_prompt_cost_its_attention_together(name: str, size: int) -> None:
    """N − 1, N − 2, … chunks are read again: their attention adds up to that of the whole prompt."""
    time = profiles.machine(name).step_time
    parts = profiles.machine(name).step_time.parts  # type: ignore[attr-defined]
    prompt = 6000
    starts = range(0, prompt, size)
    cut = sum(time.seconds([Chunk(start, min(size, prompt - start))], 0, 0) for start in starts)
    linear = sum(time.seconds([Chunk(0, min(size, prompt - start))], 0, 0) for start in starts)
    own = sum(parts.chunk_attention(min(size, prompt - start)) for start in starts)
    assert cut - (linear - own) == pytest.approx(parts.chunk_attention(prompt), rel=1e-9)
    later = time.seconds([Chunk(30_000, size)], 0, 0)
    assert later > time.seconds([Chunk(0, size)], 0, 0)


def test_chunking_costs_what_sarathi_measured_in_the_same_order() -> None:
    """Figure 14 (Yi-34B, two A100): 512-token chunks of a 4k prompt take 1.19 of the whole, 2,048-token ones 1.02."""
    published = {
        (int(row["prefill_length"]), int(row["chunk_size"])): float(row["prefill_execution_time_relative"])
        for row in csv.DictReader(data_files.text("sarathi_fig14_chunking_overhead.csv").splitlines())
    }
    assert published[4095, 512] == pytest.approx(1.189, abs=1e-3)
    time = profiles.machine("a100-llama-70b-tp4").step_time

    def cost(size: int) -> float:
        return sum(time.seconds([Chunk(start, size)], 0, 0) for start in range(0, 4096, size))

    overhead = [cost(size) / cost(4096) for size in (512, 1024, 2048)]
    assert overhead[0] == pytest.approx(published[4095, 512], abs=0.2)
    assert overhead == sorted(overhead, reverse=True)
    assert all(1 <= some < 1.4 for some in overhead)


@given(names, chunks, counts, contexts, st.data())
def test_times_never_fall_when_tokens_are_added(
    name: str, some: list[Chunk], decodes: int, context: float, data: st.DataObject
) -> None:
    time = MACHINES[name].step_time
    context = context if decodes else 0.0
    before = time.seconds(some, decodes, context) * (1 - 1e-12)
    assert before >= 0
    if decodes:
        assert time.seconds(some, decodes, context + data.draw(st.floats(0, 1e5))) >= before
    chunk = data.draw(st.builds(Chunk, st.integers(0, 30_000), st.integers(1, 3000)))
    assert time.seconds([*some, chunk], decodes, context) >= before
    if some:
        longer = [*some[:-1], Chunk(some[-1].start, some[-1].tokens + data.draw(st.integers(0, 500)))]
        assert time.seconds(longer, decodes, context) >= before


@given(names, st.integers(0, 8192), counts, st.floats(0, 9000), st.integers(0, 60), st.integers(0, 60), contexts)
def test_the_bounds_table_is_below_and_never_falls(
    name: str, prompt: int, decodes: int, context: float, more_prompt: int, more_decodes: int, more_kv: float
) -> None:
    time = MACHINES[name].step_time
    assert isinstance(time, TableStepTime | ProfileStepTime)
    kv = decodes * context

    def least(prompt_tokens: int, decodes: int, context_tokens: float) -> float:
        p, c = np.array([float(prompt_tokens)]), np.array([context_tokens if decodes else 0.0])
        return float(time.least_seconds(p, decodes, c)[0])

    chunk = [Chunk(0, prompt)] if prompt else []
    assert least(prompt, decodes, kv) <= (time.seconds(chunk, decodes, kv) - time.prompt_seconds(prompt)) * (1 + 1e-9)
    more = least(prompt + more_prompt, decodes + more_decodes, kv + more_kv)
    assert more >= least(prompt, decodes, kv) * (1 - 1e-9)


def summed(time: StepTime, decodes: int, context: float, seconds: float, most: int) -> tuple[int, float]:
    steps, spent = 0, 0.0
    while steps < most and (steps == 0 or spent < seconds):
        spent += time.seconds([], decodes, context + steps * decodes)
        steps += 1
    return steps, spent


@given(names, st.integers(1, 300), st.integers(1, 9000), st.floats(0, 10), st.integers(1, 400))
def test_a_run_of_decodes_is_the_sum_of_its_steps(
    name: str, decodes: int, context: int, seconds: float, most: int
) -> None:
    time = MACHINES[name].step_time
    total = float(decodes * context)
    steps, spent = time.decode_run(decodes, total, seconds, most)
    wanted_steps, wanted = summed(time, decodes, total, seconds, most)
    if steps != wanted_steps:  # only where the last one begins at that instant, but for rounding
        shorter = min((steps, spent), (wanted_steps, wanted))[1]
        assert abs(steps - wanted_steps) == 1
        assert shorter == pytest.approx(seconds, rel=1e-9)
    else:
        assert spent == pytest.approx(wanted, rel=1e-9)


def test_a_run_crosses_the_knots_of_the_table() -> None:
    time = profiles.machine("h100-llama-8b-tp1").step_time
    steps, spent = time.decode_run(64, 64 * 100.0, math.inf, 6000)
    assert (steps, spent) == (6000, pytest.approx(summed(time, 64, 64 * 100.0, math.inf, 6000)[1], rel=1e-9))


@pytest.mark.parametrize("load", [profiles.splitwise_machines, profiles.distserve_machines])
def test_mixed_steps_apart_take_as_long_as_two(load: object) -> None:
    assert load in (profiles.splitwise_machines, profiles.distserve_machines)
    shared, apart = (load(None, mixed) for mixed in (Mixed.SHARED, Mixed.APART))  # type: ignore[operator]
    for name in shared:
        one, two = shared[name].step_time, apart[name].step_time
        alone = one.seconds([Chunk(0, 512)], 0, 0) + one.seconds([], 16, 16_000)
        assert two.seconds([Chunk(0, 512)], 16, 16_000) == pytest.approx(alone)
        assert one.seconds([Chunk(0, 512)], 16, 16_000) < alone


def test_a_profile_of_an_engine_predicts_by_its_lines() -> None:
    time = MACHINES["profiled"].step_time
    assert time.seconds([], 4, 1000) == pytest.approx(0.01 + 4 * 2e-4 + 1000 * 3e-8)
    assert time.seconds([Chunk(100, 50)], 4, 1000) == pytest.approx(0.012 + 54 * 1e-4 + 1150 * 2e-8)


def test_a_step_with_prompts_is_never_quicker_than_its_decodes() -> None:
    odd = StepProfile(StepCost(0.05, 0.0, 0.0), StepCost(0.01, 1e-6, 0.0))
    time = ProfileStepTime("odd", odd)
    assert time.seconds([Chunk(0, 10)], 1, 5) == time.seconds([], 1, 5) == 0.05


@pytest.mark.parametrize(
    "document", [{}, {**DOCUMENT, "format": 2}, {"format": 1, "decode": {}, "mixed": {}}, {"format": 1, "decode": 3}]
)
def test_what_is_no_profile_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"format|no profile"):
        profiles.profiled_machine(document, "x", 1, 1)


def test_a_step_time_is_a_few_microseconds_and_does_not_grow_with_use() -> None:
    """No absolute speed: the rows it keeps are as many as the numbers of decodes asked for."""
    time = profiles.kernel_machines()["h200-llama-70b-tp4"].step_time
    chance = random.Random(1)
    for _ in range(2000):
        time.seconds([Chunk(0, chance.randrange(1, 4000))], chance.randrange(50), chance.random() * 1e5)
    assert len(time._rows) <= 301  # type: ignore[attr-defined]
