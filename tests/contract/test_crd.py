"""The CRD is what the models say, the chart holds the same bytes, and the schema keeps the house rules."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poolwright.api.crd import FILE_NAME, FOLDERS, MOST_BYTES, definition, render

ROOT = Path(__file__).parents[2]


def _nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _nodes(child, f"{path}.{name}")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _nodes(schema["additionalProperties"], f"{path}.*")
    if "items" in schema:
        yield from _nodes(schema["items"], f"{path}[]")


def _schema() -> dict[str, Any]:
    root: dict[str, Any] = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return root


def test_files_are_what_the_models_generate() -> None:
    for folder in FOLDERS:
        assert (ROOT / folder / FILE_NAME).read_text() == render(), "run `make generate`"


def test_it_fits_the_annotation_of_a_client_side_apply() -> None:
    assert len(render().encode()) < MOST_BYTES


def test_two_runs_give_the_same_bytes() -> None:
    assert render() == render()


def test_every_field_of_spec_and_status_is_described() -> None:
    properties = _schema()["properties"]
    bare = [
        path
        for root in ("spec", "status")
        for path, node in _nodes(properties[root], root)
        if not path.endswith(("[]", ".*")) and not node.get("description")
    ]
    assert bare == []


def test_schema_is_structural_and_has_no_floats() -> None:
    for path, node in _nodes(_schema()):
        assert not {"anyOf", "oneOf", "allOf", "not", "$ref", "title"} & set(node), path
        assert node.get("type") != "number", path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path


def test_every_list_is_bounded_and_says_how_it_merges() -> None:
    for path, node in _nodes(_schema()):
        if node.get("type") == "array":
            assert node.get("maxItems"), path
            assert node.get("x-kubernetes-list-type") in ("map", "set", "atomic"), path


def test_every_rule_has_one_clear_message_and_a_field_that_exists() -> None:
    for path, node in _nodes(_schema()):
        for rule in node.get("x-kubernetes-validations", ()):
            assert rule["message"]
            assert not rule["message"].endswith(".")
            below = node
            for part in rule.get("fieldPath", "").split(".")[1:]:
                below = below["properties"][part]
            assert below, path


def test_durations_and_latencies_carry_their_unit() -> None:
    for path, _ in _nodes(_schema()["properties"]["spec"]):
        name = path.rsplit(".", 1)[-1]
        if any(word in name.lower() for word in ("interval", "dwell", "target")):
            assert name.endswith(("Seconds", "Milliseconds")), path


def test_recent_moves_can_hold_every_move_that_is_counted() -> None:
    properties = _schema()["properties"]
    most = properties["spec"]["properties"]["rebalance"]["properties"]["maxMovesPerWindow"]["maximum"]
    assert properties["status"]["properties"]["recentMoves"]["maxItems"] >= 2 * most
