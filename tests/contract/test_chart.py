"""The chart as Helm renders it: every value lands where it should, rights and arguments are the operator's own."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from poolwright.api.crd import FILE_NAME
from poolwright.api.models import InferencePool
from poolwright.controller import handlers, options, render
from poolwright.kube import resources
from poolwright.kube.resources import Resource, resource_of
from poolwright_protocol import names
from support.bad_specs import good_spec
from support.helm_chart import CHART, REPOSITORY, Helm, Objects, of_kind, set_values, the
from support.operator_process import LEASE_RULES, NODE_RULES, POOL_RULES
from testbed.fixtures import helm as helm

pytestmark = pytest.mark.cluster  # of the bed it needs only helm
ROOT = Path(__file__).parents[2]
Right = tuple[str, str, str]  # group, resource, verb
ONE_NAMESPACE = "operator.watchNamespaces[0]=llm"


@pytest.fixture
def chart(helm: Path, tmp_path: Path) -> Helm:
    return Helm(helm, tmp_path)


def operator_container(objects: Objects) -> dict[str, Any]:
    (container,) = the(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def parsed(objects: Objects) -> options.Options:
    """The options that the operator would read from the container's arguments."""
    verb, *arguments = operator_container(objects)["args"]
    assert verb == "operator"
    return options.parse(arguments, {names.ENV_ROOT_SECRET: "x" * 64})


# ------------------------------------------------------------------------------------------------------ what is refused


def test_lint_has_nothing_to_say(chart: Helm) -> None:
    done = chart.run("lint", "--strict", str(CHART), f"--set=image.repository={REPOSITORY}")
    assert "0 chart(s) failed" in done.stdout
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("imagge.tag=1", "additional properties 'imagge' not allowed"),
        ("image.tag=12", "at '/image/tag': got number, want string"),
        ("image.pullPolicy=Sometimes", "one of 'Always', 'IfNotPresent', 'Never'"),
        ("image.repository=registry.invalid/pw:v1", "at '/image/repository'"),
        ("prometheus.url=prometheus:9090", "at '/prometheus/url'"),
        ("operator.watchNamespaces=llm", "at '/operator/watchNamespaces': got string, want array"),
        ("operator.watchNamespaces[0]=LLM", "at '/operator/watchNamespaces/0'"),
        ("operator.logLevel=loud", "one of 'debug', 'info', 'warning', 'error'"),
        ("crds.keep=perhaps", "at '/crds/keep': got string, want boolean"),
        ("imagePullSecrets[0]=mine", "at '/imagePullSecrets/0': got string, want object"),
    ],
)
def test_bad_value_is_refused_with_its_place(chart: Helm, value: str, said: str) -> None:
    done = chart.run("template", "pw", str(CHART), *set_values([value]), check=False)
    assert done.returncode != 0
    assert said in done.stderr


def test_without_a_repository_it_says_how_to_make_the_images(chart: Helm) -> None:
    done = chart.run("template", "pw", str(CHART), check=False)
    assert done.returncode != 0
    assert "image.repository is required" in done.stderr
    assert "make images" in done.stderr


def test_an_account_that_is_not_made_must_be_named(chart: Helm) -> None:
    done = chart.run("template", "pw", str(CHART), *set_values(["serviceAccount.create=false"]), check=False)
    assert "serviceAccount.name is required" in done.stderr


def test_every_value_has_a_place_in_the_schema_and_a_line_of_help() -> None:
    text = (CHART / "values.yaml").read_text()
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())

    def leaves(values: dict[str, Any], node: dict[str, Any], path: str = "") -> Iterator[str]:
        for name, value in values.items():
            assert name in node["properties"], f"{path}{name} is not in the schema"
            below = node["properties"][name]
            if "properties" in below:
                yield from leaves(value, below, f"{path}{name}.")
            else:
                yield path + name

    undescribed = [path for path in leaves(yaml.safe_load(text), schema) if f"@param {path} " not in text]
    assert undescribed == []


# ----------------------------------------------------------------------------------------------------- what is rendered


def test_crd_holds_the_bytes_of_the_generated_one_and_is_rendered_unchanged(chart: Helm) -> None:
    ours = (ROOT / "crds" / FILE_NAME).read_bytes()
    assert (CHART / "files" / "crds" / FILE_NAME).read_bytes() == ours
    rendered = the(chart.template(), "CustomResourceDefinition")
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert rendered["spec"] == yaml.safe_load(ours)["spec"]


def test_crd_can_be_left_out_or_given_up(chart: Helm) -> None:
    assert of_kind(chart.template("crds.enabled=false"), "CustomResourceDefinition") == []
    assert "annotations" not in the(chart.template("crds.keep=false"), "CustomResourceDefinition")["metadata"]


def test_operator_accepts_its_arguments_and_they_say_what_the_values_say(chart: Helm) -> None:
    plain = parsed(chart.template())
    assert plain.namespaces == ()
    assert plain.prometheus is None
    assert plain.images.engine == f"{REPOSITORY}/engine:0.1.0"
    assert plain.images.router == f"{REPOSITORY}/control-plane:0.1.0"
    objects = chart.template(
        *("image.tag=v2", "image.pullPolicy=Never", "imagePullSecrets[0].name=mine", "operator.logLevel=debug"),
        *("operator.watchNamespaces={llm,chat}", "operator.extraArgs[0]=--lease-duration-seconds=30"),
        *("prometheus.url=https://prometheus.invalid/p", "prometheus.bearerTokenSecret=token"),
        *("prometheus.caSecret=authority", "prometheus.insecureSkipVerify=true"),
    )
    given = parsed(objects)
    assert given.namespaces == ("llm", "chat")
    assert given.images == render.Images(
        f"{REPOSITORY}/engine:v2", f"{REPOSITORY}/control-plane:v2", "Never", pull_secrets=("mine",)
    )
    assert (given.log_level, given.lease_duration_seconds) == ("debug", 30)
    assert given.prometheus is not None
    assert given.prometheus.url == "https://prometheus.invalid/p"
    assert given.prometheus.insecure_skip_verify
    pod = the(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "mine"}]
    assert pod["containers"][0]["imagePullPolicy"] == "Never"
    mounted = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for file, secret in (
        (given.prometheus.bearer_token_file, "token"),
        (given.prometheus.ca_file, "authority"),
    ):
        assert file is not None
        sources = volumes[mounted[str(file.parent)]]["projected"]["sources"]
        assert {"name": secret, "items": [{"key": file.name, "path": file.name}]} in [s["secret"] for s in sources]


def test_operator_gets_its_root_secret_and_its_name(chart: Helm) -> None:
    objects = chart.template()
    secret = the(objects, "Secret")
    environment = {variable["name"]: variable["valueFrom"] for variable in operator_container(objects)["env"]}
    reference = environment[names.ENV_ROOT_SECRET]["secretKeyRef"]
    assert reference == {"name": secret["metadata"]["name"], "key": "root"}
    assert len(secret["data"][reference["key"]]) >= 64
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert environment[names.ENV_POD_NAME]["fieldRef"]["fieldPath"] == "metadata.name"
    assert of_kind(chart.template("rootSecret.create=false"), "Secret") == []


def test_operator_is_one_replica_that_is_gone_before_its_successor_starts(chart: Helm) -> None:
    spec = the(chart.template(), "Deployment")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_labels_of_a_user_are_added_and_never_replace_those_of_a_selector(chart: Helm) -> None:
    theirs = ["commonLabels.team=ml", "operator.podLabels.tier=one"]
    name = "app\\.kubernetes\\.io/name"
    for found in chart.template(*theirs, f"commonLabels.{name}=mine", f"operator.podLabels.{name}=mine"):
        assert found["metadata"]["labels"]["team"] == "ml"
        assert found["metadata"]["labels"]["app.kubernetes.io/name"] == "poolwright"
        if found["kind"] == "Deployment":
            labels = found["spec"]["template"]["metadata"]["labels"]
            assert labels["tier"] == "one"
            assert found["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_values_of_the_pod_land_on_the_pod(chart: Helm) -> None:
    objects = chart.template(
        *("operator.nodeSelector.disk=fast", "operator.priorityClassName=high", "operator.podAnnotations.note=x"),
        *("operator.tolerations[0].key=spot", "operator.affinity.podAffinity.x=y", "operator.resources.limits.cpu=2"),
        *("operator.extraEnv[0].name=HTTPS_PROXY", "operator.extraEnv[0].value=none.invalid"),
        *("serviceAccount.annotations.note=y", "nameOverride=wright", "serviceAccount.name=mine"),
    )
    template = the(objects, "Deployment")["spec"]["template"]
    pod = template["spec"]
    assert template["metadata"]["annotations"] == {"note": "x"}
    assert pod["nodeSelector"] == {"disk": "fast"}
    assert pod["priorityClassName"] == "high"
    assert pod["tolerations"] == [{"key": "spot"}]
    assert pod["affinity"] == {"podAffinity": {"x": "y"}}
    assert pod["containers"][0]["resources"]["limits"] == {"cpu": 2, "memory": "512Mi"}
    assert {"name": "HTTPS_PROXY", "value": "none.invalid"} in pod["containers"][0]["env"]
    account = the(objects, "ServiceAccount")
    assert account["metadata"]["name"] == pod["serviceAccountName"] == "mine"
    assert account["metadata"]["annotations"] == {"note": "y"}
    assert the(objects, "Deployment")["metadata"]["name"] == "pw-wright"
    assert the(chart.template("fullnameOverride=x"), "Deployment")["metadata"]["name"] == "x"


def test_every_pod_satisfies_the_restricted_standard(chart: Helm) -> None:
    pods = [
        found["spec"]["template"]["spec"]
        for found in chart.template("prometheus.bearerTokenSecret=t")
        if found["kind"] == "Deployment"
    ]
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all({"emptyDir", "projected"} & set(volume) for volume in pod["volumes"])
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any("hostPort" in port for port in container["ports"])


# --------------------------------------------------------------------------------------------------------------- rights


def rights(rules: list[dict[str, Any]]) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_rights_are_those_under_which_the_operator_is_tested(chart: Helm) -> None:
    objects = chart.template()
    assert rights(the(objects, "ClusterRole", "poolwright")["rules"]) == rights(POOL_RULES) | rights(NODE_RULES)
    assert rights(the(objects, "Role", "-lease")["rules"]) == rights(LEASE_RULES)
    one = chart.template(ONE_NAMESPACE)
    assert rights(the(one, "Role", "poolwright")["rules"]) == rights(POOL_RULES)


def test_every_call_of_the_operator_is_granted_and_nothing_else_is(chart: Helm) -> None:
    objects = chart.template()
    rules = [*the(objects, "ClusterRole", "poolwright")["rules"], *the(objects, "Role", "-lease")["rules"]]
    granted = rights(rules)
    calls = set(calls_in_the_sources()) | set(calls_for_children()) | set(calls_of_watches())
    owning = {(names.GROUP, f"{names.PLURAL}/finalizers", "update")}
    assert calls - granted == set()
    assert granted - calls - owning == set()


VERBS = {
    "get": ["get"],
    "list": ["list"],
    "create": ["create"],
    "replace": ["update"],
    "apply": ["patch", "create"],
    "json_patch": ["patch"],
    "delete": ["delete"],
    "watch_set": ["list", "watch"],
}


def calls_in_the_sources() -> Iterator[Right]:
    """Every `client.VERB(KIND, …)` with a constant kind, of the operator and of what it shares with the router."""
    source = ROOT / "operator" / "poolwright"
    for file in (*(source / "controller").glob("*.py"), source / "kube" / "machines.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            kind = node.args[0]
            if isinstance(kind, ast.Name) and isinstance(resource := getattr(resources, kind.id, None), Resource):
                subresource = [k.value for k in node.keywords if k.arg == "subresource"]
                plural = resource.plural
                for value in subresource:
                    assert isinstance(value, ast.Constant) and isinstance(value.value, str)  # noqa: PT018
                    plural += f"/{value.value}"
                verbs = ["patch"] if subresource else VERBS.get(node.func.attr, [])
                yield from ((resource.group, plural, verb) for verb in verbs)


def calls_for_children() -> Iterator[Right]:
    """Children are read and applied by what they are; the Secret is never read."""
    spec = good_spec()
    spec["metadata"] |= {"uid": "1", "namespace": "llm"}
    rendered = render.children(InferencePool.parse(spec), render.Images("e", "r"), b"k" * 32)
    for manifest in (*rendered.support, rendered.secret, *rendered.deployments):
        resource = resource_of(manifest)
        verbs = ["create", "patch"] if manifest is rendered.secret else ["get", "create", "patch"]
        yield from ((resource.group, resource.plural, verb) for verb in verbs)


def calls_of_watches() -> Iterator[Right]:
    async def connect() -> Any:
        raise AssertionError("nothing is watched here")

    registry = handlers.build_registry(lambda key: None, connect)
    for handler in registry._watching.get_all_handlers():
        selector = handler.selector
        assert selector is not None
        plural = selector.plural or selector.any_name
        assert isinstance(plural, str)
        yield from ((selector.group or "", plural, verb) for verb in ("list", "watch"))


def test_named_namespaces_need_no_right_on_the_cluster(chart: Helm) -> None:
    objects = chart.template("operator.watchNamespaces={llm,chat}")
    assert of_kind(objects, "ClusterRoleBinding") == []
    assert {role["metadata"]["namespace"] for role in of_kind(objects, "Role")} == {"llm", "chat", "system"}
    for role in of_kind(objects, "ClusterRole"):
        assert "rbac.authorization.k8s.io/aggregate-to-admin" in role["metadata"]["labels"]
    alone = chart.template(ONE_NAMESPACE, "rbac.aggregateClusterRoles=false", "crds.enabled=false")
    assert {found["kind"] for found in alone} == {"Secret", "ServiceAccount", "Deployment", "Role", "RoleBinding"}


def test_every_binding_is_of_the_operators_account_to_a_role_that_is_there(chart: Helm) -> None:
    for values in ((), (ONE_NAMESPACE,)):
        objects = chart.template(*values)
        account = the(objects, "ServiceAccount")["metadata"]
        roles = {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects}
        for binding in (*of_kind(objects, "RoleBinding"), *of_kind(objects, "ClusterRoleBinding")):
            reference, namespace = binding["roleRef"], binding["metadata"].get("namespace")
            assert (reference["kind"], namespace, reference["name"]) in roles
            (subject,) = binding["subjects"]
            assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert not {"Role", "ClusterRole"} & {o["kind"] for o in chart.template("rbac.create=false")}


def test_users_of_the_namespace_roles_may_read_and_edit_pools(chart: Helm) -> None:
    objects = chart.template()
    view, edit = (the(objects, "ClusterRole", end) for end in ("-view", "-edit"))
    assert {verb for _, _, verb in rights(view["rules"])} == {"get", "list", "watch"}
    assert (names.GROUP, names.PLURAL, "create") in rights(edit["rules"])
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]
