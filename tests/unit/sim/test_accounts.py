"""The three accounts: which answer which numbers give."""

from dataclasses import replace

import pytest

from poolwright.sim.accounts import MOST_LINK_SHARE, Answer, Case, Served, verdict

CASE = Case(
    tbt_seconds=0.05,
    target=0.9,
    machines=4,
    whole_step_seconds=0.3,
    chunked_step_seconds=0.04,
    prompt_load=1.2,
    token_load=1.5,
    link_share=0.1,
    kv_wait_seconds=0.002,
    one_pool=Served("4M", 4, 0.95),
    split=Served("2P2T", 4, 0.97),
)


def test_one_pool_that_chunks_meet_is_left_one_pool() -> None:
    found = verdict(CASE)
    assert found.answer is Answer.CHUNKED_PREFILL
    assert found.accounts[0].holds
    assert "300.0 ms" in found.accounts[0].why
    assert "40.0 ms" in found.accounts[0].why


def test_a_split_that_alone_meets_the_target_is_taken() -> None:
    found = verdict(replace(CASE, one_pool=Served("4M", 4, 0.6)))
    assert found.answer is Answer.SPLIT
    assert "60.0%" in found.why


def test_a_split_that_costs_less_is_taken() -> None:
    assert verdict(replace(CASE, one_pool=Served("5M", 5, 0.95))).answer is Answer.SPLIT


@pytest.mark.parametrize("limit", [{"link_share": MOST_LINK_SHARE + 0.01}, {"kv_wait_seconds": 0.06}])
def test_without_bandwidth_nothing_is_split_whatever_it_attains(limit: dict[str, float]) -> None:
    found = verdict(replace(CASE, one_pool=Served("4M", 4, 0.1), **limit))  # type: ignore[arg-type]
    assert found.answer is Answer.DO_NOT_SPLIT
    assert not found.accounts[1].holds


def test_offline_work_wants_throughput() -> None:
    assert verdict(replace(CASE, offline=True, link_share=2.0)).answer is Answer.THROUGHPUT_FIRST


def test_one_machine_is_one_pool() -> None:
    found = verdict(replace(CASE, machines=1, split=None))
    assert found.answer is Answer.ONE_POOL
    assert "there is one" in found.why


def test_traffic_that_fills_no_pool_is_one_pool() -> None:
    assert verdict(replace(CASE, prompt_load=0.2)).answer is Answer.ONE_POOL


def test_a_split_that_alone_meets_the_target_outweighs_thin_traffic_and_says_so() -> None:
    found = verdict(replace(CASE, prompt_load=0.2, one_pool=Served("4M", 4, 0.6)))
    assert found.answer is Answer.SPLIT
    assert "although" in found.why


def test_prompts_that_break_nothing_need_no_chunks() -> None:
    assert verdict(replace(CASE, whole_step_seconds=0.045)).answer is Answer.ONE_POOL


def test_chunks_that_break_the_target_too_are_no_help() -> None:
    assert not verdict(replace(CASE, chunked_step_seconds=0.06)).accounts[0].holds
