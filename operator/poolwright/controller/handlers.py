"""Kopf's part: it watches, and each event only puts a key into the queue.

Nothing is decided here and nothing is stored on objects: no handler state, no finalizer, no annotation of kopf's. An
event says only that a look is worth while; what is there is read by reconcile.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import kopf

from poolwright.kube import KubeClient
from poolwright_protocol import names

Enqueue = Callable[[tuple[str, str]], None]

_PAGE_SIZE = 500
_REQUEST_TIMEOUT_SECONDS = 30.0


def build_registry(enqueue: Enqueue, connect: Callable[[], Awaitable[KubeClient]]) -> kopf.OperatorRegistry:
    """`connect` gives a new KubeClient: kopf's connections present what ours do, read again when they are refused."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        client = await connect()
        async with client:
            held = await client.credentials()
        return kopf.ConnectionInfo(
            server=held.server,
            ca_path=held.ca_path,
            insecure=held.insecure,
            certificate_path=held.certificate_path,
            private_key_path=held.key_path,
            scheme=held.scheme,
            token=held.token,
        )

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def pool_changed(namespace: str | None, name: str, **_: Any) -> None:
        if namespace is not None:
            enqueue((namespace, name))

    async def child_changed(namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        if namespace is not None:
            enqueue((namespace, labels[names.LABEL_POOL]))

    children = {names.LABEL_POOL: kopf.PRESENT}
    kopf.on.event("", "v1", "pods", labels=children, id="pod", registry=registry)(child_changed)
    kopf.on.event("apps", "v1", "deployments", labels=children, id="deployment", registry=registry)(child_changed)
    return registry


def build_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # our own recorder repeats one Event instead of writing many
    settings.peering.standalone = True  # peering is no election; the Lease is
    settings.scanning.disabled = True  # no list or watch of CRDs and namespaces
    settings.watching.chunk_size = _PAGE_SIZE
    # Filters of handlers are the client's; these are the server's, or every pod of the cluster would come here.
    settings.watching.label_selectors["", "v1", "pods"] = names.LABEL_POOL
    settings.watching.label_selectors["apps", "v1", "deployments"] = names.LABEL_POOL
    settings.networking.request_timeout = _REQUEST_TIMEOUT_SECONDS
    settings.networking.connect_timeout = 10.0
    settings.persistence.finalizer = f"{names.GROUP}/unused"  # never written: no handler here asks for one
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=names.GROUP)
    settings.process.ultimate_exiting_timeout = None  # the entry point bounds its own shutdown
    return settings


def quiet_logs() -> None:
    for name in ("kopf", "kopf.objects", "kopf.activities"):
        logging.getLogger(name).setLevel(logging.WARNING)
