"""The choice of machines where work has a price: in seconds, packed, lent and given back."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from poolwright.core.affinity import PrefixIndex
from poolwright.core.ledger import Entry, Ledger, ReturnRule
from poolwright.core.machine import Machine, Move
from poolwright.core.pricing import HANDOFF_SECONDS, MachinePrices
from poolwright.core.routing import Choice, Route, RoutingRequest, Targets, choose
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile

# 10 ms a step, 0.1 ms a token, 10 ms for a million tokens of context.
PRICES = MachinePrices(
    StepProfile(decode=StepCost(0.01, 1e-4, 1e-8), mixed=StepCost(0.01, 1e-4, 1e-8)),
    step_tokens=2048,
    kv_capacity_tokens=1_000_000,
)
TARGETS = Targets(ttft_seconds=1.0, tbt_seconds=0.06)


def machine(uid: str, role: Role | None) -> Machine:
    return Machine(uid, uid, "c", "10.0.0.1", True, role, 1, 0.0, None, 0.0)


P1, P2 = machine("p1", Role.PROMPT), machine("p2", Role.PROMPT)
T1, T2, T3 = (machine(f"t{i}", Role.TOKEN) for i in (1, 2, 3))
M1 = machine("m1", Role.MIXED)


class Site:
    """Machines, a ledger that prices them, and a clock."""

    def __init__(
        self, *machines: Machine, rule: ReturnRule = ReturnRule.DRAINED, prices: MachinePrices = PRICES
    ) -> None:
        self.machines = list(machines)
        self.ledger = Ledger(rule)
        self.ledger.keep(m.uid for m in machines)
        for m in machines:
            self.ledger.price(m.uid, prices)
        self.now = 100.0

    def choose(self, tokens: int = 1000, **asked: object) -> Choice:
        request = RoutingRequest(tokens, **asked)  # type: ignore[arg-type]
        choice = choose(request, self.machines, self.ledger.loads(self.now), self.now, TARGETS)
        assert isinstance(choice, Choice)
        return choice

    def send(self, tokens: int = 1000, output: float = 100, **asked: object) -> tuple[Choice, Entry]:
        choice = self.choose(tokens, output_tokens=output, **asked)
        return choice, self.ledger.begin(choice, tokens, self.now, output_tokens=output)

    def queue(self, on: Machine, tokens: int, times: int = 1) -> list[Entry]:
        """Prompts given to a prompt machine, to be decoded elsewhere."""
        return [self.ledger.begin(Choice(T1, on, Route.SPLIT), tokens, self.now) for _ in range(times)]

    def decode(self, on: Machine, streams: int, context: int = 500) -> list[Entry]:
        entries = [self.ledger.begin(Choice(on, None, Route.MIXED), context, self.now) for _ in range(streams)]
        for entry in entries:
            entry.first_token(self.now)
        return entries


def places(choice: Choice) -> tuple[str | None, str]:
    return choice.prompt.uid if choice.prompt else None, choice.token.uid


class TestPrompts:
    def test_the_queue_that_ends_first_in_seconds(self) -> None:
        site = Site(P1, P2, T1)
        site.queue(P1, 100, times=10)  # ten small prompts end before
        site.queue(P2, 4000)  # one long one does
        assert places(site.choose())[0] == "p1"

    def test_queues_of_a_slower_machine_are_longer(self) -> None:
        site = Site(P1, P2, T1)
        slow = StepProfile(PRICES.profile.decode, StepCost(0.02, 3e-4, 1e-8))
        site.ledger.price("p1", replace(PRICES, profile=slow))
        assert places(site.choose())[0] == "p2"

    def test_time_works_off_a_queue_and_a_first_token_corrects_it(self) -> None:
        site = Site(P1, P2, T1)
        (early,) = site.queue(P1, 4000)
        site.queue(P2, 3000)
        assert places(site.choose())[0] == "p2"
        early.first_token(site.now + 0.2)  # quicker than its price
        site.now += 0.2
        assert places(site.choose())[0] == "p1"
        site.queue(P1, 3500)
        site.now += 60.0
        loads = site.ledger.loads(site.now)
        assert loads["p2"].free_at < site.now, "taken as done, though nothing was heard of it"

    def test_a_cached_prefix_wins_until_the_wait_exceeds_the_recompute(self) -> None:
        site = Site(P1, P2, T1)
        hit = {"p1": 1900}
        assert places(site.choose(2000, cached_tokens=hit)) == ("p1", "t1")
        assert site.choose(2000, cached_tokens=hit).route is Route.PREFIX
        site.queue(P1, 1000)
        assert places(site.choose(2000, cached_tokens=hit))[0] == "p1", "0.11 s of wait, 0.2 s of recompute"
        site.queue(P1, 1000)
        assert places(site.choose(2000, cached_tokens=hit))[0] == "p2"

    def test_a_mixed_machine_takes_prompts_by_the_same_clock_and_its_streams_slow_it(self) -> None:
        site = Site(P1, T1, M1)
        site.queue(P1, 2000)
        assert (places(site.choose()), site.choose().route) == ((None, "m1"), Route.MIXED)
        site.decode(M1, 250)
        assert places(site.choose())[0] == "p1"

    def test_the_bound_of_a_mixed_machine_makes_its_prompts_dear(self) -> None:
        site = Site(P1, T1, M1)
        site.queue(P1, 1000)
        assert site.choose(4000).route is Route.MIXED
        site.ledger.price("m1", PRICES, prefill_bound=64)
        assert site.choose(4000).route is Route.SPLIT

    def test_a_short_prompt_stays_where_it_decodes(self) -> None:
        site = Site(P1, T1)
        site.queue(P1, 500)
        assert site.choose(100, local_prompt_tokens=512).route is Route.SHORT_PROMPT
        assert site.choose(600, local_prompt_tokens=512).route is Route.SPLIT


class TestStreams:
    def test_streams_are_packed_on_the_fullest_machine_within_the_target(self) -> None:
        site = Site(P1, T1, T2, T3)
        site.decode(T2, 30)
        assert site.choose().token.uid == "t2"
        site.decode(T3, 100)  # steps of 21 ms
        assert site.choose().token.uid == "t2"

    def test_memory_counts_as_well_as_time(self) -> None:
        site = Site(P1, T1, T2, prices=replace(PRICES, kv_capacity_tokens=10_000))
        site.decode(T2, 9, context=1000)
        assert site.choose(1000).token.uid == "t1"

    def test_where_none_is_within_the_target_the_least_loaded_one(self) -> None:
        site = Site(P1, T1, T2)
        site.decode(T1, 500)
        site.decode(T2, 450)
        assert site.choose().token.uid == "t2"


def full_prompts(site: Site) -> None:
    for prompt in (P1, P2):
        site.queue(prompt, 2000, times=6)


class TestBorrowing:
    def test_a_prompt_that_no_prompt_machine_computes_in_time_spills_to_a_token_machine(self) -> None:
        site = Site(P1, P2, T1, T2)
        full_prompts(site)
        choice = site.choose()
        assert (choice.prompt, choice.token.role, choice.route) == (None, Role.TOKEN, Route.BORROWED_FOR_PROMPT)

    def test_a_token_machine_whose_steps_leave_no_room_for_a_chunk_is_not_lent(self) -> None:
        site = Site(P1, P2, T1, T2)
        full_prompts(site)
        for token in (T1, T2):
            site.decode(token, 440)  # 58 ms a step with a tile of prompt, of 60
        assert site.choose().route is Route.SPLIT

    def test_nothing_is_lent_that_would_not_end_the_prompt_sooner(self) -> None:
        site = Site(P1, T1, T2)
        site.queue(P1, 2000, times=6)
        for uid in ("t1", "t2"):
            site.ledger.price(uid, PRICES, prefill_bound=1)
        assert site.choose().route is Route.SPLIT

    def test_the_last_token_machine_is_not_lent_nor_one_that_its_pool_could_not_spare(self) -> None:
        site = Site(P1, T1)
        site.queue(P1, 2000, times=6)
        assert site.choose().route is Route.SPLIT
        two = Site(P1, P2, T1, T2)
        full_prompts(two)
        for token in (T1, T2):
            two.decode(token, 60)  # 6 ms of the 8 that streams may add to a step
        assert two.choose().route is Route.SPLIT

    def test_a_lent_machine_is_lent_again_before_another(self) -> None:
        site = Site(P1, P2, T1, T2, T3)
        full_prompts(site)
        first, _ = site.send()
        assert site.choose().token.uid == first.token.uid

    def test_by_the_papers_rule_it_is_given_back_once_its_prompts_are_drained(self) -> None:
        site = Site(P1, P2, T1, T2)
        full_prompts(site)
        choice, entry = site.send()
        assert site.ledger.loads(site.now)[choice.token.uid].lent
        entry.first_token(site.now + 0.1)
        assert not site.ledger.loads(site.now)[choice.token.uid].lent

    def test_by_the_simulators_rule_once_it_is_completely_idle(self) -> None:
        site = Site(P1, P2, T1, T2, rule=ReturnRule.IDLE)
        full_prompts(site)
        choice, entry = site.send()
        uid = choice.token.uid
        entry.first_token(site.now + 0.1)
        others = site.decode(choice.token, 1)
        entry.close()
        assert site.ledger.loads(site.now)[uid].lent
        others[0].close()
        lent = site.ledger.loads(site.now)[uid].lent
        assert lent == (uid == "t1"), "t1 still has the streams of the queued prompts"

    def test_a_request_goes_whole_to_a_prompt_machine_where_no_token_machine_holds_the_target(self) -> None:
        """One that is told a bound: without one its chunks would be felt by the stream."""
        site = Site(P1, P2, T1)
        site.decode(T1, 600)
        assert site.choose().route is Route.SPLIT
        for prompt in ("p1", "p2"):
            site.ledger.price(prompt, PRICES, prefill_bound=384)
        choice, _ = site.send()
        assert (choice.prompt, choice.token.role, choice.route) == (None, Role.PROMPT, Route.BORROWED_FOR_TOKENS)
        assert site.choose().token.uid == choice.token.uid, "the lent one again"

    def test_where_many_gaps_may_be_late_a_bound_is_not_needed(self) -> None:
        site = Site(P1, P2, T1)
        site.decode(T1, 600)
        loads = site.ledger.loads(site.now)
        relaxed = replace(TARGETS, every_gap=False)
        choice = choose(RoutingRequest(1000), site.machines, loads, site.now, relaxed)
        assert isinstance(choice, Choice)
        assert choice.route is Route.BORROWED_FOR_TOKENS


class TestSecondTokens:
    def test_a_pair_is_packed_only_so_far_that_the_second_token_is_in_time(self) -> None:
        """A hand-over, the step that runs, the one planned and its own, within 60 ms with the margin: 15 ms each."""
        site = Site(P1, T1, T2)
        site.decode(T2, 40)
        assert site.choose().token.uid == "t2"
        site.decode(T2, 30)
        assert site.choose().token.uid == "t1"
        loads = site.ledger.loads(site.now)
        relaxed = choose(RoutingRequest(1000), site.machines, loads, site.now, replace(TARGETS, every_gap=False))
        assert isinstance(relaxed, Choice)
        assert relaxed.token.uid == "t2"

    def test_a_mixed_machine_decodes_no_others_prompt_while_its_chunks_fill_its_steps(self) -> None:
        site = Site(P1, T1, M1)
        site.queue(M1, 3000)
        assert places(site.choose()) == ("p1", "t1")


class TestLatePairs:
    """No step of a token machine leaves a second token the time to be handed over: targets of 24 ms, steps of 10."""

    TIGHT = replace(TARGETS, tbt_seconds=0.024)

    def choice(self, site: Site, tokens: int = 1000) -> Choice:
        loads = site.ledger.loads(site.now)
        found = choose(RoutingRequest(tokens, output_tokens=100), site.machines, loads, site.now, self.TIGHT)
        assert isinstance(found, Choice)
        return found

    def test_token_machines_take_whole_requests_even_the_last_one(self) -> None:
        site = Site(P1, T1)
        found = self.choice(site)
        assert (places(found), found.route) == ((None, "t1"), Route.BORROWED_FOR_PROMPT)

    def test_one_that_has_no_room_for_a_chunk_is_handed_prompts_computed_elsewhere(self) -> None:
        site = Site(P1, T1)
        site.decode(T1, 100)
        assert places(self.choice(site)) == ("p1", "t1")

    def test_mixed_machines_that_are_all_full_still_take_the_request(self) -> None:
        other = machine("m2", Role.MIXED)
        site = Site(M1, other)
        site.decode(M1, 300)
        site.decode(other, 200)
        site.queue(other, 3000)
        assert (places(self.choice(site)), self.choice(site).route) == ((None, "m1"), Route.MIXED)


class TestSoundness:
    def test_a_dead_machine_is_never_the_cheapest(self) -> None:
        site = Site(P1, P2, T1)
        site.queue(P2, 1000, times=4)
        site.ledger.failed("p1", site.now)
        assert places(site.choose())[0] == "p2"

    def test_a_moving_or_unready_or_tried_one_is_left_alone(self) -> None:
        moving = replace(P1, role=None, move=Move(Role.PROMPT, Role.TOKEN, 100.0, 130.0))
        for gone in (moving, replace(P1, ready=False), replace(P1, deleting=True), replace(P1, host=None)):
            assert places(Site(gone, P2, T1).choose())[0] == "p2"
        assert places(Site(P1, P2, T1).choose(1000, tried=frozenset({"p1"})))[0] == "p2"

    def test_one_machine_without_a_price_leaves_the_choice_to_what_was_measured(self) -> None:
        for unpriced in ("p1", "p2"):  # the first of them, and another
            site = Site(P1, P2, T1)
            site.ledger.price(unpriced, None)
            site.queue(P1, 3000)
            assert places(site.choose())[0] == "p2"

    @pytest.mark.parametrize("machines", [[P1, P2], [T1, T2], [M1]])
    def test_one_sided_pools_still_serve(self, machines: Iterable[Machine]) -> None:
        choice = Site(*machines).choose()
        assert choice.prompt is None

    def test_it_answers_the_same_in_any_order(self) -> None:
        site = Site(P1, P2, T1, T2, M1)
        site.queue(P1, 500)
        site.decode(T2, 10)
        one = site.choose()
        site.machines.reverse()
        assert site.choose() == one


class TestPrefixIndex:
    def test_it_says_how_far_each_machine_follows(self) -> None:
        index = PrefixIndex()
        index.record("a", ["1", "2", "3"])
        index.record("b", ["1", "2", "x"])
        assert index.blocks(["1", "2", "3", "4"]) == {"a": 3, "b": 2}
        assert index.blocks(["0", "1"]) == {}
        assert index.blocks([]) == {}

    def test_the_least_recently_used_block_goes_first_and_ends_of_prompts_before_their_beginnings(self) -> None:
        index = PrefixIndex(most_blocks=4)
        index.record("a", ["1", "2", "3"])
        index.record("a", ["1", "y", "z"])
        assert index.blocks(["1", "y", "z"]) == {"a": 3}
        assert index.blocks(["1", "2", "3"]) == {"a": 2}

    def test_a_machine_that_is_gone_holds_nothing(self) -> None:
        index = PrefixIndex()
        index.record("a", ["1"])
        index.record("b", ["1"])
        index.keep(["b"])
        assert index.blocks(["1"]) == {"b": 1}


class TestEvidence:
    """A choice carries what it was made on: when the first token is expected, and a step where it decodes."""

    def test_of_a_pair_the_prompts_queue_and_the_hand_over(self) -> None:
        site = Site(P1, T1)
        alone = site.choose(1000)
        assert alone.first_token_seconds == pytest.approx(PRICES.prefill_seconds(1000) + HANDOFF_SECONDS)
        site.queue(P1, 1000)
        behind = site.choose(1000)
        assert behind.first_token_seconds == pytest.approx(2 * PRICES.prefill_seconds(1000) + HANDOFF_SECONDS, rel=0.1)
        assert alone.step_seconds == pytest.approx(PRICES.decode_seconds(1, 1000))

    def test_the_step_grows_with_the_streams_there(self) -> None:
        site = Site(P1, T1)
        few = site.choose().step_seconds
        site.decode(T1, 50)
        many = site.choose().step_seconds
        assert few is not None
        assert many is not None
        assert many - few == pytest.approx(50 * (1e-4 + 500 * 1e-8), rel=0.1)

    def test_of_one_that_does_both_its_own_time(self) -> None:
        site = Site(M1)
        choice = site.choose(1000)
        assert choice.route is Route.MIXED
        assert choice.first_token_seconds == pytest.approx(PRICES.prefill_seconds(1000), rel=0.1)

    def test_two_choices_of_the_same_machines_are_the_same_whatever_is_predicted(self) -> None:
        site = Site(P1, T1)
        first = site.choose(1000)
        site.queue(P1, 500)
        assert site.choose(1000) == first
