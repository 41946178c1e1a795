"""The page at `/` and its files, read once and answered from memory: no path that a client names is read."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response

from app.errors import ServiceError
from app.link import Link

PREFIX = "/playground"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "jpg": "image/jpeg",
}
_COMPRESSED = ("html", "css", "js", "svg")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Policy of the page: nothing from another host, nothing inline. `blob:` is a dropped file or a camera's picture."""

_HEADERS = {
    "content-security-policy": POLICY,
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Checked again each time, and mostly answered with 304: no browser has half of an old page after an update.
    "cache-control": "no-cache",
    "vary": "accept, accept-encoding",
}


@dataclass(frozen=True)
class PageFile:
    """A file in the form in which it is sent. `compressed` is gzip, None if that makes it no smaller."""

    content_type: str
    content: bytes
    compressed: bytes | None
    etag: str

    def response(self, request: Request) -> Response:
        """Answer a request for the file: compressed if the client takes that, or 304."""
        headers = {**_HEADERS, "etag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        content = self.content
        if self.compressed is not None and "gzip" in request.headers.get("accept-encoding", ""):
            content = self.compressed
            headers["content-encoding"] = "gzip"
        return Response(content, headers={**headers, "content-type": self.content_type})


def page_files() -> dict[str, PageFile]:
    """Read every file of the page, by its name, and the sample images as `samples/NAME`."""
    found = {file.name: file.read_bytes() for file in (files("app.http.playground") / "static").iterdir()}
    for file in (files("models.sample") / "images").iterdir():
        if file.name.endswith(".jpg"):
            found[f"samples/{file.name}"] = file.read_bytes()
    pages = {}
    for name, content in found.items():
        suffix = name.rpartition(".")[2]
        # The time stamp is left out, so that every process of a service sends the same bytes.
        compressed = gzip.compress(content, 9, mtime=0) if suffix in _COMPRESSED else None
        pages[name] = PageFile(_TYPES[suffix], content, compressed, f'"{hashlib.sha256(content).hexdigest()[:20]}"')
    return pages


def mount_playground(app: FastAPI) -> None:
    """Add the files of the page to an application; app.http.routes.status answers with the page at `/`."""
    known = page_files()
    app.state.page = known["index.html"]
    samples = sorted(name.partition("/")[2] for name in known if name.startswith("samples/"))
    router = APIRouter(include_in_schema=False)

    @router.get(PREFIX + "/facts.json")
    async def facts(request: Request) -> dict[str, Any]:
        """Return the facts about the service that the page needs and no other route tells."""
        link: Link = request.app.state.link
        return {
            "samples": [{"name": name, "task": name.partition("_")[0]} for name in samples],
            "known": {
                name: served.model.labels for name, served in link.models.items() if served.model.weights == "sample"
            },
            "max_body_bytes": link.settings.max_body_bytes,
            "max_image_pixels": link.settings.max_image_pixels,
            "max_images": link.settings.max_images,
        }

    @router.get(PREFIX + "/{name:path}")
    async def file(request: Request, name: str) -> Response:
        if name not in known:
            raise ServiceError("NOT_FOUND", f"the playground has no file {name!r}")
        return known[name].response(request)

    app.include_router(router)
