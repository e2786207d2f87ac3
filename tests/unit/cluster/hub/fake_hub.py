"""A hub on this machine, as `huggingface_hub` calls it: model info, trees, files, and weights behind a redirect."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_API = re.compile(r"/api/models/(\w[\w.-]*/[\w.-]+)(?:/(revision|tree)/([^/?]+))?(?:\?.*)?")
_FILE = re.compile(r"/(\w[\w.-]*/[\w.-]+)/resolve/([^/]+)/(.+)")


@dataclass
class FakeHub:
    """`repositories` have files by name, for each commit, the latest one last. `faults` answer a path that matches with
    a status and headers. `cuts` end a file's connection after so many more bytes, each once. `asked` is called with
    each request before its answer, `cut_at` with the byte of the file to which a cut answer has come."""

    url: str = ""
    repositories: dict[str, dict[str, Mapping[str, bytes]]] = field(default_factory=dict)
    faults: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    corrupts: bool = False
    requests: list[str] = field(default_factory=list)
    sent: int = 0  # bytes of weights
    asked: Callable[[str], None] = lambda request: None
    cut_at: Callable[[int], None] = lambda end: None

    def add(self, repository: str, files: Mapping[str, bytes]) -> str:
        """Adds a commit to main."""
        commits = self.repositories.setdefault(repository, {})
        commit = hashlib.sha1(f"{repository} {len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit

    def commit(self, repository: str, revision: str) -> str | None:
        commits = self.repositories.get(repository, {})
        return list(commits)[-1] if commits and revision == "main" else revision if revision in commits else None


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Requests,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


class _Requests(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        hub.requests.append(f"{self.command} {self.path}")
        hub.asked(hub.requests[-1])
        if fault := next((fault for pattern, fault in hub.faults.items() if re.search(pattern, self.path)), None):
            self._send(fault[0], headers=fault[1])
        elif self.path.startswith("/blobs/"):
            self._send_blob(self.path.removeprefix("/blobs/"))
        elif found := _API.fullmatch(self.path):
            self._send_api(found[1], found[2], found[3] or "main")
        elif found := _FILE.fullmatch(self.path):
            self._send_file(*found.groups())
        else:
            self._send(404)

    def _send_api(self, repository: str, kind: str | None, revision: str) -> None:
        if repository not in self.hub.repositories:
            return self._send(401, headers={"X-Error-Code": "RepoNotFound"})
        if (commit := self.hub.commit(repository, revision)) is None:
            return self._send(404, headers={"X-Error-Code": "RevisionNotFound"})
        files = self.hub.repositories[repository][commit]
        listed = [(name, {"size": len(data)}, _etag(name, data)) for name, data in files.items()]
        large = {name: {"lfs": size | {"oid": etag, "sha256": etag, "pointerSize": 1}} for name, size, etag in listed}
        tree = [
            {"type": "file", "path": name, "rfilename": name, "oid": etag, "blobId": etag, **size}
            | (large[name] if is_large(name) else {})
            for name, size, etag in listed
        ]
        content = tree if kind == "tree" else {"id": repository, "sha": commit, "siblings": tree}
        return self._send(200, json.dumps(content).encode())

    def _send_file(self, repository: str, revision: str, name: str) -> None:
        commit = self.hub.commit(repository, revision)
        data = self.hub.repositories.get(repository, {}).get(commit or "", {}).get(name)
        if data is None or commit is None:
            return self._send(404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(name, data)}"'}
        if not is_large(name):
            return self._send(200, data, headers)
        linked = {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(data))}
        return self._send(
            302,
            headers=headers
            | linked
            | {"Location": f"{self.hub.url.replace('127.0.0.1', 'localhost')}/blobs/{_etag(name, data)}"},
        )

    def _send_blob(self, digest: str) -> None:
        contents = (
            data
            for commits in self.hub.repositories.values()
            for files in commits.values()
            for name, data in files.items()
            if _etag(name, data) == digest
        )
        data, start = next(contents), 0
        if self.hub.corrupts:
            data = bytes(len(data))
        if ranged := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(ranged[1])
            if start >= len(data):
                return self._send(416)
        status, rest = (206 if ranged else 200), data[start:]
        span = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if ranged else {}
        cut = min(self.hub.cuts.pop(0), len(rest)) if self.hub.cuts else len(rest) + 1
        self.hub.sent += min(cut, len(rest))
        self._send(status, rest[:cut], span | {"Content-Length": str(len(rest))})
        if cut <= len(rest):
            self.hub.cut_at(start + cut)
            self.close_connection = cut < len(rest)
        return None

    def _send(self, status: int, content: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def _etag(name: str, data: bytes) -> str:
    if is_large(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
