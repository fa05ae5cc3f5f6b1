"""One connection to the API server: dicts in, dicts out, one error type, bounded retries, watches that heal.

Retries here are only those that are always right: an answer 429, or 503 with Retry-After, was not processed. Everything
else is the caller's level-triggered loop. Knows no kind's meaning.
"""

import asyncio
import json
import logging
import os
import random
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import aiohttp
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config.config_exception import ConfigException

from poolwright.kube.resources import Resource
from poolwright.machines import Unavailable

log = logging.getLogger(__name__)

Manifest = dict[str, Any]
Manifests = list[Manifest]
Operations = list[dict[str, Any]]

REQUEST_TIMEOUT_SECONDS = 15.0
RETRY_BUDGET_SECONDS = 10.0  # a CRD just created answers 429 "(re)initializing" for about a second
PAGE_SIZE = 500
WATCH_SECONDS = 300  # the server ends a watch after this; the next begins where it ended
WATCH_SILENCE_SECONDS = 90.0  # bookmarks come about once a minute: longer silence is a dead connection
BACKOFF_FIRST_SECONDS = 0.25
BACKOFF_CAP_SECONDS = 15.0

APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
_JSON = "application/json"
# An apply with a field that the schema does not know is answered 500, though no retry will ever help.
_NOT_TYPED = "failed to create typed patch object"


class ApiError(Exception):
    """The server answered and refused. `status` is HTTP's; `reason` is the API's, such as AlreadyExists."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


def unavailable(error: ApiError) -> Unavailable:
    return Unavailable(str(error))


@dataclass(frozen=True, slots=True)
class Credentials:
    server: str
    ca_path: str | None
    insecure: bool
    certificate_path: str | None
    key_path: str | None
    scheme: str | None
    token: str | None = field(repr=False)


class KubeClient:
    """Safe for many coroutines of one event loop. Close it, or use it as an async context manager."""

    def __init__(self, configuration: Configuration, user_agent: str = "poolwright") -> None:
        self._configuration = configuration
        self._api = ApiClient(configuration)
        self._api.user_agent = user_agent

    @classmethod
    async def connect(
        cls, kubeconfig: str | None = None, context: str | None = None, user_agent: str = "poolwright"
    ) -> "KubeClient":
        """In-cluster credentials inside a pod unless a kubeconfig is named; else KUBECONFIG or the default file.

        Reads files only; the first request opens a connection. Raises Unavailable when there is nothing to read.
        """
        configuration = Configuration()
        configuration.connection_pool_maxsize = 32
        try:
            if kubeconfig is None and context is None:
                with suppress(ConfigException):
                    config.load_incluster_config(client_configuration=configuration)
                    return cls(configuration, user_agent)
            await config.load_kube_config(
                config_file=kubeconfig, context=context, client_configuration=configuration, persist_config=False
            )
        except (ConfigException, OSError) as error:
            raise Unavailable(f"no Kubernetes credentials: {error}") from error
        except (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError) as error:
            # The library reads a file as if it were sound; what breaks it is in the file.
            named = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
            text = " ".join(str(error).split())
            raise Unavailable(f"no Kubernetes credentials: {named} is no kubeconfig: {text}") from error
        return cls(configuration, user_agent)

    @property
    def server(self) -> str:
        return str(self._configuration.host)

    async def credentials(self) -> "Credentials":
        """What this connection presents now, for a library that opens connections of its own."""
        configuration = self._configuration
        header = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization") or ""
        scheme, _, token = header.partition(" ")
        return Credentials(
            server=self.server,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            certificate_path=configuration.cert_file,
            key_path=configuration.key_file,
            scheme=scheme or None,
            token=token or None,
        )

    async def close(self) -> None:
        await self._api.close()

    async def __aenter__(self) -> "KubeClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def serves(self, resource: Resource) -> bool:
        """Whether the API server knows the kind now."""
        path = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
        try:
            known = await self._call("GET", path)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(kind.get("name") == resource.plural for kind in known.get("resources") or ())

    # One object.

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest | None:
        """None when there is none. Raises ApiError or Unavailable, as every call here."""
        try:
            return await self._call("GET", resource.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def create(self, resource: Resource, namespace: str | None, manifest: Manifest) -> Manifest:
        return await self._call("POST", resource.path(namespace), body=manifest)

    async def replace(self, resource: Resource, namespace: str | None, name: str, manifest: Manifest) -> Manifest:
        """Optimistic where the manifest carries a resourceVersion: 409 when another writer was first."""
        return await self._call("PUT", resource.path(namespace, name), body=manifest)

    async def apply(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        manifest: Mapping[str, Any],
        *,
        field_manager: str,
        force: bool = True,
        subresource: str | None = None,
        dry_run: bool = False,
    ) -> Manifest:
        """Server-side apply; unknown fields are refused, not dropped."""
        query = {"fieldManager": field_manager, "fieldValidation": "Strict"}
        if force:
            query["force"] = "true"
        if dry_run:
            query["dryRun"] = "All"
        return await self._call(
            "PATCH", resource.path(namespace, name, subresource), query=query, body=manifest, content_type=APPLY
        )

    async def json_patch(
        self, resource: Resource, namespace: str | None, name: str, operations: Operations
    ) -> Manifest:
        return await self._call("PATCH", resource.path(namespace, name), body=operations, content_type=JSON_PATCH)

    async def delete(self, resource: Resource, namespace: str | None, name: str, uid: str | None = None) -> None:
        """Deletes in the background, only that uid where one is given; an object already gone is no error."""
        options: Manifest = {"propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            await self._call("DELETE", resource.path(namespace, name), body=options)
        except ApiError as error:
            if error.status != 404:
                raise

    # Many objects.

    async def list(self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = "") -> Manifests:
        items, _ = await self._list(resource, namespace, _selectors(labels, fields))
        return items

    async def _list(
        self, resource: Resource, namespace: str | None, selectors: dict[str, str]
    ) -> tuple[Manifests, str]:
        """All pages of one snapshot and its resource version. A token that expired half-way starts over once."""
        for attempt in (1, 2):
            items: Manifests = []
            query = {**selectors, "limit": str(PAGE_SIZE)}
            try:
                while True:
                    page = await self._call("GET", resource.path(namespace), query=query)
                    items += page.get("items") or []
                    meta = page["metadata"]
                    if not meta.get("continue"):
                        return items, str(meta["resourceVersion"])
                    query["continue"] = meta["continue"]
            except ApiError as error:
                if error.status != 410 or attempt == 2:
                    raise
        raise AssertionError("unreachable")

    async def watch_set(
        self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> AsyncGenerator[dict[str, Manifest], None]:
        """The whole set by uid, first as it is and then after each change; ends only when closed.

        A slow consumer sees fewer, later sets. During an outage nothing is yielded. An expired version (410, also as an
        ERROR object inside a stream that answered 200) leads to one new list, from which the set is rebuilt.
        """
        current: dict[str, Manifest] = {}
        changed = asyncio.Event()
        selectors = _selectors(labels, fields)
        pump = asyncio.create_task(self._pump(resource, namespace, selectors, current, changed))
        try:
            while True:
                waiter = asyncio.create_task(changed.wait())
                try:
                    await asyncio.wait({waiter, pump}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiter.cancel()
                if pump.done():
                    pump.result()  # raises what broke it; the pump never ends by itself
                changed.clear()
                yield dict(current)
        finally:
            pump.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await pump

    async def _pump(
        self,
        resource: Resource,
        namespace: str | None,
        selectors: dict[str, str],
        current: dict[str, Manifest],
        changed: asyncio.Event,
    ) -> None:
        version: str | None = None
        failures = 0
        while True:
            try:
                if version is None:
                    items, version = await self._list(resource, namespace, selectors)
                    current.clear()
                    current.update((item["metadata"]["uid"], item) for item in items)
                    changed.set()
                async with aclosing(self._stream(resource, namespace, selectors, version)) as stream:
                    async for kind, item in stream:
                        failures = 0
                        version = str(item["metadata"]["resourceVersion"])
                        if kind == "BOOKMARK":
                            continue
                        if kind == "DELETED":
                            current.pop(item["metadata"]["uid"], None)
                        else:
                            current[item["metadata"]["uid"]] = item
                        changed.set()
                pause = random.uniform(
                    0.05, 0.2
                )  # a watch that ended by itself; also bounds a server that ends at once
            except ApiError as error:
                if error.status == 410:
                    version = None
                failures += 1
                pause = backoff_seconds(failures)
                log.info("Watch of %s was interrupted retry_in=%.1fs error=%s", resource.plural, pause, error)
            except Unavailable as error:
                failures += 1
                pause = backoff_seconds(failures)
                log.info("Watch of %s was interrupted retry_in=%.1fs error=%s", resource.plural, pause, error)
            await asyncio.sleep(pause)

    async def _stream(
        self, resource: Resource, namespace: str | None, selectors: dict[str, str], version: str
    ) -> AsyncGenerator[tuple[str, Manifest], None]:
        """(type, object) of one watch request. An ERROR object is raised as ApiError with its code."""
        query = {
            **selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS + random.randrange(60)),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_SILENCE_SECONDS)
        try:
            response = await self._send("GET", resource.path(namespace), query, None, _JSON, timeout)
            try:
                if response.status >= 300:
                    raise _error(response.status, await response.read())
                buffer = bytearray()
                async for chunk in response.content.iter_any():
                    buffer += chunk
                    *lines, rest = buffer.split(b"\n")
                    buffer = rest
                    for line in lines:
                        if not line.strip():
                            continue
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            status = event["object"]
                            raise ApiError(
                                int(status.get("code") or 500),
                                str(status.get("reason") or "Unknown"),
                                str(status.get("message") or ""),
                            )
                        yield event["type"], event["object"]
            finally:
                response.close()
        except (aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError) as error:
            raise Unavailable(f"watch of {resource.plural}: {_describe(error)}") from error

    # The wire.

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = _JSON,
    ) -> Manifest:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + RETRY_BUDGET_SECONDS
        attempt = 0
        while True:
            attempt += 1
            try:
                response = await self._send(method, path, query or {}, body, content_type, timeout)
                try:
                    data = await response.read()
                finally:
                    response.release()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Unavailable(f"{method} {path}: {_describe(error)}") from error
            if response.status < 300:
                result: Manifest = json.loads(data)
                return result
            retry_after = response.headers.get("Retry-After")
            if response.status == 429 or (response.status == 503 and retry_after is not None):
                pause = _retry_after_seconds(retry_after, attempt)
                if loop.time() + pause < give_up:
                    await asyncio.sleep(pause)
                    continue
            refusal = _error(response.status, data)
            if refusal.status >= 500 or refusal.status == 429:
                raise Unavailable(f"{method} {path}: {refusal}")
            raise refusal

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: object,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Through the official client for its credentials and TLS; the token is read again before it expires."""
        headers = {"Accept": _JSON, "Content-Type": content_type}
        try:
            prepared = await self._api.param_serialize(
                method, path, header_params=headers, auth_settings=["BearerToken"]
            )
        except (ConfigException, ssl.SSLError) as error:
            raise Unavailable(f"credentials: {error}") from error
        url, send_headers = prepared[1], prepared[2]
        if query:
            url += "?" + urlencode(query)
        answer = await self._api.call_api(method, url, send_headers, body, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        return response


def backoff_seconds(failures: int) -> float:
    """Doubling from a quarter second to the cap, with jitter so that many watchers do not return together."""
    return float(min(BACKOFF_CAP_SECONDS, BACKOFF_FIRST_SECONDS * 2 ** min(failures - 1, 10)) * random.uniform(0.5, 1))


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {k: v for k, v in (("labelSelector", labels), ("fieldSelector", fields)) if v}


def _retry_after_seconds(header: str | None, attempt: int) -> float:
    try:
        return max(0.1, float(header)) if header is not None else backoff_seconds(attempt)
    except ValueError:
        return backoff_seconds(attempt)


def _error(status: int, data: bytes) -> ApiError:
    try:
        body = json.loads(data)
        reason, message = str(body.get("reason") or "Unknown"), str(body.get("message") or "")
    except (ValueError, AttributeError):
        return ApiError(status, "Unknown", data[:200].decode(errors="replace"))
    if status == 500 and message.startswith(_NOT_TYPED):
        return ApiError(400, "BadRequest", message)
    return ApiError(status, reason, message)


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
