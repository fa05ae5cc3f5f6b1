"""`PoolStore` without Kubernetes: one InferencePool from a YAML file, its status and its events, in this process."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from poolwright.api.models import InferencePool
from poolwright.controller.ports import Event


class LocalStore:
    """`edit` is what `kubectl edit` is on a cluster: validated whole, and a new generation."""

    def __init__(self, manifest: Mapping[str, Any], uid: str, on_event: Callable[[Event], None]) -> None:
        self._raw: dict[str, Any] = copy.deepcopy(dict(manifest))
        self._raw.setdefault("metadata", {}).update({"uid": uid, "generation": 1})
        self._on_event = on_event
        self._pool = InferencePool.parse(self._raw)
        self.status: dict[str, Any] = {}
        self.status_writes = 0

    @property
    def pool(self) -> InferencePool:
        return self._pool

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Apply `change` to a copy of the spec. Raises InvalidPool and keeps the old one where it does not validate."""
        raw = copy.deepcopy(self._raw)
        change(raw["spec"])
        raw["metadata"]["generation"] += 1
        self._pool = InferencePool.parse(raw)
        self._raw = raw

    async def get(self) -> InferencePool | None:
        return InferencePool.parse({**self._raw, "status": self.status}) if self.status else self._pool

    async def write_status(self, status: Mapping[str, Any]) -> None:
        self.status = copy.deepcopy(dict(status))
        self.status_writes += 1

    async def emit(self, event: Event) -> None:
        self._on_event(event)
