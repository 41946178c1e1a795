"""A double of the Hugging Face Hub, of a bucket and of a file server: what huggingface_hub 2.4 and models.download ask.

From the library's own source: `/api/models/ORG/NAME[/revision/REV]?blobs=true` (hf_api.model_info),
`/ORG/NAME/resolve/COMMIT/FILE` (hf_hub_url), `X-Error-Code` and the statuses of utils/_http.hf_raise_for_status.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "c0ffee" * 6 + "abcd"
LARGE_BYTES = 1000
"""From this size on the double keeps a file with Git LFS."""


@dataclass
class Hub:
    """What it has and does. `files`: of the only repository; `others`: by path; `cuts`: where replies break off."""

    url: str = ""
    repository: str = "org/dogs"
    files: dict[str, bytes] = field(default_factory=dict)
    others: dict[str, bytes] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    commit: str = COMMIT
    token: str = ""
    gated: bool = False
    status: int = 200
    lies: bool = False  # sends another content than it lists
    cuts: list[int] = field(default_factory=list)
    says_length: bool = True
    asked: list[str] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)

    def downloads(self) -> list[str]:
        return [path.partition(f"/resolve/{self.commit}/")[2] for path in self.asked if "/resolve/" in path]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append(path)
        may = not self.token or request.headers.get("Authorization") == f"Bearer {self.token}"
        if self.status != 200:
            refuse(request, self.status)
        elif path in self.moved:
            request.send_response(302)
            request.send_header("Location", self.moved[path])
            request.send_header("Content-Length", "0")
            request.end_headers()
        elif path in self.others:
            self.send(request, self.others[path])
        elif path.startswith("/api/models/"):
            self._list(request, path.removeprefix("/api/models/"), may=may)
        elif self.gated and not may:
            refuse(request, 403, "GatedRepo")
        else:
            name = path.removeprefix(f"/{self.repository}/resolve/{self.commit}/")
            if name not in self.files:
                refuse(request, 404, "EntryNotFound")
            else:
                content = self.files[name]
                self.send(request, content[:-1] + b"?" if self.lies else content)

    def _list(self, request: BaseHTTPRequestHandler, path: str, *, may: bool) -> None:
        repository, _, revision = path.partition("/revision/")
        if repository != self.repository or (not may and not self.gated):
            refuse(request, 401, "RepoNotFound")
        elif revision not in ("", "main", "v1", self.commit):
            refuse(request, 404, "RevisionNotFound")
        else:
            siblings = []
            for name, content in self.files.items():
                git_sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                each = {"rfilename": name, "size": len(content), "blobId": git_sha1}
                if len(content) >= LARGE_BYTES:
                    sha256 = hashlib.sha256(content).hexdigest()
                    each["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 134}
                siblings.append(each)
            said = {"id": repository, "modelId": repository, "sha": self.commit, "siblings": siblings, "tags": []}
            say(request, json.dumps(said | {"private": False, "downloads": 0, "likes": 0}), "application/json")

    def send(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        asked = request.headers.get("Range")
        self.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start >= len(content) > 0:
            refuse(request, 416)
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.says_length:
            request.send_header("Content-Length", str(len(content) - start))
        request.send_header("X-Repo-Commit", self.commit)
        request.end_headers()
        request.wfile.write(content[start:][: self.cuts.pop(0) if self.cuts else None])


def pretend(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub, which reads its variables once, ask the double, and have its cache in a folder."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "secret-token")


def say(request: BaseHTTPRequestHandler, text: str, kind: str) -> None:
    request.send_response(200)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(text.encode())))
    request.end_headers()
    request.wfile.write(text.encode())


def refuse(request: BaseHTTPRequestHandler, status: int, code: str = "") -> None:
    request.send_response(status)
    if code:
        request.send_header("X-Error-Code", code)
    request.send_header("Content-Length", "0")
    request.end_headers()


class Answers(Protocol):
    """What `serving` runs; it tells it its address."""

    url: str

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""


AnyHub = TypeVar("AnyHub", bound=Answers)


@contextmanager
def serving(hub: AnyHub, certificate: tuple[Path, Path] | None = None) -> Iterator[AnyHub]:
    """Run a double on loopback. `certificate`: its file and that of its key, for https."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        hub.url = f"http{'s' if certificate else ''}://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
