"""The kinds this project reads and writes, and their addresses on the API server."""

from dataclasses import dataclass
from typing import Any

from poolwright_protocol import names


@dataclass(frozen=True, slots=True)
class Resource:
    group: str  # "" for the core group
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """`namespace` None addresses all namespaces, or a cluster-scoped kind."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/".join(parts)


PODS = Resource("", "v1", "pods", "Pod")
NODES = Resource("", "v1", "nodes", "Node")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICES = Resource("", "v1", "services", "Service")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
POOLS = Resource(names.GROUP, names.VERSION, names.PLURAL, names.KIND)

_ALL = (PODS, NODES, SECRETS, SERVICES, SERVICE_ACCOUNTS, DEPLOYMENTS, ROLES, ROLE_BINDINGS, LEASES, EVENTS, POOLS)
_BY_KIND = {(resource.api_version, resource.kind): resource for resource in _ALL}


def resource_of(manifest: dict[str, Any]) -> Resource:
    return _BY_KIND[manifest["apiVersion"], manifest["kind"]]
