"""The ledger counts what is outstanding, learns speeds, and holds back machines that fail."""

import pytest

from poolwright.core import routing
from poolwright.core.ledger import Ledger
from poolwright.core.machine import Machine
from poolwright.core.routing import Choice, Route, RoutingRequest
from poolwright_protocol.roles import Role


def machine(uid: str, role: Role) -> Machine:
    return Machine(uid, uid, "cpu", "10.0.0.1", True, role, 1, 0.0, None, 0.0)


P, T, M, N = (
    machine(uid, role) for uid, role in (("p", Role.PROMPT), ("t", Role.TOKEN), ("m", Role.MIXED), ("n", Role.MIXED))
)
SPLIT = Choice(T, P, Route.SPLIT)
BOTH = Choice(M, None, Route.MIXED)


def test_work_is_outstanding_from_the_choice_to_its_end() -> None:
    ledger = Ledger()
    entry = ledger.begin(SPLIT, 100, now=0.0)
    loads = ledger.loads(0.0)
    assert (loads["p"].prompt_tokens, loads["p"].streams) == (100, 0)
    assert (loads["t"].prompt_tokens, loads["t"].streams) == (0, 1)
    entry.first_token(1.0)
    entry.first_token(1.0)
    assert ledger.loads(1.0)["p"].prompt_tokens == 0
    assert ledger.loads(1.0)["t"].streams == 1
    entry.close()
    entry.close()
    assert ledger.loads(2.0)["t"].streams == 0


def test_a_request_that_fails_leaves_nothing_behind() -> None:
    ledger = Ledger()
    ledger.begin(BOTH, 100, now=0.0).close()
    load = ledger.loads(0.0)["m"]
    assert (load.prompt_tokens, load.streams, load.work_tokens) == (0, 0, 0)


def test_eight_requests_at_once_are_split_between_equal_machines() -> None:
    """Reports of engines would not have changed yet: only the own ledger knows."""
    ledger = Ledger()
    picked = []
    for _ in range(8):
        choice = routing.choose(RoutingRequest(200), [M, N], ledger.loads(0.0), 0.0)
        assert isinstance(choice, Choice)
        ledger.begin(choice, 200, 0.0)
        picked.append(choice.token.uid)
    assert (picked.count("m"), picked.count("n")) == (4, 4)


def test_requests_one_after_another_take_turns() -> None:
    ledger = Ledger()
    ledger.keep(["m", "n"])
    picked = []
    for second in range(40):
        now = float(second)
        choice = routing.choose(RoutingRequest(200), [M, N], ledger.loads(now), now)
        assert isinstance(choice, Choice)
        entry = ledger.begin(choice, 200, now)
        entry.first_token(now + 0.1)
        entry.close()
        picked.append(choice.token.uid)
    assert 14 <= picked.count("m") <= 26


def test_a_slow_machine_is_learned_and_forgotten_again() -> None:
    ledger = Ledger()
    ledger.keep(["m", "n"])
    for choice, seconds in ((BOTH, 4.0), (Choice(N, None, Route.MIXED), 1.0)):
        entry = ledger.begin(choice, 1000, 0.0)
        entry.first_token(seconds)
        entry.close()
    loads = ledger.loads(4.0)
    assert loads["m"].milliseconds_per_token > 2 * loads["n"].milliseconds_per_token
    later = ledger.loads(1000.0)
    assert later["m"].milliseconds_per_token == pytest.approx(later["n"].milliseconds_per_token, rel=0.01)


def test_a_new_machine_starts_at_the_pools_mean_speed() -> None:
    ledger = Ledger()
    ledger.keep(["m", "n"])
    entry = ledger.begin(BOTH, 1000, 0.0)
    entry.first_token(5.0)
    assert ledger.loads(5.0)["n"].milliseconds_per_token == pytest.approx(5.0)


def test_failures_in_a_row_hold_a_machine_back_longer_and_an_answer_frees_it() -> None:
    ledger = Ledger()
    pauses = []
    for _ in range(10):
        ledger.failed("m", 100.0)
        pauses.append(ledger.loads(100.0)["m"].avoid_until - 100.0)
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == 15.0
    ledger.answered("m")
    assert ledger.loads(100.0)["m"].avoid_until < 100.0


def test_only_one_request_at_a_time_tries_a_machine_that_failed() -> None:
    ledger = Ledger()
    ledger.failed("m", 0.0)
    assert ledger.loads(0.6)["m"].avoid_until <= 0.6
    ledger.begin(BOTH, 10, 0.6)
    assert ledger.loads(0.7)["m"].avoid_until > 0.7


def test_machines_that_are_gone_are_forgotten_and_their_requests_still_end() -> None:
    ledger = Ledger()
    entry = ledger.begin(BOTH, 10, 0.0)
    ledger.keep(["n"])
    assert ledger.loads(0.0).keys() == {"n"}
    entry.first_token(1.0)
    entry.close()
    ledger.keep(["n", "m"])
    assert ledger.loads(1.0)["m"].streams == 0
