"""Kubernetes Events about a pool: one object for each (kind, reason, message), whose series counts the repeats.

The object's name is derived from what it says, so a repeat finds it also after a restart, and from another operator.
"""

import hashlib
import logging
import time

from poolwright.api.times import format_time
from poolwright.controller.ports import Event
from poolwright.kube.client import ApiError, KubeClient, Manifest
from poolwright.kube.resources import EVENTS, POOLS
from poolwright.machines import Unavailable

log = logging.getLogger(__name__)

REPORTING_CONTROLLER = "poolwright"
_NOTE_BYTES = 1024  # the API refuses longer notes


class EventRecorder:
    def __init__(self, client: KubeClient, instance: str) -> None:
        self._client = client
        self._instance = instance[:128]

    async def record(self, namespace: str, pool: str, pool_uid: str, event: Event) -> None:
        """Best effort: an Event that cannot be written is a line in the log, and no reason to stop working."""
        try:
            await self._record(namespace, pool, pool_uid, event)
        except (ApiError, Unavailable) as error:
            log.warning(
                "An Event was not written pool=%s/%s reason=%s message=%s error=%s",
                namespace,
                pool,
                event.reason,
                event.message,
                error,
            )

    async def _record(self, namespace: str, pool: str, pool_uid: str, event: Event) -> None:
        name = event_name(pool, pool_uid, event)
        now = format_time(time.time())
        try:
            await self._client.create(EVENTS, namespace, self._manifest(name, namespace, pool, pool_uid, event, now))
            return
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        for attempt in (1, 2, 3):
            known = await self._client.get(EVENTS, namespace, name)
            if known is None:  # it expired since the create was refused
                manifest = self._manifest(name, namespace, pool, pool_uid, event, now)
                await self._client.create(EVENTS, namespace, manifest)
                return
            count = int((known.get("series") or {}).get("count") or 1)
            known["series"] = {"count": count + 1, "lastObservedTime": now}
            try:
                await self._client.replace(EVENTS, namespace, name, known)
                return
            except ApiError as error:
                if error.status not in (404, 409) or attempt == 3:
                    raise

    def _manifest(self, name: str, namespace: str, pool: str, pool_uid: str, event: Event, now: str) -> Manifest:
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": now,
            "type": event.kind,
            "reason": event.reason,
            "action": event.reason,
            "note": shortened(event.message, _NOTE_BYTES),
            "reportingController": REPORTING_CONTROLLER,
            "reportingInstance": self._instance,
            "regarding": {
                "apiVersion": POOLS.api_version,
                "kind": POOLS.kind,
                "namespace": namespace,
                "name": pool,
                "uid": pool_uid,
            },
        }


def event_name(pool: str, pool_uid: str, event: Event) -> str:
    said = "\0".join((pool_uid, event.kind, event.reason, event.message))
    return f"{pool}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"


def shortened(text: str, limit_bytes: int) -> str:
    """The text, or as much of it as fits before an ellipsis."""
    raw = text.encode()
    if len(raw) <= limit_bytes:
        return text
    return raw[: limit_bytes - 3].decode(errors="ignore") + "…"
