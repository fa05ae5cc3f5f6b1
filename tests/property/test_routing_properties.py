"""What holds for every choice, whatever the machines, their loads and their failures."""

import itertools
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poolwright.core.admission import MOST_RELEGATED_SHARE, Tally, Verdict, admit
from poolwright.core.ledger import Ledger, ReturnRule
from poolwright.core.machine import Machine, Move
from poolwright.core.pricing import MachinePrices
from poolwright.core.routing import Choice, Load, NoMachine, Route, RoutingRequest, Targets, choose, is_live
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile

# How quickly inputs are made says more about what else runs here.
_CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NOW = 1000.0
UIDS = ["a", "b", "c", "d", "e"]
PRICES = MachinePrices(
    StepProfile(decode=StepCost(0.01, 1e-4, 1e-8), mixed=StepCost(0.01, 1e-4, 1e-8)), kv_capacity_tokens=500_000
)


def _priced_loads(count: int) -> list[Load]:
    """Drawn once, since to draw each field of each machine costs more than what is tested."""
    random = Random(7)
    return [
        Load(
            prompt_tokens=random.randrange(5000),
            streams=random.randrange(600),
            recent_tokens=random.uniform(0, 1000),
            avoid_until=random.choice([float("-inf"), float("-inf"), NOW - 1, NOW, NOW + 1]),
            prices=random.choice([PRICES] * 12 + [None]),
            free_at=random.uniform(NOW - 10, NOW + 10),
            context_tokens=random.uniform(0, 600_000),
            next_step_seconds=random.uniform(0.01, 0.1),
            kv_free_tokens=random.choice([-1e5, 100.0, 1e6, 1e6]),
            prefill_bound=random.choice([None, 64, 512]),
            lent=random.random() < 0.3,
        )
        for _ in range(count)
    ]


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


loads = st.one_of(
    st.dictionaries(st.sampled_from(UIDS), loads_of_one),
    st.lists(st.sampled_from(_priced_loads(200)), min_size=5, max_size=5).map(
        lambda found: dict(zip(UIDS, found, strict=True))
    ),
)
targets = st.one_of(
    st.none(),
    st.builds(
        Targets, st.sampled_from([0.05, 1.0, 10.0]), st.sampled_from([0.005, 0.03, 0.06, float("inf")]), st.booleans()
    ),
)
requests = st.builds(
    RoutingRequest,
    prompt_tokens=st.integers(0, 3000),
    tried=st.frozensets(st.sampled_from(UIDS), max_size=2),
    cached_tokens=st.dictionaries(st.sampled_from([*UIDS, "gone"]), st.integers(0, 3000)),
    output_tokens=st.floats(0, 1000),
)


@_CALM
@given(machines(), loads, requests, targets)
def test_a_choice_is_made_exactly_when_a_live_untried_machine_exists(
    pool: list[Machine], known: dict[str, Load], request: RoutingRequest, wanted: Targets | None
) -> None:
    live = {m.uid for m in pool if is_live(m)} - request.tried
    choice = choose(request, pool, known, NOW, wanted)
    if isinstance(choice, NoMachine):
        assert not live
        assert choice.reason
        return
    assert choice.token.uid in live
    assert choice.prompt is None or choice.prompt.uid in live


@_CALM
@given(machines(), loads, requests, targets)
def test_failed_and_moving_machines_are_used_only_when_no_other_is_left(
    pool: list[Machine], known: dict[str, Load], request: RoutingRequest, wanted: Targets | None
) -> None:
    choice = choose(request, pool, known, NOW, wanted)
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


@_CALM
@given(machines(), loads, requests, targets)
def test_a_split_pairs_two_machines_of_fitting_roles_and_nothing_else_is_split(
    pool: list[Machine], known: dict[str, Load], request: RoutingRequest, wanted: Targets | None
) -> None:
    choice = choose(request, pool, known, NOW, wanted)
    if isinstance(choice, Choice):
        if choice.route is not Route.PREFIX:
            assert (choice.prompt is not None) == (choice.route is Route.SPLIT)
        if choice.prompt is not None:
            assert choice.prompt.uid != choice.token.uid
            assert choice.prompt.routing_role is Role.PROMPT
            assert choice.token.routing_role in (Role.TOKEN, Role.MIXED)


@_CALM
@given(machines(), loads, requests, targets)
def test_the_order_in_which_machines_are_listed_changes_nothing(
    pool: list[Machine], known: dict[str, Load], request: RoutingRequest, wanted: Targets | None
) -> None:
    choices = {
        choose(request, list(order), known, NOW, wanted) for order in itertools.islice(itertools.permutations(pool), 24)
    }
    assert len(choices) == 1


@_CALM
@given(machines(), loads, requests, targets)
def test_machines_that_vanish_between_ledger_and_list_break_nothing(
    pool: list[Machine], known: dict[str, Load], request: RoutingRequest, wanted: Targets | None
) -> None:
    some = {uid: load for uid, load in known.items() if uid < "c"}
    choice = choose(request, pool, some, NOW, wanted)
    assert isinstance(choice, NoMachine) == (not [m for m in pool if is_live(m) and m.uid not in request.tried])


@_CALM
@given(machines(), loads, st.lists(requests, min_size=1, max_size=20), targets)
def test_admission_never_relegates_more_than_its_share_and_always_says_why(
    pool: list[Machine], known: dict[str, Load], asked: list[RoutingRequest], wanted: Targets | None
) -> None:
    tally, relegated = Tally(), 0
    for number, request in enumerate(asked, 1):
        judged, tally = admit(request, pool, known, NOW, wanted or Targets(1.0, 0.06), tally)
        relegated += judged.verdict is Verdict.RELEGATE
        assert relegated <= MOST_RELEGATED_SHARE * number
        assert judged.retry_after_seconds is None or judged.retry_after_seconds >= 1
        if judged.verdict is not Verdict.REJECT:
            assert judged.retry_after_seconds is None


steps = st.lists(
    st.tuples(st.sampled_from(["send", "first token", "close", "fail", "forget"]), st.integers(0, 30), st.floats(0, 5)),
    max_size=60,
)


@_CALM
@given(steps, st.sampled_from(ReturnRule))
def test_a_ledger_ends_empty_whatever_happened(events: list[tuple[str, int, float]], rule: ReturnRule) -> None:
    pool = [
        Machine(uid, uid, "c", "10.0.0.1", True, role, 1, 0.0, None, 0.0)
        for uid, role in zip(UIDS, [Role.PROMPT, Role.PROMPT, Role.TOKEN, Role.TOKEN, Role.MIXED], strict=True)
    ]
    ledger, now, entries = Ledger(rule), 0.0, []
    for m in pool:
        ledger.price(m.uid, PRICES)
    for event, which, seconds in events:
        now += seconds
        if event == "send":
            choice = choose(RoutingRequest(100 * which), pool, ledger.loads(now), now, Targets(0.5, 0.03))
            if isinstance(choice, Choice):
                entries.append(ledger.begin(choice, 100 * which, now, output_tokens=50))
        elif event == "fail":
            ledger.failed(UIDS[which % 5], now)
        elif event == "forget":
            ledger.keep(UIDS)
        elif entries:
            entry = entries[which % len(entries)]
            entry.first_token(now) if event == "first token" else entry.close()
    for entry in entries:
        entry.close()
    for load in ledger.loads(now).values():
        assert (load.prompt_tokens, load.streams, load.bound_streams, load.lent) == (0, 0, 0, False)
        assert load.context_tokens == 0
        assert load.free_at == float("-inf")
