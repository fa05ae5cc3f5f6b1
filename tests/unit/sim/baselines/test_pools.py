"""Wishes for pool sizes on a fixed number of machines, and whom a move takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolwright.sim.baselines.pools import fitted, moves_to, split_roles
from poolwright.sim.baselines.run_state import PerRun
from poolwright_protocol.roles import Role
from support.line_machine import cluster, machine, setting


@given(st.integers(2, 40), st.integers(0, 60), st.integers(0, 60), st.data())
def test_a_split_keeps_both_pools_and_every_wish_that_fits(
    machines: int, prompt: int, token: int, data: st.DataObject
) -> None:
    current = data.draw(st.integers(1, machines - 1))
    want = fitted(current, prompt, token, machines)
    assert 1 <= want <= machines - 1
    if max(1, prompt) + max(1, token) <= machines:
        assert want >= prompt
        assert machines - want >= token
        if current >= max(1, prompt) and machines - current >= max(1, token):
            assert want == current  # nobody lacks anything, so nobody moves


@pytest.mark.parametrize(("prompt", "token", "want"), [(8, 8, 4), (30, 10, 6), (1000, 1, 7), (1, 1000, 1)])
def test_wishes_above_the_budget_are_cut_in_proportion(prompt: int, token: int, want: int) -> None:
    assert fitted(4, prompt, token, 8) == want


def test_the_emptiest_machines_move_and_never_the_last() -> None:
    view = cluster(
        machine("a", Role.TOKEN, decodes=5),
        machine("b", Role.TOKEN, decodes=1),
        machine("c", Role.TOKEN, decodes=9),
        machine("d", Role.PROMPT),
    )
    assert [(c.uid, c.role) for c in moves_to(view, 2, "")] == [("b", Role.PROMPT)]
    assert [c.uid for c in moves_to(view, 9, "")] == ["b", "a"]
    assert moves_to(view, 0, "") == []


def test_a_machine_on_its_way_counts_where_it_goes_and_is_not_moved_again() -> None:
    view = cluster(
        machine("a", Role.TOKEN, moving_to=Role.PROMPT),
        machine("b", Role.TOKEN, decodes=4),
        machine("c", Role.TOKEN, decodes=2),
        machine("d", Role.PROMPT),
    )
    assert moves_to(view, 2, "") == []
    assert [c.uid for c in moves_to(view, 3, "")] == ["c"]


def test_one_machine_alone_does_both() -> None:
    assert split_roles(setting(1), 1) == [Role.MIXED]
    assert split_roles(setting(4), 1, 1) == [Role.PROMPT, Role.MIXED, Role.TOKEN, Role.TOKEN]


def test_router_and_scaler_of_a_run_share_its_memory_and_the_next_run_begins_anew() -> None:
    runs = PerRun(lambda setting: object())
    one = setting()
    first = runs.router(one)
    assert runs.scaler(one) is first
    second = runs.scaler(one)
    assert second is not first
    assert runs.router(one) is second
    assert runs.router(setting()) is not second
