"""What holds for every choice, whatever the machines, their loads and their failures."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from poolwright.core.machine import Machine, Move
from poolwright.core.routing import Choice, Load, NoMachine, Route, RoutingRequest, choose, is_live
from poolwright_protocol.roles import Role

NOW = 1000.0
UIDS = ["a", "b", "c", "d", "e"]

loads_of_one = st.builds(
    Load,
    prompt_tokens=st.integers(0, 5000),
    streams=st.integers(0, 50),
    milliseconds_per_token=st.floats(0.001, 100),
    recent_tokens=st.floats(0, 1000),
    avoid_until=st.sampled_from([float("-inf"), NOW - 1, NOW, NOW + 1]),
)


@st.composite
def machines(draw: st.DrawFn) -> list[Machine]:
    made = []
    for uid in draw(st.lists(st.sampled_from(UIDS), unique=True)):
        role = draw(st.sampled_from([*Role, None]))
        moving = role is None and draw(st.booleans())
        made.append(
            Machine(
                name=uid,
                uid=uid,
                machine_class="cpu",
                host=draw(st.sampled_from(["10.0.0.1", "10.0.0.1", "10.0.0.1", None])),
                ready=draw(st.sampled_from([True, True, True, False])),
                role=role,
                role_epoch=1,
                role_since=None,
                move=Move(Role.PROMPT, Role.TOKEN, NOW, NOW + 30) if moving else None,
                created_at=0.0,
                deleting=draw(st.sampled_from([False, False, False, True])),
            )
        )
    return made


loads = st.dictionaries(st.sampled_from(UIDS), loads_of_one)
requests = st.builds(
    RoutingRequest, prompt_tokens=st.integers(0, 3000), tried=st.frozensets(st.sampled_from(UIDS), max_size=2)
)


@given(machines(), loads, requests)
def test_a_choice_is_made_exactly_when_a_live_untried_machine_exists(
    pool: list[Machine], known: dict[str, Load], request: RoutingRequest
) -> None:
    live = {m.uid for m in pool if is_live(m)} - request.tried
    choice = choose(request, pool, known, NOW)
    if isinstance(choice, NoMachine):
        assert not live
        assert choice.reason
        return
    assert choice.token.uid in live
    assert choice.prompt is None or choice.prompt.uid in live


@given(machines(), loads, requests)
def test_failed_and_moving_machines_are_used_only_when_no_other_is_left(
    pool: list[Machine], known: dict[str, Load], request: RoutingRequest
) -> None:
    choice = choose(request, pool, known, NOW)
    if isinstance(choice, NoMachine):
        return
    live = [m for m in pool if is_live(m) and m.uid not in request.tried]
    sound = [m for m in live if known.get(m.uid, Load()).avoid_until <= NOW]
    settled = [m for m in sound if m.move is None]
    for picked in (choice.token, choice.prompt):
        if picked is not None and settled:
            assert picked in settled
        elif picked is not None and sound:
            assert picked in sound


@given(machines(), loads, requests)
def test_a_split_pairs_two_machines_of_fitting_roles_and_nothing_else_is_split(
    pool: list[Machine], known: dict[str, Load], request: RoutingRequest
) -> None:
    choice = choose(request, pool, known, NOW)
    if isinstance(choice, Choice):
        assert (choice.prompt is not None) == (choice.route is Route.SPLIT)
        if choice.prompt is not None:
            assert choice.prompt.uid != choice.token.uid
            assert choice.prompt.routing_role is Role.PROMPT
            assert choice.token.routing_role in (Role.TOKEN, Role.MIXED)


@given(machines(), loads, requests)
def test_the_order_in_which_machines_are_listed_changes_nothing(
    pool: list[Machine], known: dict[str, Load], request: RoutingRequest
) -> None:
    choices = {choose(request, list(order), known, NOW) for order in itertools.islice(itertools.permutations(pool), 24)}
    assert len(choices) == 1
