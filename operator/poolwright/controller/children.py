"""Makes the children of a pool as rendered, and says what stands in the way: `Children` over Kubernetes.

Owns who may be written and when a write is needed; what a child looks like is render's. A child is written when the
digest of its manifest differs from the one on the live object, or when another writer has taken a field of ours; so a
settled world sees no write. Nothing is ever deleted here but the engines of a class that left the spec: the garbage
collector deletes the children of a deleted pool.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from poolwright.api.models import InferencePool
from poolwright.controller import names as child_names
from poolwright.controller import render
from poolwright.controller.ports import ChildrenState
from poolwright.controller.trouble import pod_is_ready, troubles
from poolwright.kube.client import ApiError, KubeClient, Manifest, unavailable
from poolwright.kube.resources import DEPLOYMENTS, PODS, resource_of
from poolwright_protocol import keys, names

log = logging.getLogger(__name__)

CHILDREN_MANAGER = "poolwright-operator"


class Foreign(Exception):
    """A live object of a child's name that belongs to somebody else; the text is for a condition."""


class KubeChildren:
    def __init__(self, client: KubeClient, images: render.Images, root_secret: bytes) -> None:
        self._client = client
        self._images = images
        self._root_secret = root_secret
        # (kind, name) → (uid, digest of the fields we own): as they were when the child was last known to be right.
        self._owned: dict[tuple[str, str], tuple[str, str]] = {}

    async def ensure(self, pool: InferencePool) -> ChildrenState:
        try:
            return await self._ensure(pool)
        except ApiError as error:
            raise unavailable(error) from error

    async def _ensure(self, pool: InferencePool) -> ChildrenState:
        namespace = pool.metadata.namespace
        if pool.metadata.deletion_timestamp is not None:
            return ChildrenState(routers_desired=pool.spec.router.replicas)
        rendered = render.children(pool, self._images, keys.pool_key(self._root_secret, pool.metadata.uid))
        conflicts: list[str] = []
        problems: list[str] = []
        pending_support, pending_deployments, pods, deployments = await asyncio.gather(
            self._pending(pool, rendered.support, conflicts),
            self._pending(pool, rendered.deployments, conflicts),
            self._client.list(PODS, namespace, labels=f"{names.LABEL_POOL}={pool.metadata.name}"),
            self._client.list(DEPLOYMENTS, namespace, labels=f"{names.LABEL_POOL}={pool.metadata.name}"),
        )
        pod_troubles = troubles(pods, deployments)
        changed = await self._apply_all(pending_support, problems)
        # The Secret is never read back: it is written before the first Deployment and before one with another key, so
        # it is there when they are. Should somebody delete it, a pod says so.
        known = {d["metadata"]["name"]: d for d in deployments if _ours(pool, d)}
        new_key = any(_key_of(known.get(m["metadata"]["name"])) != _key_of(m) for m in pending_deployments)
        if new_key or pod_troubles.secret_missing:
            changed += await self._apply_secret(rendered.secret, conflicts, problems)
        if await self._accepted(pending_deployments, problems):
            changed += await self._apply_all(pending_deployments, problems)
        changed += await self._delete_departed(pool, rendered.deployments, deployments)
        routers = [pod for pod in pods if _component(pod) == names.COMPONENT_ROUTER and pod_is_ready(pod)]
        return ChildrenState(
            changed=changed,
            conflicts=tuple(sorted(conflicts)),
            problems=(*sorted(problems), *pod_troubles.problems),
            routers_ready=len(routers),
            routers_desired=pool.spec.router.replicas,
            router_uids=tuple(sorted(str(pod["metadata"]["uid"]) for pod in routers)),
            router_urls={str(pod["metadata"]["uid"]): url for pod in routers if (url := _router_url(pod))},
        )

    # What needs a write.

    async def _pending(
        self, pool: InferencePool, manifests: Sequence[Manifest], conflicts: list[str]
    ) -> Sequence[Manifest]:
        """Those of the manifests that must be applied, in order; conflicts are named and left alone."""
        found = await asyncio.gather(*(self._get(manifest) for manifest in manifests))
        pending = []
        for manifest, live in zip(manifests, found, strict=True):
            try:
                if self._needs_write(pool, manifest, live):
                    pending.append(manifest)
            except Foreign as foreign:
                conflicts.append(str(foreign))
        return pending

    async def _get(self, manifest: Manifest) -> Manifest | None:
        meta = manifest["metadata"]
        return await self._client.get(resource_of(manifest), meta["namespace"], meta["name"])

    def _needs_write(self, pool: InferencePool, manifest: Manifest, live: Manifest | None) -> bool:
        """Raises Foreign."""
        if live is None:
            return True
        check_owner(pool, manifest, live)
        if "deletionTimestamp" in live["metadata"]:
            return False  # it is on its way out; the next look finds it gone
        if not _ours(pool, live):
            return True  # adoption
        annotations = live["metadata"].get("annotations") or {}
        if (
            annotations.get(render.ANNOTATION_RENDERED)
            != manifest["metadata"]["annotations"][render.ANNOTATION_RENDERED]
        ):
            return True
        key, seen = _key(manifest), (live["metadata"]["uid"], owned_digest(live))
        if key not in self._owned:  # the first look since the start: compare values once, then only who owns them
            if not covers(live, manifest):
                return True
            self._owned[key] = seen
        return self._owned[key] != seen

    # Writes.

    async def _apply_all(self, manifests: Iterable[Manifest], problems: list[str]) -> int:
        changed = 0
        for manifest in manifests:
            try:
                live = await self._apply(manifest)
            except ApiError as error:
                problems.append(_refusal(manifest, error))
                continue
            changed += 1
            self._owned[_key(manifest)] = (live["metadata"]["uid"], owned_digest(live))
            log.info("Applied a child kind=%s name=%s", manifest["kind"], manifest["metadata"]["name"])
        return changed

    async def _accepted(self, manifests: Sequence[Manifest], problems: list[str]) -> bool:
        """Whether the server would take all of them: an edit that it refuses for one class rolls none."""
        refused = False
        for manifest in manifests:
            try:
                await self._apply(manifest, dry_run=True)
            except ApiError as error:
                problems.append(_refusal(manifest, error))
                refused = True
        return not refused

    async def _apply_secret(self, manifest: Manifest, conflicts: list[str], problems: list[str]) -> int:
        """Without force: what another manager wrote under this name is refused by the server, unread by us."""
        try:
            await self._apply(manifest, force=False)
        except ApiError as error:
            if error.status == 409:
                conflicts.append(f"{_title(manifest)} is written by somebody else: {error.message}")
            else:
                problems.append(_refusal(manifest, error))
            return 0
        return 1

    async def _apply(self, manifest: Manifest, *, force: bool = True, dry_run: bool = False) -> Manifest:
        meta = manifest["metadata"]
        return await self._client.apply(
            resource_of(manifest),
            meta["namespace"],
            meta["name"],
            manifest,
            field_manager=CHILDREN_MANAGER,
            force=force,
            dry_run=dry_run,
        )

    async def _delete_departed(self, pool: InferencePool, wanted: Sequence[Manifest], live: Sequence[Manifest]) -> int:
        """Engines of a machine class that is no longer in the spec."""
        names_wanted = {manifest["metadata"]["name"] for manifest in wanted}
        departed = [
            deployment
            for deployment in live
            if _ours(pool, deployment)
            and deployment["metadata"]["name"] not in names_wanted
            and _component(deployment) == names.COMPONENT_ENGINE
            and deployment["metadata"]["name"] == _engines_name(pool, deployment)
            and "deletionTimestamp" not in deployment["metadata"]
        ]
        for deployment in departed:
            meta = deployment["metadata"]
            await self._client.delete(DEPLOYMENTS, meta["namespace"], meta["name"], uid=meta["uid"])
            self._owned.pop((DEPLOYMENTS.kind, meta["name"]), None)
            log.info("Deleted the engines of a class that left the spec name=%s", meta["name"])
        return len(departed)


def check_owner(pool: InferencePool, manifest: Manifest, live: Manifest) -> None:
    """Raises Foreign unless the live object is this pool's, or was that of a dead predecessor of the same name."""
    owner = controller_of(live)
    if owner is None:
        raise Foreign(f"{_title(manifest)} exists and belongs to nobody; delete it, or rename the pool")
    if owner["uid"] == pool.metadata.uid:
        return
    group = str(owner["apiVersion"]).partition("/")[0]
    same_name = owner["kind"] == names.KIND and group == names.GROUP and owner["name"] == pool.metadata.name
    if not same_name:  # two objects of one name cannot live at once, so a namesake with another uid is dead
        raise Foreign(f"{_title(manifest)} exists and belongs to {owner['kind']} {owner['name']}; rename one of them")


def controller_of(live: Manifest) -> Manifest | None:
    for reference in live["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            found: Manifest = reference
            return found
    return None


def owned_digest(live: Manifest) -> str:
    """Digest of the set of fields that our last apply owns: it changes when another writer takes one from us."""
    fields = [
        entry.get("fieldsV1")
        for entry in live["metadata"].get("managedFields") or ()
        if entry.get("manager") == CHILDREN_MANAGER and entry.get("operation") == "Apply"
    ]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def covers(live: Any, wanted: Any) -> bool:
    """Whether every value that is wanted stands in the live object. May say no for a value that the server rewrote.

    So it is asked once after a start and never in a loop: from then on, ownership of the fields is compared.
    """
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(covers(live.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return wanted == [] and live is None
        return len(live) >= len(wanted) and all(any(covers(item, value) for item in live) for value in wanted)
    return bool(live == wanted) or (wanted in ("", None, False, 0) and live is None)


def _ours(pool: InferencePool, live: Manifest) -> bool:
    owner = controller_of(live)
    return owner is not None and owner["uid"] == pool.metadata.uid


def _engines_name(pool: InferencePool, deployment: Manifest) -> str:
    machine_class = (deployment["metadata"].get("labels") or {}).get(names.LABEL_MACHINE_CLASS, "")
    return child_names.engines(pool.metadata.name, machine_class)


def _key_of(deployment: Manifest | None) -> str | None:
    """Digest of the pool key that a Deployment's pods are to get."""
    if deployment is None:
        return None
    annotations = deployment["spec"]["template"]["metadata"].get("annotations") or {}
    found: str | None = annotations.get(render.ANNOTATION_KEY_DIGEST)
    return found


def _router_url(pod: Manifest) -> str | None:
    """None before it has an address."""
    host = (pod.get("status") or {}).get("podIP")
    if not host:
        return None
    return f"http://[{host}]:{names.ROUTER_PORT}" if ":" in host else f"http://{host}:{names.ROUTER_PORT}"


def _component(live: Manifest) -> str:
    return str((live["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT, ""))


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _title(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _refusal(manifest: Manifest, error: ApiError) -> str:
    return f"{_title(manifest)} was refused: {error.message}"
