"""The word of routers on work that is outstanding: read as written, added up, and refused where it cannot be."""

import json
from typing import Any

import pytest

from poolwright.core.live_work import added, from_json, to_json
from poolwright.core.reading import MachineWork

WORK = {"a": MachineWork(100.0, 5000.0, 3.0, 700.5, lent=True), "b": MachineWork()}


def test_it_comes_back_as_it_was_written_and_a_newer_router_may_say_more() -> None:
    assert from_json(to_json(WORK)) == WORK
    more = json.loads(to_json(WORK)) | {"new": 1}
    more["machines"]["a"]["new"] = [2]
    assert from_json(json.dumps(more)) == WORK
    assert from_json(to_json({})) == {}


def test_what_several_routers_sent_to_one_machine_adds_up() -> None:
    total = added([WORK, {"a": MachineWork(1.0, 2.0, 3.0, 4.0), "c": MachineWork(streams=1.0)}])
    assert total["a"] == MachineWork(101.0, 5002.0, 6.0, 704.5, lent=True)
    assert (total["b"], total["c"]) == (MachineWork(), MachineWork(streams=1.0))
    assert added([]) == {}


@pytest.mark.parametrize("key", ["promptTokens", "promptPairs", "streams", "contextTokens"])
@pytest.mark.parametrize("value", [None, -1, "3", True, float("nan"), float("inf")])
def test_a_number_that_cannot_be_is_refused_by_name(key: str, value: Any) -> None:
    raw = json.loads(to_json(WORK))
    raw["machines"]["a"][key] = value
    with pytest.raises(ValueError, match=f"machine a: {key}"):
        from_json(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"machines": [1]}', '{"machines": {"a": 3}}'])
def test_what_is_no_work_at_all_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting value|not the work of machines"):
        from_json(text)


def test_a_flag_is_a_flag() -> None:
    raw = json.loads(to_json(WORK))
    raw["machines"]["a"]["lent"] = "yes"
    with pytest.raises(ValueError, match="lent"):
        from_json(json.dumps(raw))
