"""The choice of machines: cheapest first, never a dead one, and every machine of use when there is no better."""

from dataclasses import replace

import pytest

from poolwright.core.machine import Machine, Move
from poolwright.core.routing import (
    HANDOFF_MILLISECONDS,
    LOCAL_PROMPT_TOKENS,
    Choice,
    Load,
    NoMachine,
    NoRoute,
    Route,
    RoutingRequest,
    any_machine,
    choose,
)
from poolwright_protocol.roles import Role

NOW = 100.0
LONG = RoutingRequest(prompt_tokens=1000)


def machine(uid: str, role: Role | None) -> Machine:
    return Machine(
        name=f"pod-{uid}",
        uid=uid,
        machine_class="cpu",
        host="10.0.0.1",
        ready=True,
        role=role,
        role_epoch=1,
        role_since=0.0,
        move=None,
        created_at=0.0,
    )


P1, P2 = machine("p1", Role.PROMPT), machine("p2", Role.PROMPT)
T1, T2 = machine("t1", Role.TOKEN), machine("t2", Role.TOKEN)
M1, M2 = machine("m1", Role.MIXED), machine("m2", Role.MIXED)
MOVE = Move(Role.PROMPT, Role.TOKEN, NOW, NOW + 30)


def chosen(
    machines: list[Machine], loads: dict[str, Load] | None = None, request: RoutingRequest = LONG
) -> tuple[str | None, str, Route]:
    """(prompt uid, token uid, why)."""
    choice = choose(request, machines, loads or {}, NOW)
    assert isinstance(choice, Choice), choice
    return choice.prompt.uid if choice.prompt else None, choice.token.uid, choice.route


def test_a_prompt_machine_and_a_token_machine_share_a_request() -> None:
    assert chosen([P1, T1]) == ("p1", "t1", Route.SPLIT)


def test_a_prompt_joins_the_queue_that_ends_first_in_milliseconds_not_in_tokens() -> None:
    loads = {"p1": Load(prompt_tokens=3000, milliseconds_per_token=0.1), "p2": Load(prompt_tokens=500)}
    assert chosen([P1, P2, T1], loads)[0] == "p1"


def test_the_machine_with_the_least_outstanding_work_decodes() -> None:
    assert chosen([P1, T1, T2], {"t1": Load(streams=3), "t2": Load(streams=2)}) == ("p1", "t2", Route.SPLIT)
    assert chosen([P1, T1, T2], {"t1": Load(streams=3), "t2": Load(streams=2, prompt_tokens=100)})[1] == "t1"


def test_an_idle_mixed_machine_does_both_and_a_loaded_one_leaves_the_prompt_to_the_prompt_machine() -> None:
    assert chosen([P1, T1, M1]) == (None, "m1", Route.MIXED)
    assert chosen([P1, T1, M1], {"m1": Load(prompt_tokens=500)}) == ("p1", "t1", Route.SPLIT)
    assert chosen([P1, T1, M1], {"m1": Load(streams=5), "t1": Load(streams=9)}) == ("p1", "m1", Route.SPLIT)


def test_a_mixed_machine_alone_does_both() -> None:
    assert chosen([M1]) == (None, "m1", Route.MIXED)


def test_a_machine_without_a_label_is_mixed() -> None:
    assert chosen([machine("new", None)]) == (None, "new", Route.MIXED)


@pytest.mark.parametrize("machines", [[P1, P2], [T1, T2]])
def test_with_an_empty_pool_any_machine_does_both(machines: list[Machine]) -> None:
    prompt, token, route = chosen(machines, {machines[0].uid: Load(streams=1)})
    assert (prompt, token, route) == (None, machines[1].uid, Route.ONE_SIDED)


def test_a_moving_machine_gets_nothing_while_another_can_do_it() -> None:
    moving = replace(P1, role=None, move=MOVE)
    assert chosen([moving, P2, T1], {"p2": Load(prompt_tokens=10**6)})[0] == "p2"
    assert chosen([moving, T1]) == (None, "t1", Route.ONE_SIDED)
    assert chosen([moving]) == (None, "p1", Route.MIXED)


def test_a_machine_that_failed_is_never_the_cheapest_but_still_the_last_resort() -> None:
    failed = {"p1": Load(avoid_until=NOW + 1), "p2": Load(prompt_tokens=10**6)}
    assert chosen([P1, P2, T1], failed)[0] == "p2"
    assert chosen([P1, T1], failed) == (None, "t1", Route.ONE_SIDED)
    assert chosen([P1], failed)[1] == "p1"
    assert chosen([P1, P2, T1], {"p1": Load(avoid_until=NOW)})[0] == "p1"


def test_a_moving_machine_is_better_than_a_dead_one() -> None:
    moving = replace(T1, role=None, move=MOVE)
    assert chosen([moving, T2], {"t2": Load(avoid_until=NOW + 1)})[1] == "t1"


@pytest.mark.parametrize(
    "gone",
    [replace(M1, ready=False), replace(M1, host=None), replace(M1, deleting=True)],
    ids=["unready", "no host", "deleting"],
)
def test_a_machine_that_cannot_serve_is_never_chosen(gone: Machine) -> None:
    assert chosen([gone, T1])[1] == "t1"
    assert choose(LONG, [gone], {}, NOW) == NoMachine(NoRoute.NONE_READY, 1, 0)


def test_a_choice_without_prices_says_when_it_expects_the_first_token() -> None:
    choice = choose(LONG, [P1, T1], {"p1": Load(prompt_tokens=500, milliseconds_per_token=2.0)}, NOW)
    assert isinstance(choice, Choice)
    assert choice.first_token_seconds == pytest.approx((500 + 1000) * 0.002, abs=0.01)
    assert choice.step_seconds is None


def test_there_is_a_reason_where_there_is_no_machine() -> None:
    assert choose(LONG, [], {}, NOW) == NoMachine(NoRoute.NO_MACHINE)
    tried = RoutingRequest(10, frozenset({"m1", "m2"}))
    nobody = choose(tried, [M1, M2], {}, NOW)
    assert nobody == NoMachine(NoRoute.ALL_TRIED, 2, 2)
    assert isinstance(nobody, NoMachine)
    assert nobody.reason == "none of the 2 Ready machines of the pool took the request"


def test_a_short_prompt_stays_where_it_decodes_when_that_is_cheaper() -> None:
    short = RoutingRequest(LOCAL_PROMPT_TOKENS)
    assert chosen([P1, T1], request=short) == (None, "t1", Route.SHORT_PROMPT)
    assert chosen([P1, T1], request=RoutingRequest(LOCAL_PROMPT_TOKENS + 1))[2] is Route.SPLIT
    busy = {"t1": Load(prompt_tokens=int(HANDOFF_MILLISECONDS) + 1)}
    assert chosen([P1, T1], busy, short) == ("p1", "t1", Route.SPLIT)
    assert chosen([P1, T1], request=RoutingRequest(1, local_prompt_tokens=0))[2] is Route.SPLIT


def test_estimates_that_differ_by_less_than_their_error_count_as_equal() -> None:
    loads = {"p1": Load(milliseconds_per_token=1.0, recent_tokens=10), "p2": Load(milliseconds_per_token=1.1)}
    assert chosen([P1, P2, T1], loads)[0] == "p2"
    assert chosen([P1, P2, T1], {**loads, "p2": Load(milliseconds_per_token=1.3)})[0] == "p1"


def test_equal_machines_take_turns() -> None:
    """A constant tie-break would send a lone, slow client to one machine for ever."""
    assert chosen([M1, M2], {"m1": Load(recent_tokens=10)})[1] == "m2"
    assert chosen([M1, M2], {"m2": Load(recent_tokens=10)})[1] == "m1"


def test_a_call_without_inference_goes_to_the_least_loaded_machine() -> None:
    picked = any_machine([P1, T1], {"p1": Load(streams=1)}, frozenset(), NOW)
    assert picked == T1
    assert isinstance(any_machine([], {}, frozenset(), NOW), NoMachine)
