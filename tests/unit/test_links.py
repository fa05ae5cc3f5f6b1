"""Where machines stand decides who may become a prompt machine: its KV, and everybody's, must have a way out."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from poolwright.core.decision import Decision, Reason
from poolwright.core.links import Links, Place, Reach, between
from poolwright.core.reading import LiveReading, MachineWork
from poolwright.core.spec import MachineClass, Mode, PoolBounds
from poolwright.kube import ApiError, KubeClient, Nodes
from poolwright_protocol import names
from support.pool_world import PRICES, START, M, P, T, World, islands, pool, reading, spec, split

FAST, SLOW = 600e9, 1e6
TTFT_MISSED = reading(ttft=5.0)  # 200 prompts of 500 tokens in 20 s: 500 MB/s of KV at 100 kB a token


def kv_world(roles: str, where: str, *, slow: float | None = SLOW, **changes: Any) -> World:
    """One letter for each machine: its role ("-": none yet), and its island. 100 kB of KV a token."""
    of = {"P": P, "T": T, "M": M, "-": None}
    it = World(spec(len(roles), **changes), pool(*(of[letter] for letter in roles)))
    it.links = islands({f"u{i}": island for i, island in enumerate(where)}, FAST, slow, 100_000)
    return it


class TestPlace:
    def test_labels_of_a_node_say_where_it_stands_and_what_its_links_carry(self) -> None:
        labels = {
            names.LABEL_KV_ISLAND: "rack-7",
            names.LABEL_KV_INSIDE_GBPS: "3200",
            names.LABEL_KV_OUTSIDE_GBPS: "25",
            "kubernetes.io/hostname": "node-1",
        }
        assert Place.of_labels(labels) == Place("rack-7", 400e9, 3.125e9)
        assert Place.of_labels({names.LABEL_KV_ISLAND: "a"}) == Place("a", None, None)
        assert Place.of_labels({names.LABEL_KV_OUTSIDE_GBPS: "25"}) is None

    @pytest.mark.parametrize("text", ["", "fast", "0", "-1", "nan", "inf", "25Gbps"])
    def test_a_speed_that_is_none_is_refused_by_name(self, text: str) -> None:
        with pytest.raises(ValueError, match="kv-outside-gbps"):
            Place.of_labels({names.LABEL_KV_ISLAND: "a", names.LABEL_KV_OUTSIDE_GBPS: text})

    def test_the_slower_end_limits_a_link_and_what_nobody_described_does_not(self) -> None:
        here, there = Place("1", 600e9, 25e9), Place("2", 600e9, 10e9)
        assert between(here, replace(here, inside_bytes_per_second=300e9)) == 300e9
        assert between(here, there) == 10e9
        assert between(here, None) == 25e9
        assert between(None, None) == between(Place("1"), Place("2")) == math.inf
        assert Links({"a": here}).bytes_per_second("a", "a") == math.inf


class TestReach:
    TWO = islands(dict(zip("abcd", "1122", strict=True)), 600e9, 25e9)

    def test_only_those_that_lose_their_way_are_counted_and_the_machine_itself(self) -> None:
        stranded = Reach(self.TWO, 100e9).stranding(["a"], ["b", "c", "d"])
        assert stranded("b", P) == 2
        assert stranded("c", P) == 0
        assert stranded("b", M) == stranded("b", T) == 0

    def test_what_leaves_a_machine_is_its_share_of_all(self) -> None:
        """Of 60 GB/s two prompt machines make 30 each, three 20: the link outside holds 25."""
        assert Reach(self.TWO, 60e9).without_way(["a", "b"], ["c", "d"]) == 2
        assert Reach(self.TWO, 60e9).stranding(["a", "b"], ["c", "d"])("c", P) == 0

    def test_at_an_unknown_rate_a_prompt_machine_keeps_its_island(self) -> None:
        stranded = Reach(self.TWO).stranding(["a"], ["b", "c", "d"])
        assert (stranded("b", P), stranded("c", P)) == (2, 0)
        everywhere_as_fast = islands(dict(zip("abcd", "1122", strict=True)), 600e9, 600e9)
        assert Reach(everywhere_as_fast).stranding(["a"], ["b", "c", "d"])("b", P) == 0

    def test_links_that_nobody_described_forbid_nothing(self) -> None:
        for rate in (None, 1e15):
            assert Reach(Links({}), rate).stranding(["a"], ["b"])("b", P) == 2, "nobody decodes then"
            assert Reach(Links({}), rate).stranding(["a"], ["b", "c"])("b", P) == 0


class TestMissedLatency:
    def test_takes_another_machine_than_the_one_that_a_prompt_machine_needs(self) -> None:
        it = kv_world("PTTTT", "aabbb")
        it.replace("u1", role_since=START - 5000)  # the longest in its pool, so the first choice elsewhere
        decision = it.decide(TTFT_MISSED)
        assert decision.reason is Reason.TTFT_MISSED
        assert decision.moves[0].uid == "u2"
        it = kv_world("PTTTT", "aabbb", slow=FAST)
        it.replace("u1", role_since=START - 5000)
        assert it.decide(TTFT_MISSED).moves[0].uid == "u1"

    def test_where_no_machine_may_go_says_so(self) -> None:
        it = kv_world("PTT", "abc", pools={M: PoolBounds(0, 0)})
        decision = it.decide(TTFT_MISSED)
        assert (decision.reason, decision.moves) == (Reason.NO_LINK, ())
        assert "link that holds its KV" in decision.message
        assert dict(decision.evidence)["links"] == "0.5 GB/s of KV; 1 of 1 prompt machines have no way for it"

    def test_a_machine_that_turns_mixed_needs_no_way_for_its_own_prompts(self) -> None:
        (move,) = kv_world("PTT", "abc").decide(TTFT_MISSED).moves
        assert move.to_role is M

    def test_little_kv_fits_any_link(self) -> None:
        it = kv_world("PTT", "abc", slow=1e9)
        assert it.decide(TTFT_MISSED).reason is Reason.TTFT_MISSED


class TestOfferedWork:
    OFFERED = reading(arrivals=400, prompt_tokens=400 * 4000, tbt_count=400 * 5, ttft_count=400)

    def at_once(self, where: str) -> Decision:
        it = kv_world("PTTTT", where, pools={M: PoolBounds(0, 0)})
        it.prices = {"c": PRICES}
        return it.decide(self.OFFERED)

    def test_moves_whoever_leaves_each_prompt_machine_a_token_machine(self) -> None:
        decision = self.at_once("aabbb")
        assert decision.reason is Reason.WORK_SHIFTED
        assert "u1" not in {m.uid for m in decision.moves}

    def test_refuses_where_each_would_be_cut_off(self) -> None:
        decision = self.at_once("aabcd")
        assert (decision.reason, decision.moves) == (Reason.NO_LINK, ())


class TestBacklog:
    QUEUED = MachineWork(prompt_tokens=2e5, prompt_pairs=5e7)

    def look(self, where: str) -> Decision:
        it = kv_world("PTTTT", where)
        it.prices = {"c": PRICES}
        it.memory = replace(it.memory, planned_at=START)
        decision = None
        for _ in range(3):
            decision = it.step(reading(ttft_count=0), seconds=5.0, live=LiveReading(it.now, {"u0": self.QUEUED}))
            it.memory = replace(it.memory, planned_at=it.now)
        assert decision is not None
        return decision

    def test_takes_a_machine_with_a_way_for_its_kv(self) -> None:
        decision = self.look("aabbb")
        assert decision.reason is Reason.PROMPT_BACKLOG
        assert decision.moves[0].uid in ("u2", "u3", "u4")

    def test_refuses_where_there_is_none(self) -> None:
        assert self.look("aabcd").reason is Reason.NO_LINK


class TestWhatComesBeforeLinks:
    def test_a_minimum_is_repaired_by_a_machine_that_cuts_nobody_off(self) -> None:
        it = kv_world("PTTTM", "aabbb", pools={P: PoolBounds(2), T: PoolBounds(1)})
        (move,) = it.decide(reading()).moves
        assert (move.repair, move.to_role, move.uid) == (True, P, "u2")
        assert "no way" not in move.message

    def test_a_minimum_is_repaired_even_so_and_the_price_is_said(self) -> None:
        it = kv_world("PTT", "aab", pools={P: PoolBounds(2), T: PoolBounds(1)})
        (move,) = it.decide(reading()).moves
        assert (move.repair, split(it.machines)) == (True, (2, 1, 0))
        assert "1 prompt machine(s) then have no way for their KV" in move.message

    @pytest.mark.parametrize("mode", [Mode.MANUAL, Mode.ACTIVE])
    def test_counts_of_the_user_and_edits_of_the_spec_choose_as_well(self, mode: Mode) -> None:
        """The longest in the pool is the only one near the prompt machine."""
        manual = {P: PoolBounds(1, replicas=2), T: PoolBounds(1, replicas=2), M: PoolBounds(0, replicas=0)}
        edited = {P: PoolBounds(1), T: PoolBounds(1, 2), M: PoolBounds(0, 0)}
        it = kv_world("PTTT", "aabb", mode=mode, pools=manual if mode is Mode.MANUAL else edited)
        it.replace("u1", role_since=START - 5000)
        (move,) = it.decide(reading()).moves
        assert (move.uid, move.to_role) == ("u2", P)


def test_first_roles_put_both_phases_on_each_island() -> None:
    """Born one after another, islands one after another: as many prompt machines as without links, each with a way."""
    for where in ("aaaabbbb", "abababab", "aabbbbbb", "aaabbbcc"):
        it = kv_world("-" * 8, where)
        it.step(reading(ttft_count=0, tbt_count=0, arrivals=0, in_flight=0))
        plain = World(it.spec, pool(*[None] * 8))
        plain.step(reading(ttft_count=0, tbt_count=0, arrivals=0, in_flight=0))
        assert split(it.machines) == split(plain.machines)
        prompts = [m.uid for m in it.machines if m.role is P]
        decoding = [m.uid for m in it.machines if m.role is not P]
        assert it.links is not None
        assert Reach(it.links).without_way(prompts, decoding) == 0, where


def test_a_class_that_may_only_be_prompt_still_gets_its_role_far_from_everybody() -> None:
    classes = (MachineClass("c", 2), MachineClass("far", 1, frozenset({P})))
    it = kv_world("---", "aab", classes=classes)
    it.replace("u2", machine_class="far")
    it.step(reading(ttft_count=0, tbt_count=0, arrivals=0, in_flight=0))
    assert next(m.role for m in it.machines if m.uid == "u2") is P


class _NodeList(KubeClient):
    """Answers lists of nodes as an API server does, by field or label."""

    def __init__(self, nodes: list[Mapping[str, Any]], refuse: bool = False) -> None:
        self.nodes, self.refuse, self.asked = nodes, refuse, 0

    async def list(self, resource: object, namespace: object, *, labels: str = "", fields: str = "") -> Any:
        self.asked += 1
        if self.refuse:
            raise ApiError(403, "Forbidden", "nodes is forbidden")
        if fields:
            return [n for n in self.nodes if n.get("spec", {}).get("unschedulable")]
        return [n for n in self.nodes if labels in n["metadata"].get("labels", {})]


def _node(name: str, cordoned: bool = False, **labels: str) -> dict[str, Any]:
    keyed = {f"{names.GROUP}/{key.replace('_', '-')}": value for key, value in labels.items()}
    return {"metadata": {"name": name, "labels": keyed}, "spec": {"unschedulable": cordoned}}


async def test_nodes_say_their_cordons_and_places_and_a_broken_label_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = _NodeList(
        [
            _node("a", kv_island="rack-1", kv_inside_gbps="3200"),
            _node("b", cordoned=True),
            _node("c", kv_island="rack-2", kv_outside_gbps="fast"),
        ]
    )
    nodes = Nodes(client)
    facts = await nodes.facts()
    assert facts.cordoned == {"b"}
    assert facts.places == {"a": Place("rack-1", 400e9)}
    nodes._places_at = None
    await nodes.facts()
    (said,) = [r.getMessage() for r in caplog.records]
    assert "node=c error=poolwright.dev/kv-outside-gbps: expected gigabits a second above 0, not 'fast'" in said
    asked = client.asked
    await nodes.facts()
    assert client.asked == asked, "read a moment ago"


async def test_nodes_that_may_not_be_read_say_nothing_and_are_asked_no_more() -> None:
    client = _NodeList([], refuse=True)
    nodes = Nodes(client)
    facts = await nodes.facts()
    assert (facts.cordoned, facts.places) == (frozenset(), {})
    await nodes.facts()
    assert client.asked == 1
