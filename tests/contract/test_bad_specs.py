"""Local mode refuses every spec of the corpus, and blames the same fields as the API server."""

import pytest
import yaml

from poolwright.api.models import InferencePool, InvalidPool
from support.bad_specs import BadSpec, bad_specs, good_spec


def test_good_spec_is_accepted() -> None:
    pool = InferencePool.parse(good_spec())
    assert (pool.metadata.name, pool.spec.budget) == ("chat", 5)


@pytest.mark.parametrize("bad", bad_specs(), ids=lambda bad: bad.name)
def test_bad_spec_is_refused_with_the_path_of_its_field(bad: BadSpec) -> None:
    with pytest.raises(InvalidPool) as refused:
        InferencePool.parse(bad.pool)
    assert {path for path, _ in refused.value.errors} == bad.paths
    assert all(message for _, message in refused.value.errors)


def test_null_members_are_absent_as_on_the_api_server() -> None:
    raw = good_spec()
    raw["spec"]["rebalance"] = None
    raw["spec"]["pools"]["prompt"]["max"] = None
    assert InferencePool.parse(raw) == InferencePool.parse(good_spec())


@pytest.mark.parametrize("raw", [None, [], "pool", {}, {"kind": "InferencePool"}, {**good_spec(), "kind": "Pod"}])
def test_what_is_no_pool_at_all_is_refused(raw: object) -> None:
    with pytest.raises(InvalidPool):
        InferencePool.parse(raw)


def test_pool_without_a_spec_is_refused_by_the_name_of_the_field() -> None:
    raw = good_spec()
    del raw["spec"]
    with pytest.raises(InvalidPool) as refused:
        InferencePool.parse(raw)
    assert refused.value.errors[0][0] == "spec"


def test_unreadable_status_does_not_stop_a_good_pool() -> None:
    pool = InferencePool.parse({**good_spec(), "status": {"recentMoves": "nonsense"}})
    assert pool.status == {"recentMoves": "nonsense"}


def test_yaml_round_trip_of_defaults_is_stable() -> None:
    pool = InferencePool.parse(good_spec())
    written = yaml.safe_load(yaml.safe_dump(pool.spec.model_dump(mode="json", by_alias=True, exclude_none=True)))
    assert InferencePool.parse({**good_spec(), "spec": written}).spec == pool.spec
