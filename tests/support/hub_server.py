"""The few endpoints of the Hugging Face Hub that a download asks, on a local port: files of a folder as a repository.

    with serving_hub({"org/tiny": folder}) as hub:
        locate("org/tiny", endpoint=hub.url, cache=tmp_path)

What a test makes go wrong is a field of the hub.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`break_after`: how many bytes of a file are sent before the connection is cut, once per entry. `token`: what a
    gated repository asks for. `requests`: (method, path, range header) of each."""

    url: str
    repositories: Mapping[str, Path]
    gated: Mapping[str, str] = field(default_factory=dict)
    break_after: dict[str, list[int]] = field(default_factory=dict)
    status: int | None = None  # of every answer, where it is not None
    listed_sizes: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def fetched(self, file: str) -> list[str | None]:
        """The ranges asked for of that file."""
        return [part for method, path, part in self.requests if method == "GET" and path.endswith(f"/{file}")]


@contextmanager
def serving_hub(repositories: Mapping[str, Path]) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = False
    hub = Hub(f"http://127.0.0.1:{server.server_port}", repositories)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # a connection for each request: none is left open by a client

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def _serve(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("range")))
        if self.hub.status is not None:
            return self._send(self.hub.status, b"{}")
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repository, revision = (api[1], api[3]) if api else (file[1], file[2]) if file else ("", "")
        folder = self.hub.repositories.get(repository)
        if folder is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        token = self.hub.gated.get(repository)
        if token is not None and self.headers.get("authorization") != f"Bearer {token}":
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if revision not in (None, "main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if api:
            return self._send(200, json.dumps(self._described(repository, folder, api[2])).encode())
        assert file is not None
        return self._send_file(folder / file[3], file[3], body)

    def _described(self, repository: str, folder: Path, kind: str | None) -> object:
        files = sorted(f for f in folder.rglob("*") if f.is_file())
        entries = [(f.relative_to(folder).as_posix(), f) for f in files]
        if kind == "tree":
            return [{"type": "file", "path": name, "size": self._size(name, f), "oid": _etag(f)} for name, f in entries]
        siblings = [{"rfilename": name, "size": self._size(name, f), "blobId": _etag(f)} for name, f in entries]
        return {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}

    def _size(self, name: str, file: Path) -> int:
        return self.hub.listed_sizes.get(name, file.stat().st_size)

    def _send_file(self, file: Path, name: str, body: bool) -> None:
        if not file.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = file.read_bytes()
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        status, start = (206, int(asked[1])) if asked else (200, 0)
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cuts = self.hub.break_after.get(name)
        cut = cuts.pop(0) if body and cuts else None
        self._send(status, data[start:], headers, body, cut)

    def _send(
        self,
        status: int,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        body: bool = True,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data if cut is None else data[:cut])


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()  # noqa: S324
