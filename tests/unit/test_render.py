"""What the children of a pool look like: names, the engines' pod, and what never changes it."""

import json
from typing import Any

import pytest

from poolwright.api.models import InferencePool
from poolwright.controller import names as child_names
from poolwright.controller import render

KEY = bytes(range(32))
IMAGES = render.Images(engine="registry.example/engine:1", router="registry.example/control-plane:1")


def pool(name: str = "chat", **spec: Any) -> InferencePool:
    return InferencePool.parse(
        {
            "apiVersion": "poolwright.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": name, "namespace": "llm", "uid": "11111111-2222-3333-4444-555555555555"},
            "spec": {
                "model": {"name": "smollm2", "source": {"path": "/models/smollm2"}},
                "slo": {"objectives": [{"name": "ttft", "metric": "TTFT", "targetMilliseconds": 1000}]},
                "machines": [{"name": "cpu", "replicas": 3}],
                **spec,
            },
        }
    )


def engines(of: InferencePool, images: render.Images = IMAGES, key: bytes = KEY) -> Any:
    return render.children(of, images, key).deployments[0]


def engine_template(of: InferencePool) -> Any:
    return engines(of)["spec"]["template"]


def everything(of: InferencePool) -> list[Any]:
    rendered = render.children(of, IMAGES, KEY)
    return [*rendered.support, rendered.secret, *rendered.deployments]


def test_names_tell_apart_what_reads_the_same() -> None:
    one, other = child_names.engines("chat", "a-b"), child_names.engines("chat-a", "b")
    assert one.rpartition("-")[0] == other.rpartition("-")[0] == "chat-a-b"
    assert one != other


def test_names_of_a_class_called_like_a_component_differ_from_the_component() -> None:
    assert child_names.engines("chat", "router") != child_names.router("chat")


def test_every_child_name_ends_in_six_characters_of_hash_and_fits_a_dns_label() -> None:
    longest = pool("p" * 30, machines=[{"name": "m" * 20, "replicas": 1}])
    for manifest in everything(longest):
        name = manifest["metadata"]["name"]
        suffix = name.rpartition("-")[2]
        assert len(suffix) == 6
        assert suffix.isalnum()
        assert suffix == suffix.lower()
        assert name.startswith("p" * 30 + "-"), "the pool's name was cut"
        assert len(name) <= 63


def test_rendering_twice_gives_the_same_bytes() -> None:
    assert json.dumps(everything(pool())) == json.dumps(everything(pool()))


@pytest.mark.parametrize(
    "edit",
    [
        {"slo": {"objectives": [{"name": "tbt", "metric": "TBT", "targetMilliseconds": 7}]}},
        {"pools": {"prompt": {"min": 1}, "token": {"min": 1}}},
        {"rebalance": {"mode": "Paused", "intervalSeconds": 5}},
        {"router": {"replicas": 5}},
    ],
    ids=["slo", "pools", "rebalance", "router"],
)
def test_policy_edits_leave_the_engines_as_they_are(edit: dict[str, Any]) -> None:
    assert engines(pool(**edit)) == engines(pool())


@pytest.mark.parametrize(
    "edit",
    [
        {"model": {"name": "other", "source": {"path": "/models/smollm2"}}},
        {"engine": {"maxNumSeqs": 8}},
        {"machines": [{"name": "cpu", "replicas": 3, "engine": {"maxNumSeqs": 8}}]},
        {"machines": [{"name": "cpu", "replicas": 3, "template": {"nodeSelector": {"disk": "ssd"}}}]},
    ],
    ids=["model", "engine", "class override", "template"],
)
def test_edits_of_what_engines_run_roll_them(edit: dict[str, Any]) -> None:
    assert engine_template(pool(**edit)) != engine_template(pool())


def test_new_pool_key_rolls_engines_and_routers_without_showing_it() -> None:
    before = render.children(pool(), IMAGES, KEY).deployments
    after = render.children(pool(), IMAGES, bytes(32)).deployments
    for old, new in zip(before, after, strict=True):
        assert old["spec"]["template"] != new["spec"]["template"]
        assert KEY.hex() not in json.dumps(old)


def test_role_is_in_no_selector_and_on_no_template() -> None:
    for manifest in everything(pool()):
        assert "poolwright.dev/role" not in json.dumps(manifest.get("spec", {}).get("selector", {}))
    meta = engine_template(pool())["metadata"]
    assert "poolwright.dev/role" not in meta["labels"]
    assert meta["annotations"]["poolwright.dev/role-epoch"] == "0"


def test_engine_reads_its_role_and_epoch_from_the_pod_again_at_each_start() -> None:
    container = engine_template(pool())["spec"]["containers"][0]
    fields = {
        e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"]
        for e in container["env"]
        if "fieldRef" in e.get("valueFrom", {})
    }
    assert fields == {
        "POOLWRIGHT_POD_NAME": "metadata.name",
        "POOLWRIGHT_POD_UID": "metadata.uid",
        "POOLWRIGHT_POD_IP": "status.podIP",
        "POOLWRIGHT_ROLE": "metadata.labels['poolwright.dev/role']",
        "POOLWRIGHT_ROLE_EPOCH": "metadata.annotations['poolwright.dev/role-epoch']",
    }


def test_rollout_never_asks_for_a_machine_beyond_the_budget() -> None:
    spec = engines(pool())["spec"]
    assert spec["replicas"] == 3
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


def test_engine_arguments_are_the_spec_with_the_overrides_of_the_class() -> None:
    both = pool(
        engine={"maxNumBatchedTokens": 512, "maxNumSeqs": 16, "maxModelLen": 1024},
        machines=[
            {"name": "big", "replicas": 1, "engine": {"maxNumBatchedTokens": 4096}},
            {"name": "cpu", "replicas": 1},
        ],
    )
    big, small = (
        d["spec"]["template"]["spec"]["containers"][0]["args"]
        for d in render.children(both, IMAGES, KEY).deployments[:2]
    )
    assert big == [
        "--model=/models/smollm2",
        "--served-model-name=smollm2",
        "--max-num-batched-tokens=4096",
        "--max-num-seqs=16",
        "--block-size=16",
        "--kv-cache-mebibytes=512",
        "--max-model-len=1024",
    ]
    assert "--max-num-batched-tokens=512" in small


def test_model_on_a_claim_is_mounted_read_only() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "models", "path": "smollm2/model.gguf"}}
    pod = engine_template(pool(model={"name": "smollm2", "source": claim}))["spec"]
    container = pod["containers"][0]
    assert container["args"][0] == "--model=/poolwright/model/smollm2/model.gguf"
    assert {"name": "poolwright-model", "mountPath": "/poolwright/model", "readOnly": True} in container["volumeMounts"]
    assert {
        "name": "poolwright-model",
        "persistentVolumeClaim": {"claimName": "models", "readOnly": True},
    } in pod["volumes"]


def test_template_of_the_user_reaches_the_pod() -> None:
    template = {
        "labels": {"team": "llm"},
        "annotations": {"note": "x"},
        "resources": {"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "2"}},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "serving",
        "imagePullSecrets": [{"name": "mine"}],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "volumes": [{"name": "weights", "nfs": {"server": "nfs.example", "path": "/w"}}],
        "volumeMounts": [{"name": "weights", "mountPath": "/models", "readOnly": True}],
    }
    made = engine_template(pool(machines=[{"name": "h100", "replicas": 1, "template": template}]))
    assert made["metadata"]["labels"]["team"] == "llm"
    assert made["metadata"]["annotations"]["note"] == "x"
    pod, container = made["spec"], made["spec"]["containers"][0]
    assert container["resources"] == template["resources"]
    assert pod["nodeSelector"] == template["nodeSelector"]
    assert pod["tolerations"] == template["tolerations"]
    assert pod["priorityClassName"] == "serving"
    assert pod["imagePullSecrets"] == [{"name": "mine"}]
    assert template["env"][0] in container["env"]
    assert template["volumes"][0] in pod["volumes"]
    assert template["volumeMounts"][0] in container["volumeMounts"]


def test_engine_has_as_many_threads_as_its_limit_has_cpus_unless_told_otherwise() -> None:
    def threads(template: dict[str, Any]) -> list[dict[str, Any]]:
        made = engine_template(pool(machines=[{"name": "cpu", "replicas": 1, "template": template}]))
        return [e for e in made["spec"]["containers"][0]["env"] if e["name"] == "OMP_NUM_THREADS"]

    (by_limit,) = threads({})
    assert by_limit["valueFrom"]["resourceFieldRef"] == {"resource": "limits.cpu", "divisor": "1"}
    mine = {"name": "OMP_NUM_THREADS", "value": "3"}
    assert threads({"env": [mine]}) == [mine]


def test_every_pod_meets_the_restricted_standard() -> None:
    for deployment in render.children(pool(), IMAGES, KEY).deployments:
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_only_routers_hold_a_service_account_token_and_may_only_list_and_watch_pods() -> None:
    rendered = render.children(pool(), IMAGES, KEY)
    held = [d["spec"]["template"]["spec"]["automountServiceAccountToken"] for d in rendered.deployments]
    assert held == [False, True]
    roles = [m for m in rendered.support if m["kind"] == "Role"]
    assert [role["rules"] for role in roles] == [
        [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    ]


def test_every_child_is_owned_and_controlled_by_the_pool() -> None:
    for manifest in everything(pool()):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert owner["uid"] == pool().metadata.uid
        assert owner["controller"] is True


def test_router_service() -> None:
    (service,) = [
        m
        for m in render.children(pool(), IMAGES, KEY).support
        if m["metadata"]["name"] == child_names.router_service("chat")
    ]
    assert service["spec"] == {
        "type": "ClusterIP",
        "selector": {"poolwright.dev/pool": "chat", "poolwright.dev/component": "router"},
        "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
    }


def test_digest_changes_with_the_manifest_alone() -> None:
    def sealed(of: InferencePool) -> str:
        return str(engines(of)["metadata"]["annotations"][render.ANNOTATION_RENDERED])

    assert sealed(pool()) == sealed(pool(router={"replicas": 1}))
    assert sealed(pool()) != sealed(pool(machines=[{"name": "cpu", "replicas": 4}]))
