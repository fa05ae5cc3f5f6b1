"""The InferencePool object on the API server: `PoolStore` over Kubernetes."""

from collections.abc import Mapping
from typing import Any

from poolwright.api.models import API_VERSION, InferencePool
from poolwright.controller.events import EventRecorder
from poolwright.controller.ports import Event
from poolwright.kube.client import ApiError, KubeClient, unavailable
from poolwright.kube.resources import POOLS
from poolwright.machines import Conflict
from poolwright_protocol import names

STATUS_MANAGER = "poolwright-status"
_STATUS_ATTEMPTS = 8


class KubePoolStore:
    """One pool by name and uid: a successor of the same name is another pool, and reads as gone."""

    def __init__(self, client: KubeClient, namespace: str, name: str, uid: str, events: EventRecorder) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._uid = uid
        self._events = events

    async def get(self) -> InferencePool | None:
        try:
            raw = await self._client.get(POOLS, self._namespace, self._name)
        except ApiError as error:
            raise unavailable(error) from error
        if raw is None or raw["metadata"]["uid"] != self._uid:
            return None
        return InferencePool.parse(raw)

    async def write_status(self, status: Mapping[str, Any]) -> None:
        """Tests uid and version, as an apply to a status heeds the latter alone; an edit in between is looked past."""
        for _ in range(_STATUS_ATTEMPTS):
            try:
                live = await self._client.get(POOLS, self._namespace, self._name)
                if live is None or live["metadata"]["uid"] != self._uid:
                    raise Conflict(f"pool {self._namespace}/{self._name} of uid {self._uid} is gone")
                meta = {
                    "name": self._name,
                    "namespace": self._namespace,
                    "resourceVersion": live["metadata"]["resourceVersion"],
                }
                manifest = {"apiVersion": API_VERSION, "kind": names.KIND, "metadata": meta, "status": dict(status)}
                await self._client.apply(
                    POOLS, self._namespace, self._name, manifest, field_manager=STATUS_MANAGER, subresource="status"
                )
                return
            except ApiError as error:
                if error.status not in (404, 409):
                    raise unavailable(error) from error
        raise Conflict(f"the status of pool {self._namespace}/{self._name} is being changed by others")

    async def emit(self, event: Event) -> None:
        await self._events.record(self._namespace, self._name, self._uid, event)
