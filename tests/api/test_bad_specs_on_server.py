"""`kubectl apply` on a real API server refuses every spec of the corpus and names its field; good ones are stored."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from poolwright.api.crd import FILE_NAME
from poolwright.api.models import Condition, InferencePool, InferencePoolStatus
from support.bad_specs import BadSpec, bad_specs, good_spec
from testbed.bed import Bed

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
OURS = "inferencepools.poolwright.dev"


@pytest.fixture(scope="module")
def server(api_server: Bed) -> Bed:
    """The API server with our CRD, and another project's kind of the same name beside it."""
    for file in (ROOT / "crds" / FILE_NAME, Path(__file__).parent / "gie_inferencepools_crd.yaml"):
        api_server.kubectl("apply", "-f", str(file))
        name = yaml.safe_load(file.read_text())["metadata"]["name"]
        api_server.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=30s")
    # A new kind's storage answers 429 for about a second; one write that is retried waits for it.
    namespace = api_server.new_namespace()
    api_server.wait_for("the new kind to be served", "get", OURS, "-n", namespace)
    _apply_until_served(api_server, namespace)
    return api_server


def _apply_until_served(server: Bed, namespace: str) -> None:
    for _ in range(50):
        done = server.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(good_spec()), check=False)
        if done.returncode == 0:
            server.kubectl("delete", OURS, "-n", namespace, "chat", "--wait=false")
            return
        assert "initializing" in done.stderr or "no matches" in done.stderr, done.stderr
    raise AssertionError(f"the new kind was never served: {done.stderr}")


@pytest.fixture
def namespace(server: Bed) -> Iterator[str]:
    name = server.new_namespace()
    yield name
    server.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def shared_namespace(server: Bed) -> str:
    """For what is refused: nothing is ever stored in it."""
    return server.new_namespace()


@pytest.mark.parametrize("bad", bad_specs(), ids=lambda bad: bad.name)
def test_bad_spec_is_refused_with_the_path_of_its_field(server: Bed, shared_namespace: str, bad: BadSpec) -> None:
    done = server.kubectl("apply", "-n", shared_namespace, "-f", "-", input=json.dumps(bad.pool), check=False)
    assert done.returncode != 0
    assert all(path in done.stderr for path in bad.paths), done.stderr


def test_good_spec_is_stored_with_the_defaults_of_the_models(server: Bed, namespace: str) -> None:
    server.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(good_spec()))
    stored = server.get(OURS, "chat", "-n", namespace)
    assert InferencePool.parse(stored).spec == InferencePool.parse(good_spec()).spec
    assert stored["spec"]["rebalance"]["intervalSeconds"] == 60
    assert stored["spec"]["pools"]["mixed"] == {"min": 0, "max": 4}


def test_examples_are_accepted(server: Bed, namespace: str) -> None:
    files = [f for f in sorted((ROOT / "examples").glob("*.yaml")) if "kind: InferencePool" in f.read_text()]
    assert files
    for file in files:
        server.kubectl("apply", "-n", namespace, "-f", str(file), "--dry-run=server")


def test_short_name_is_ours_and_the_other_kind_keeps_its_own(server: Bed, namespace: str) -> None:
    server.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(good_spec()))
    assert server.get("pwp", "-n", namespace)["items"][0]["apiVersion"].startswith("poolwright.dev/")
    assert server.get("poolwright", "-n", namespace)["items"][0]["metadata"]["name"] == "chat"
    assert server.get("infpool", "-n", namespace)["items"] == []


def test_columns_show_split_latency_and_last_move(server: Bed, namespace: str) -> None:
    server.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(good_spec()))
    status = InferencePoolStatus.model_validate(
        {
            "observedGeneration": 1,
            "pools": {
                "prompt": {"ready": 2, "desired": 2},
                "token": {"ready": 3, "desired": 3},
                "mixed": {"ready": 0, "desired": 0},
            },
            "objectives": [
                {
                    "name": "ttft",
                    "metric": "TTFT",
                    "targetMilliseconds": 1000,
                    "observedMilliseconds": 412,
                    "state": "Met",
                },
                {
                    "name": "tbt",
                    "metric": "TBT",
                    "targetMilliseconds": 60,
                    "observedMilliseconds": 71,
                    "state": "Missed",
                },
            ],
            "lastMove": {"time": "2026-01-02T03:04:05.678Z", "summary": "Mixed→Prompt chat-big-0"},
            "conditions": [_condition("SLOMet", "False", "Missed").model_dump(mode="json", by_alias=True)],
        }
    )
    patch = json.dumps({"status": status.to_json()})
    server.kubectl("patch", OURS, "chat", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)
    header, row = server.kubectl("get", "pwp", "-n", namespace).stdout.splitlines()
    assert header.split() == ["NAME", "PROMPT", "TOKEN", "MIXED", "TTFT", "TBT", "SLO", "LAST-MOVE", "AGE"]
    assert row.split()[:9] == ["chat", "2", "3", "0", "412", "71", "Missed", "Mixed→Prompt", "chat-big-0"]


def test_status_that_the_models_write_is_stored_whole(server: Bed, namespace: str) -> None:
    """Nothing that is written is pruned: every field of the status models is in the schema."""
    server.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(good_spec()))
    status = {
        "metrics": "Partial",
        "recentMoves": [
            {
                "machine": "chat-big-0",
                "uid": "u",
                "from": "Mixed",
                "to": "Prompt",
                "reason": "TTFTMissed",
                "repair": False,
                "startedAt": "2026-01-02T03:04:05.678Z",
                "durationMilliseconds": 812,
                "drainedSeconds": 3,
                "outcome": "Completed",
            }
        ],
        "decisions": [
            {
                "time": "2026-01-02T03:04:05.678Z",
                "mode": "Active",
                "reason": "TTFTMissed",
                "message": "m",
                "moves": [{"machine": "chat-big-0", "from": "Mixed", "to": "Prompt"}],
                "evidence": [{"name": "split", "value": "1/1/1"}],
            }
        ],
        "conditions": [_condition("Available", "True", "Serving").model_dump(mode="json", by_alias=True)],
    }
    InferencePoolStatus.model_validate(status)
    server.kubectl(
        "patch",
        OURS,
        "chat",
        "-n",
        namespace,
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps({"status": status}),
    )
    assert server.get(OURS, "chat", "-n", namespace)["status"] == status


def test_every_field_of_the_spec_explains_itself(server: Bed) -> None:
    explained = server.kubectl("explain", f"{OURS}.spec", "--recursive").stdout
    assert "maxMovesPerWindow" in explained
    described = server.kubectl("explain", f"{OURS}.spec.rebalance.mode").stdout
    assert "Who chooses moves" in described


def test_edit_that_breaks_a_rule_is_refused_and_changes_nothing(server: Bed, namespace: str) -> None:
    server.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(good_spec()))
    broken: dict[str, Any] = {"spec": {"pools": {"prompt": {"min": 3}}}}
    done = server.kubectl(
        "patch", "pwp", "chat", "-n", namespace, "--type=merge", "-p", json.dumps(broken), check=False
    )
    assert done.returncode != 0
    assert "spec.pools.prompt" in done.stderr
    assert server.get("pwp", "chat", "-n", namespace)["spec"]["pools"]["prompt"]["min"] == 1


def _objective(metric: str, target: int, observed: int, state: str) -> dict[str, Any]:
    return {
        "name": metric.lower(),
        "metric": metric,
        "targetMilliseconds": target,
        "observedMilliseconds": observed,
        "state": state,
    }


def _condition(kind: str, status: str, reason: str) -> Condition:
    return Condition.model_validate(
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": "",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }
    )
