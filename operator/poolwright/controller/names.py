"""Names of the children of a pool. Each ends in six characters of a hash of (kind, pool, part).

The readable part alone is ambiguous: pool `chat` with class `a-b` and pool `chat-a` with class `b` would both be
`chat-a-b`. Nothing is ever truncated: the schema limits pool and class names so that the longest fits a DNS label.
"""

import base64
import hashlib

HASH_LENGTH = 6

# Parts that are no machine class are marked, so that a class of the same name hashes to something else.
_COMPONENT_MARK = "/"


def engines(pool: str, machine_class: str) -> str:
    """The Deployment of one machine class."""
    return _name("Deployment", pool, machine_class, machine_class)


def router(pool: str) -> str:
    """The router's Deployment."""
    return _component("Deployment", pool, "router")


def router_service(pool: str) -> str:
    """What an OpenAI client is pointed at."""
    return _component("Service", pool, "router")


def engine_service(pool: str) -> str:
    """The headless Service of all engines of the pool."""
    return _component("Service", pool, "engines")


def engine_service_account(pool: str) -> str:
    return _component("ServiceAccount", pool, "engine")


def router_service_account(pool: str) -> str:
    return _component("ServiceAccount", pool, "router")


def router_role(pool: str) -> str:
    return _component("Role", pool, "router")


def router_role_binding(pool: str) -> str:
    return _component("RoleBinding", pool, "router")


def key_secret(pool: str) -> str:
    return _component("Secret", pool, "key")


def _component(kind: str, pool: str, component: str) -> str:
    return _name(kind, pool, component, _COMPONENT_MARK + component)


def _name(kind: str, pool: str, readable: str, part: str) -> str:
    digest = hashlib.sha256(f"{kind}\0{pool}\0{part}".encode()).digest()
    suffix = base64.b32encode(digest).decode().lower()[:HASH_LENGTH]
    return f"{pool}-{readable}-{suffix}"
