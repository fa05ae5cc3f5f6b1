"""The bench of published figures: what it says of the papers holds on short runs too, and no row hides a gap."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.published import ledger, machines, sarathi, splitwise, streams
from bench.published.__main__ import page
from bench.published.figure import Figure, exactly

from poolwright.sim.profiles import machine
from poolwright.sim.step_time import Chunk


def test_the_ledger_says_what_distserve_printed_and_what_it_is() -> None:
    request, rate, slow, fast, nvlink = ledger.figures()
    assert request.ours == 2 * 64 * 72 * 128 * 2 * 512 / 1e9
    assert (request.published, rate.published) == ((1.13, 1.13), (90, 90))
    assert [figure.cells()[3] for figure in (request, rate)] == ["1.21 GB", "96.6 Gbps"]
    assert [figure.ours for figure in (slow, fast, nvlink)] == pytest.approx([3.865, 0.1208, 0.0201], abs=5e-4)


@pytest.mark.parametrize("data_set", sarathi.ABLATION)
def test_the_ablations_order_is_the_papers(data_set: str) -> None:
    runs = sarathi.ablation_runs(data_set, seeds=1, requests=64)
    del runs["both, prompts share"]
    assert sarathi.by_tbt(runs) == ["both", "chunks only", "hybrid only"]
    # Who is first among whole prompts and both is a matter of the draw in so few requests.
    assert sarathi.by_ttft(runs)[-1] == "chunks only"


def test_chunks_of_a_prompt_cost_more_the_smaller_they_are_and_2048_next_to_nothing() -> None:
    model = machines.yi_34b()
    for prompt in (4096, 8192):
        small, large, whole = (sarathi.chunked_seconds(model, prompt, chunk) for chunk in (512, 2048, prompt))
        assert small > large
        assert large == pytest.approx(whole, rel=0.1)


def test_a_step_of_yi_takes_what_was_measured() -> None:
    time = machines.yi_34b().step_time
    assert time.seconds((Chunk(0, 1024),), 0, 0.0) == pytest.approx(0.2143, rel=1e-3)
    assert time.seconds((), 32, 32 * 1024.0) == pytest.approx(0.0879, rel=1e-3)
    # What no fit has seen: 1,021 prompt tokens beside 3 decodes.
    assert time.seconds((Chunk(0, 1021),), 3, 3 * 1024.0) == pytest.approx(0.2176, rel=0.02)


def test_chunks_cut_the_longest_gap_and_delay_the_long_prompt() -> None:
    stalls = streams.stall(machine("h100-llama-70b-tp8"))
    assert stalls["whole"].usual == pytest.approx(stalls["chunks"].usual, rel=0.01)
    assert stalls["whole"].largest > 5 * stalls["chunks"].largest > 5 * stalls["chunks"].usual
    assert stalls["chunks"].ttft_of_long > stalls["whole"].ttft_of_long


def test_chunked_prefill_serves_a_higher_rate_within_the_slo_than_whole_prompts() -> None:
    rates = [
        sarathi.capacity(machines.yi_34b(), sarathi.engine_of(system, 512, 8192), sarathi.LENGTHS["openchat"], 0.2, 48)
        for system in ("Sarathi-Serve", "vLLM")
    ]
    assert rates[0] > rates[1]


def test_a_newer_gpu_is_worth_more_to_prompts_than_to_answers() -> None:
    worth = {figure.what: figure.ours or 0.0 for figure in splitwise.hardware() if "aiconfigurator" in figure.by}
    prompt, decodes = worth.values()
    assert prompt > decodes > 1


def test_a_row_without_data_has_its_reason_and_a_far_one_its_cause_or_says_unexplained() -> None:
    with pytest.raises(ValueError, match="no data needs its reason"):
        Figure("capacity", "a paper", exactly(2.0), None, "")
    far = Figure("capacity", "a paper", exactly(2.0), 3.0, "a table")
    assert far.cells()[-3:] == ("1.50", "a table", "unexplained")
    assert replace(far, why="another GPU").cells()[-1] == "another GPU"
    assert replace(far, ours=2.2, why="another GPU").cells()[-1] == ""
    assert replace(far, published=(2.0, 4.0)).ratio == 1.0
    assert replace(far, published=None).cells()[4] == "–"


def test_the_page_counts_its_rows() -> None:
    text = page({"ledger": ledger.figures()})
    assert "Of 5 rows, 4 have both figures: 4 within 20%" in text
    assert text.count("| KV of ") == 2
