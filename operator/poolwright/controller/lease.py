"""Who may act: a `coordination.k8s.io` Lease, held by one operator process at a time.

A Lease fences nothing on the API server, so safety never rests on it: it only keeps two operators from working against
each other for long. Another's claim is judged by the local clock alone (unchanged for its whole duration), so that the
clocks of two machines need not agree.

It belongs to the pod of its holder, where that is known: with the last operator the Lease goes too.
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from poolwright.api.times import format_time
from poolwright.kube.client import ApiError, KubeClient, Manifest
from poolwright.kube.resources import LEASES
from poolwright.machines import Unavailable

log = logging.getLogger(__name__)


class LeaseLost(Exception):
    """Another process holds the Lease, or it could not be renewed in time: stop acting and exit."""


class Lease:
    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration_seconds: int = 15,
        renew_deadline_seconds: float = 10.0,
        retry_seconds: float = 2.0,
        pod: tuple[str, str] | None = None,
    ) -> None:
        """`pod`: name and uid of the one that this process runs in, in the Lease's namespace."""
        if not retry_seconds < renew_deadline_seconds < duration_seconds:
            raise ValueError("a Lease needs retry < renew deadline < duration")
        self._client = client
        self._namespace = namespace
        self._name = name
        self.identity = identity
        self._duration_seconds = duration_seconds
        self._renew_deadline_seconds = renew_deadline_seconds
        self._retry_seconds = retry_seconds
        self._owners = [{"apiVersion": "v1", "kind": "Pod", "name": pod[0], "uid": pod[1]}] if pod else []
        self._observed: tuple[Any, Any] | None = None  # holder and its last renewal, as they were last seen to change
        self._observed_at = 0.0  # monotonic seconds of that change
        self.contacted = False  # the API server has answered about this Lease at least once

    async def acquire(self) -> None:
        """Returns once this process holds the Lease; waits as long as another renews it."""
        told: str | None = None
        while True:
            try:
                holder = await self._try()
                self.contacted = True
                if holder is None:
                    log.info("Acquired the Lease lease=%s/%s identity=%s", self._namespace, self._name, self.identity)
                    return
                if holder != told:
                    log.info("Waiting for the Lease lease=%s/%s holder=%s", self._namespace, self._name, holder)
                    told = holder
            except (ApiError, Unavailable) as error:
                self.contacted = self.contacted or isinstance(error, ApiError)
                log.warning("The Lease could not be read or written error=%s", error)
            await asyncio.sleep(self._retry_seconds)

    async def hold(self) -> None:
        """Renews until cancelled. Raises LeaseLost."""
        renewed_at = time.monotonic()
        while True:
            await asyncio.sleep(self._retry_seconds)
            left = renewed_at + self._renew_deadline_seconds - time.monotonic()
            if left <= 0:
                raise LeaseLost(f"the Lease was not renewed for {self._renew_deadline_seconds:.0f} s")
            with suppress(ApiError, Unavailable, TimeoutError):
                async with asyncio.timeout(left):
                    holder = await self._try()
                if holder is not None:
                    raise LeaseLost(f"the Lease is held by {holder}")
                renewed_at = time.monotonic()

    async def release(self) -> None:
        """Gives the Lease up, so that a successor need not wait; best effort."""
        with suppress(ApiError, Unavailable):
            lease = await self._client.get(LEASES, self._namespace, self._name)
            if lease is None or lease["spec"].get("holderIdentity") != self.identity:
                return
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": format_time(time.time())}
            await self._client.replace(LEASES, self._namespace, self._name, lease)
            log.info("Released the Lease lease=%s/%s", self._namespace, self._name)

    async def _try(self) -> str | None:
        """One attempt to take or renew it: None when this process holds it, else the holder.

        Raises ApiError 409 when another write came between: read again.
        """
        lease = await self._client.get(LEASES, self._namespace, self._name)
        if lease is None:
            manifest: Manifest = {
                "apiVersion": LEASES.api_version,
                "kind": LEASES.kind,
                "metadata": {"name": self._name, "namespace": self._namespace, "ownerReferences": self._owners},
                "spec": self._spec({}, taking=True),
            }
            await self._client.create(LEASES, self._namespace, manifest)
            return None
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder and holder != self.identity and not self._expired(spec):
            return str(holder)
        lease["spec"] = self._spec(spec, taking=holder != self.identity)
        lease["metadata"]["ownerReferences"] = self._owners
        await self._client.replace(LEASES, self._namespace, self._name, lease)
        return None

    def _expired(self, spec: Manifest) -> bool:
        seen = (spec.get("holderIdentity"), spec.get("renewTime"))
        if seen != self._observed:
            self._observed, self._observed_at = seen, time.monotonic()
        return time.monotonic() - self._observed_at > float(spec.get("leaseDurationSeconds") or self._duration_seconds)

    def _spec(self, before: Manifest, *, taking: bool) -> Manifest:
        now = format_time(time.time())
        return {
            **before,
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self._duration_seconds,
            "renewTime": now,
            "acquireTime": now if taking else before.get("acquireTime", now),
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (1 if taking and before else 0),
        }
