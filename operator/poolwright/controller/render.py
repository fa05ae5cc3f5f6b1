"""From an InferencePool to the manifests of its children. Pure: the same pool gives the same bytes.

Owns what a child looks like; knows neither whether it exists nor how it is written. `spec.slo`, `pools`, `rebalance`
and `router` have no part in the engines' pod template, so editing them never rolls an engine.
"""

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Any

from poolwright.api.models import API_VERSION, InferencePool, MachineClass, MachineTemplate
from poolwright.controller import names as child_names
from poolwright_protocol import names

Manifest = dict[str, Any]

ANNOTATION_RENDERED = f"{names.GROUP}/rendered"  # digest of the manifest that was applied last
ANNOTATION_KEY_DIGEST = f"{names.GROUP}/key-digest"  # a new pool key is a new template: engines and routers roll
SECRET_KEY = "pool-key"  # noqa: S105
MODEL_MOUNT = "/poolwright/model"

_ENV_THREADS = "OMP_NUM_THREADS"
_USER_ID = 65532
_ENGINE_GRACE_SECONDS = 60
_ROUTER_GRACE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Images:
    engine: str
    router: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rendered:
    """All children of one pool, in the order in which they are written: what a pod needs comes before the pod."""

    support: tuple[Manifest, ...]  # accounts, rights, Services
    secret: Manifest
    deployments: tuple[Manifest, ...]


def children(pool: InferencePool, images: Images, key: bytes) -> Rendered:
    """`key` is the pool key (keys.pool_key); the manifests carry their own digest."""
    support = (
        _service_account(pool, child_names.engine_service_account(pool.metadata.name), names.COMPONENT_ENGINE),
        _service_account(pool, child_names.router_service_account(pool.metadata.name), names.COMPONENT_ROUTER),
        _router_role(pool),
        _router_role_binding(pool),
        _engine_service(pool),
        _router_service(pool),
    )
    deployments = (
        *(_engines(pool, machine_class, images, key) for machine_class in pool.spec.machines),
        _router(pool, images, key),
    )
    return Rendered(
        tuple(_sealed(manifest) for manifest in support),
        _sealed(_key_secret(pool, key)),
        tuple(_sealed(manifest) for manifest in deployments),
    )


def digest(manifest: Manifest) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------------- engines


def _engines(pool: InferencePool, machine_class: MachineClass, images: Images, key: bytes) -> Manifest:
    """One Deployment for each machine class; the roles share it, so the role is in no selector."""
    selector = {**_selector(pool, names.COMPONENT_ENGINE), names.LABEL_MACHINE_CLASS: machine_class.name}
    template = machine_class.template
    manifest = _object(
        pool,
        "apps/v1",
        "Deployment",
        child_names.engines(pool.metadata.name, machine_class.name),
        names.COMPONENT_ENGINE,
        {names.LABEL_MACHINE_CLASS: machine_class.name},
    )
    manifest["spec"] = {
        "replicas": machine_class.replicas,
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": selector},
        # The budget is fixed: a surge pod would wait for ever for the GPU that the pod it replaces still holds.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "template": {
            "metadata": {
                "labels": {**template.labels, **_labels(pool, names.COMPONENT_ENGINE), **selector},
                "annotations": {
                    **template.annotations,
                    names.ANNOTATION_ROLE_EPOCH: "0",
                    ANNOTATION_KEY_DIGEST: _key_digest(key),
                },
            },
            "spec": _engine_pod(pool, machine_class, images),
        },
    }
    return manifest


def _engine_pod(pool: InferencePool, machine_class: MachineClass, images: Images) -> Manifest:
    template = machine_class.template
    model_path, volumes, mounts = _model(pool)
    resources = template.resources.model_dump(by_alias=True, exclude_defaults=True)
    container: Manifest = {
        "name": "engine",
        "image": images.engine,
        "imagePullPolicy": images.pull_policy,
        "command": ["poolwright-engine", "serve"],
        "args": engine_arguments(pool, machine_class, model_path),
        "env": [
            *_pod_identity(),
            _field(names.ENV_POD_IP, "status.podIP"),
            _field(names.ENV_ROLE, f"metadata.labels['{names.LABEL_ROLE}']"),
            _field(names.ENV_ROLE_EPOCH, f"metadata.annotations['{names.ANNOTATION_ROLE_EPOCH}']"),
            *_pool_identity(pool),
            *_threads(template),
            *(variable.model_dump(by_alias=True, exclude_none=True) for variable in template.env),
        ],
        "ports": [
            {"name": "api", "containerPort": names.API_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": names.ADMIN_PORT, "protocol": "TCP"},
            {"name": "kv", "containerPort": names.KV_PORT, "protocol": "TCP"},
        ],
        # The server answers at once and says 503 on /ready until the model is loaded, which may take minutes.
        "startupProbe": _probe("/health", "api", period=2, failures=90),
        "livenessProbe": _probe("/health", "api", period=10, failures=6),
        "readinessProbe": _probe("/ready", "api", period=2, failures=2),
        "securityContext": _container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "poolwright-tmp", "mountPath": "/tmp"},  # noqa: S108
            *mounts,
            *(mount.model_dump(by_alias=True, exclude_none=True) for mount in template.volume_mounts),
        ],
    }
    if resources:
        container["resources"] = resources
    return {
        **_pod(child_names.engine_service_account(pool.metadata.name), _ENGINE_GRACE_SECONDS),
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "poolwright-tmp", "emptyDir": {}},
            *volumes,
            *(volume.model_dump(by_alias=True, exclude_none=True) for volume in template.volumes),
        ],
        **_placement(template, images),
    }


def _threads(template: MachineTemplate) -> list[Manifest]:
    """As many threads as the limit has CPUs, rounded up, else as the node has: more would throttle each other."""
    if any(variable.name == _ENV_THREADS for variable in template.env):
        return []
    return [{"name": _ENV_THREADS, "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1"}}}]


def _placement(template: MachineTemplate, images: Images) -> Manifest:
    """What the user says of where the pods run; absent where nothing is said."""
    secrets = [*images.pull_secrets, *(reference.name for reference in template.image_pull_secrets)]
    placement: Manifest = {
        "nodeSelector": dict(template.node_selector),
        "tolerations": [t.model_dump(mode="json", by_alias=True, exclude_none=True) for t in template.tolerations],
        "affinity": template.affinity,
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
        "imagePullSecrets": [{"name": name} for name in dict.fromkeys(secrets)],
    }
    return {key: value for key, value in placement.items() if value}


def engine_arguments(pool: InferencePool, machine_class: MachineClass, model_path: str) -> list[str]:
    engine = pool.spec.engine_for(machine_class)
    options: list[tuple[str, object]] = [
        ("--model", model_path),
        ("--served-model-name", pool.spec.model.name),
        ("--max-num-batched-tokens", engine.max_num_batched_tokens),
        ("--max-num-seqs", engine.max_num_seqs),
        ("--block-size", engine.block_size),
        ("--kv-cache-mebibytes", engine.kv_cache_mebibytes),
        ("--max-model-len", engine.max_model_len),
    ]
    return [f"{name}={value}" for name, value in options if value is not None]


def _model(pool: InferencePool) -> tuple[str, list[Manifest], list[Manifest]]:
    """(path as the engine sees it, volumes, mounts)."""
    source = pool.spec.model.source
    claim = source.persistent_volume_claim
    if claim is None:
        assert source.path is not None  # exactly one of the two, by the schema
        return source.path, [], []
    volume = {
        "name": "poolwright-model",
        "persistentVolumeClaim": {"claimName": claim.claim_name, "readOnly": True},
    }
    mount = {"name": "poolwright-model", "mountPath": MODEL_MOUNT, "readOnly": True}
    below = claim.path.strip("/")
    path = MODEL_MOUNT if below in ("", ".") else f"{MODEL_MOUNT}/{below}"
    return path, [volume], [mount]


def _engine_service(pool: InferencePool) -> Manifest:
    manifest = _object(pool, "v1", "Service", child_names.engine_service(pool.metadata.name), names.COMPONENT_ENGINE)
    manifest["spec"] = {
        "clusterIP": "None",
        "selector": _selector(pool, names.COMPONENT_ENGINE),
        "ports": [
            {"name": "api", "port": names.API_PORT, "targetPort": "api", "protocol": "TCP"},
            {"name": "admin", "port": names.ADMIN_PORT, "targetPort": "admin", "protocol": "TCP"},
            {"name": "kv", "port": names.KV_PORT, "targetPort": "kv", "protocol": "TCP"},
        ],
    }
    return manifest


# ------------------------------------------------------------------------------------------------------------- routers


def _router(pool: InferencePool, images: Images, key: bytes) -> Manifest:
    selector = _selector(pool, names.COMPONENT_ROUTER)
    manifest = _object(pool, "apps/v1", "Deployment", child_names.router(pool.metadata.name), names.COMPONENT_ROUTER)
    pod: Manifest = {
        **_pod(child_names.router_service_account(pool.metadata.name), _ROUTER_GRACE_SECONDS),
        "automountServiceAccountToken": True,
        "containers": [
            {
                "name": "router",
                "image": images.router,
                "imagePullPolicy": images.pull_policy,
                "command": ["poolwright", "router"],
                "env": [*_pod_identity(), _field(names.ENV_POD_IP, "status.podIP"), *_pool_identity(pool)],
                "ports": [{"name": "http", "containerPort": names.ROUTER_PORT, "protocol": "TCP"}],
                "startupProbe": _probe("/health", "http", period=1, failures=60),
                "livenessProbe": _probe("/health", "http", period=10, failures=6),
                "readinessProbe": _probe("/ready", "http", period=2, failures=2),
                # Endpoints are withdrawn while it still listens, so no client meets a closed port.
                "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
                "resources": {"requests": {"cpu": "100m", "memory": "192Mi"}},
                "securityContext": _container_security(),
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": [{"name": "poolwright-tmp", "mountPath": "/tmp"}],  # noqa: S108
            }
        ],
        "volumes": [{"name": "poolwright-tmp", "emptyDir": {}}],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector},
            }
        ],
    }
    if images.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in images.pull_secrets]
    manifest["spec"] = {
        "replicas": pool.spec.router.replicas,
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": selector},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {
            "metadata": {
                "labels": {**_labels(pool, names.COMPONENT_ROUTER), **selector},
                "annotations": {ANNOTATION_KEY_DIGEST: _key_digest(key)},
            },
            "spec": pod,
        },
    }
    return manifest


def _router_service(pool: InferencePool) -> Manifest:
    manifest = _object(pool, "v1", "Service", child_names.router_service(pool.metadata.name), names.COMPONENT_ROUTER)
    manifest["spec"] = {
        "type": "ClusterIP",
        "selector": _selector(pool, names.COMPONENT_ROUTER),
        "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
    }
    return manifest


def _router_role(pool: InferencePool) -> Manifest:
    manifest = _object(
        pool,
        "rbac.authorization.k8s.io/v1",
        "Role",
        child_names.router_role(pool.metadata.name),
        names.COMPONENT_ROUTER,
    )
    manifest["rules"] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    return manifest


def _router_role_binding(pool: InferencePool) -> Manifest:
    manifest = _object(
        pool,
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        child_names.router_role_binding(pool.metadata.name),
        names.COMPONENT_ROUTER,
    )
    manifest["roleRef"] = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": child_names.router_role(pool.metadata.name),
    }
    manifest["subjects"] = [
        {
            "kind": "ServiceAccount",
            "name": child_names.router_service_account(pool.metadata.name),
            "namespace": pool.metadata.namespace,
        }
    ]
    return manifest


# -------------------------------------------------------------------------------------------------------------- shared


def _key_secret(pool: InferencePool, key: bytes) -> Manifest:
    manifest = _object(pool, "v1", "Secret", child_names.key_secret(pool.metadata.name), "key")
    manifest["type"] = "Opaque"
    manifest["data"] = {SECRET_KEY: base64.b64encode(key.hex().encode()).decode()}
    return manifest


def _service_account(pool: InferencePool, name: str, component: str) -> Manifest:
    manifest = _object(pool, "v1", "ServiceAccount", name, component)
    manifest["automountServiceAccountToken"] = False
    return manifest


def _object(
    pool: InferencePool,
    api_version: str,
    kind: str,
    name: str,
    component: str,
    labels: dict[str, str] | None = None,
) -> Manifest:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": pool.metadata.namespace,
            "labels": {
                **_labels(pool, component),
                names.LABEL_POOL: pool.metadata.name,
                names.LABEL_COMPONENT: component,
                **(labels or {}),
            },
            "annotations": {},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": names.KIND,
                    "name": pool.metadata.name,
                    "uid": pool.metadata.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
    }


def _labels(pool: InferencePool, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "poolwright",
        "app.kubernetes.io/instance": pool.metadata.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": "poolwright",
    }


def _selector(pool: InferencePool, component: str) -> dict[str, str]:
    return {names.LABEL_POOL: pool.metadata.name, names.LABEL_COMPONENT: component}


def _pod(service_account: str, grace_seconds: int) -> Manifest:
    return {
        "serviceAccountName": service_account,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER_ID,
            "runAsGroup": _USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _pod_identity() -> list[Manifest]:
    return [_field(names.ENV_POD_NAME, "metadata.name"), _field(names.ENV_POD_UID, "metadata.uid")]


def _pool_identity(pool: InferencePool) -> list[Manifest]:
    secret = {"name": child_names.key_secret(pool.metadata.name), "key": SECRET_KEY}
    return [
        {"name": names.ENV_POOL, "value": pool.metadata.name},
        {"name": names.ENV_POOL_NAMESPACE, "value": pool.metadata.namespace},
        {"name": names.ENV_POOL_KEY, "valueFrom": {"secretKeyRef": secret}},
    ]


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _probe(path: str, port: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _key_digest(key: bytes) -> str:
    return hmac.new(key, b"digest", hashlib.sha256).hexdigest()[:8]


def _sealed(manifest: Manifest) -> Manifest:
    meta = manifest["metadata"]
    seal = {ANNOTATION_RENDERED: digest(manifest)}
    return {**manifest, "metadata": {**meta, "annotations": {**meta["annotations"], **seal}}}
