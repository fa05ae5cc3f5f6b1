"""Which machine a router believes to hold the beginning of a prompt, by the text or the ids of requests."""

import random
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from poolwright.core.machine import Machine
from poolwright.core.routing import Choice, Load, Route, RoutingRequest, choose
from poolwright.router.inference import parse
from poolwright.router.prefixes import PIECE_BYTES, PIECE_TOKENS, Prefix, Prefixes, prefix_of
from poolwright_protocol.roles import Role

A, B = (Machine(uid, uid, "c", "10.0.0.1", True, Role.MIXED, 1, 0.0, None, 0.0) for uid in ("a", "b"))
TEXT = "Once upon a time there was a pool of machines, and it was never empty. " * 40
SYSTEM = {"role": "system", "content": TEXT}


def believed(prefixes: Prefixes, prefix: Prefix, tokens: int = 1000) -> dict[str, int]:
    return prefixes.cached_tokens(prefixes.held(prefix), tokens)


def shared(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Pieces that both begin with."""
    pairs = list(zip(prefix_of(one).keys, prefix_of(other).keys, strict=False))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))


def test_two_prompts_share_what_they_begin_with_and_not_what_they_hold_later() -> None:
    whole = len(TEXT) // PIECE_BYTES
    assert shared({"prompt": TEXT + "one"}, {"prompt": TEXT + "another"}) == whole
    assert shared({"prompt": TEXT}, {"prompt": "x" + TEXT}) == 0
    assert shared({"prompt": TEXT}, {"prompt": TEXT[:300] + "!" + TEXT[301:]}) == 1
    ids = list(range(10 * PIECE_TOKENS))
    assert shared({"prompt": [*ids, 7]}, {"prompt": [ids]}) == 10
    assert shared({"prompt": ids}, {"prompt": [*ids[:-1], 0]}) == 9


def test_a_conversation_begins_with_what_it_was_a_turn_ago() -> None:
    first = [SYSTEM, {"role": "user", "content": "Who are you?"}]
    second = [*first, {"role": "assistant", "content": "A machine."}, {"content": "Which?", "role": "user"}]
    assert shared({"messages": first}, {"messages": second}) == len(prefix_of({"messages": first}).keys) > 10
    assert shared({"messages": first}, {"messages": [SYSTEM | {"role": "user"}]}) == 0
    assert shared({"messages": first}, {"prompt": TEXT}) == 0


@pytest.mark.parametrize("name", ["tools", "cache_salt", "chat_template", "reasoning_effort"])
def test_what_changes_how_a_prompt_is_written_or_shared_changes_all_of_it(name: str) -> None:
    assert shared({"messages": [SYSTEM]}, {"messages": [SYSTEM], name: "\ud800x"}) == 0
    assert shared({"messages": [SYSTEM]}, {"messages": [SYSTEM], "temperature": 0.5, "user": "me"}) > 10


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "short"},
        {"prompt": [TEXT, TEXT]},
        {"prompt": TEXT, "truncate_prompt_tokens": 5},
        {"prompt": [-1] * 200},
        {"prompt": [2**32] * 200},
        {"prompt": [True] * 200},
        {"prompt": [1.5] * 200},
        {"prompt": {"a": TEXT}},
        {"messages": []},
    ],
)
def test_what_is_short_or_several_or_no_prompt_has_no_known_beginning(fields: dict[str, Any]) -> None:
    assert prefix_of(fields) == Prefix()


def test_it_is_read_with_the_request() -> None:
    assert parse(b'{"prompt": "' + TEXT.encode() + b'"}').prefix == prefix_of({"prompt": TEXT})


def test_the_machines_that_were_sent_a_prompt_hold_its_beginning_and_never_all_of_it() -> None:
    prefixes = Prefixes()
    prefixes.follow((A, B))
    prefixes.record(prefix_of({"prompt": TEXT}), [A])
    longer = prefix_of({"prompt": TEXT * 2})
    half = believed(prefixes, longer)
    assert half.keys() == {"a"}
    assert 0.4 * 1000 < half["a"] <= 500
    exact = list(range(PIECE_TOKENS))
    prefixes.record(prefix_of({"prompt": exact}), [B])
    assert believed(prefixes, prefix_of({"prompt": exact}), PIECE_TOKENS) == {"b": PIECE_TOKENS - 1}
    assert believed(prefixes, Prefix(), 1000) == {}


def test_a_machine_that_goes_or_starts_again_holds_nothing() -> None:
    prefixes, prefix = Prefixes(), prefix_of({"prompt": TEXT})
    prefixes.follow((A, B))
    prefixes.record(prefix, [A, B])
    prefixes.follow((A, replace(B, restarts=1)))
    assert believed(prefixes, prefix, 100).keys() == {"a"}
    prefixes.follow((B,))
    assert believed(prefixes, prefix, 100) == {}


def test_belief_fades_where_engines_find_nothing_and_comes_back_where_they_do() -> None:
    prefixes, prefix = Prefixes(), prefix_of({"prompt": list(range(10 * PIECE_TOKENS))})
    prefixes.follow((A, B))
    prefixes.record(prefix, [A])
    for _ in range(30):
        prefixes.found(1.0, None, 640)  # an engine that does not say
        prefixes.found(0.0, 0, 640)  # nothing was believed
    assert believed(prefixes, prefix) == {"a": 999}
    for _ in range(20):
        prefixes.found(0.5, 320, 640)  # as believed
        prefixes.found(0.5, 600, 640)  # more than this router knows of
    assert believed(prefixes, prefix) == {"a": 999}
    for _ in range(400):
        prefixes.found(1.0, 0, 640)
    assert believed(prefixes, prefix).get("a", 0) < 10
    for _ in range(400):
        prefixes.found(1.0, 640, 640)
    assert believed(prefixes, prefix)["a"] > 900


def test_what_is_remembered_of_a_machine_is_bounded_and_the_oldest_goes_first() -> None:
    prefixes = Prefixes()
    prefixes.follow((A, B))
    rng = random.Random(1)
    asked = [prefix_of({"prompt": [rng.randrange(1000) for _ in range(64 * PIECE_TOKENS)]}) for _ in range(300)]
    tracemalloc.start()
    for prefix in asked:
        prefixes.record(prefix, [A])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4 * 2**20
    assert believed(prefixes, asked[0], 1000) == {}
    assert believed(prefixes, asked[-1], 1000) == {"a": 999}


def _chosen(cached: dict[str, int], **loads: Load) -> tuple[str, Route]:
    choice = choose(RoutingRequest(1000, cached_tokens=cached), [A, B], loads, 0.0)
    assert isinstance(choice, Choice)
    return choice.token.uid, choice.route


def test_without_prices_too_the_holder_is_chosen_until_its_line_outweighs_the_recompute() -> None:
    assert _chosen({"b": 900}) == ("b", Route.PREFIX)
    assert _chosen({"b": 900}, b=Load(prompt_tokens=600)) == ("b", Route.PREFIX)
    assert _chosen({"b": 900}, b=Load(prompt_tokens=1500)) == ("a", Route.MIXED)
    assert _chosen({"a": 900, "b": 900}, a=Load(prompt_tokens=600)) == ("b", Route.PREFIX)


def test_without_prices_a_prompt_that_its_token_machine_holds_stays_there() -> None:
    machines = [replace(A, role=Role.PROMPT), replace(B, role=Role.TOKEN)]
    split = choose(RoutingRequest(1000), machines, {}, 0.0)
    held = choose(RoutingRequest(1000, cached_tokens={"a": 992, "b": 992}), machines, {}, 0.0)
    assert isinstance(split, Choice)
    assert isinstance(held, Choice)
    assert (split.prompt, split.route) == (machines[0], Route.SPLIT)
    assert (held.prompt, held.route) == (None, Route.SHORT_PROMPT)
