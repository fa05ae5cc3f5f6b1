"""What other routers have on the machines, by what engines count: in the loads that a router chooses by."""

import pytest

from poolwright.core.pricing import MachinePrices
from poolwright.core.routes import Load
from poolwright.router.beside import Beside
from poolwright_protocol.step_time import StepCost, StepProfile

PRICES = MachinePrices(StepProfile(decode=StepCost(0.01, 1e-4, 1e-8), mixed=StepCost(0.01, 1e-4, 1e-8)))
IDLE = {"a": Load(), "b": Load()}


def heard_twice(beside: Beside, uid: str, requests: int, now: float = 0.0) -> None:
    for _ in range(2):
        beside.heard(uid, requests, beside.own(uid), now)


def test_what_an_engine_counts_beyond_this_routers_own_is_others() -> None:
    beside = Beside()
    beside.sent("a")
    beside.sent("a")
    heard_twice(beside, "a", 5)
    heard_twice(beside, "b", 0)
    loads = beside.added({"a": Load(streams=2, context_tokens=600.0), "b": Load()}, 0.0, 100.0)
    assert (loads["a"].streams, loads["a"].context_tokens) == (5, 1500.0)
    assert loads["b"] == Load()
    beside.ended("a")
    beside.ended("a")
    assert beside.own("a") == 0


def test_streams_of_others_are_taken_to_be_as_the_request_is_where_there_are_none_to_go_by() -> None:
    beside = Beside()
    heard_twice(beside, "a", 3)
    load = beside.added({"a": Load(prices=PRICES, kv_free_tokens=1000.0)}, 0.0, 200.0)["a"]
    assert (load.streams, load.context_tokens, load.kv_free_tokens) == (3, 600.0, 400.0)
    assert load.next_step_seconds == PRICES.decode_seconds(4, 600.0)


def test_a_request_that_ends_or_begins_while_an_engine_is_asked_is_nobody_elses() -> None:
    beside = Beside()
    beside.sent("a")
    own = beside.own("a")
    beside.ended("a")
    beside.heard("a", 1, own, 0.0)  # it had not ended there yet
    assert beside.added(IDLE, 0.0, 100.0) == IDLE
    beside.heard("a", 1, beside.own("a"), 2.0)  # nor now, by the engine's word; at the next look it has
    assert beside.added(IDLE, 2.0, 100.0) == IDLE
    beside.heard("a", 0, beside.own("a"), 4.0)
    assert beside.added(IDLE, 4.0, 100.0) == IDLE


def test_an_engine_that_says_no_more_is_not_believed_for_long() -> None:
    beside = Beside()
    heard_twice(beside, "a", 3, now=0.0)
    assert beside.added(IDLE, 5.0, 100.0)["a"].streams == 3
    assert beside.added(IDLE, 11.0, 100.0) == IDLE
    heard_twice(beside, "a", 3, now=12.0)
    beside.keep({"b"})
    assert beside.added(IDLE, 12.0, 100.0) == IDLE


def test_who_has_as_many_streams_as_this_router_has_as_many_prompts_in_line() -> None:
    beside = Beside()
    for _ in range(4):
        beside.sent("t")
    heard_twice(beside, "t", 8)
    own = {"p": Load(prompt_tokens=100, free_at=3.0, prices=PRICES), "t": Load(streams=4, context_tokens=400.0)}
    loads = beside.added(own, 1.0, 100.0)
    assert (loads["p"].prompt_tokens, loads["p"].free_at) == (200, 5.0)
    assert loads["t"].streams == 8
    assert beside.added(own, 1.0, 100.0)["p"] is loads["p"]


def test_alone_it_changes_nothing() -> None:
    beside = Beside()
    beside.sent("a")
    heard_twice(beside, "a", 1)
    loads = {"a": Load(streams=1, context_tokens=10.0), "b": Load()}
    assert beside.added(loads, 0.0, 100.0) is loads


@pytest.mark.parametrize("machines", [1, 100])
def test_a_load_that_is_as_it_was_is_not_made_again(machines: int) -> None:
    beside = Beside()
    loads = {str(n): Load(streams=1, context_tokens=100.0, prices=PRICES) for n in range(machines)}
    for uid in loads:
        beside.sent(uid)
        heard_twice(beside, uid, 3)
    first = beside.added(loads, 0.0, 100.0)
    again = beside.added(loads, 0.5, 100.0)
    assert all(first[uid] is again[uid] for uid in loads)
