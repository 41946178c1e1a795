"""Parts of every HTTP answer, whichever server writes it: its headers, and the body of an error.

Owns: the headers that each answer has besides its own. Must not know what a route does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import Response

from app.errors import ServiceError, error_body
from app.ingress.context import RequestContext
from app.ingress.ingress import Ingress
from app.link import Link

Header = tuple[bytes, bytes]
Content = tuple[bytes | memoryview, list[Header]]
"""A body, and the headers that describe it."""


def as_json(document: Any) -> Content:
    """Write a document as an answer's content."""
    return _of_json(orjson.dumps(document))


def _of_json(body: bytes) -> Content:
    return body, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]


async def as_large_json(ingress: Ingress, entries: Sequence[Any], before: bytes = b"", after: bytes = b"") -> Content:
    """Write a list as an answer's content, between `before` and `after`: 64 vectors or maps may take 90 MB of text.

    A thread writes each entry and joins them all: no piece holds the interpreter for long.
    """
    parts = [before, b"["]
    for each in entries:
        parts += [await ingress.offload(orjson.dumps, each), b","]
    parts[-1:] = [b"]", after]
    return _of_json(await ingress.offload(b"".join, parts))


def as_response(content: Content) -> Response:
    """Make the framework's response of a good answer."""
    body, headers = content
    response = Response(body)
    response.raw_headers[:] = headers
    return response


def error_content(error: ServiceError, context: RequestContext) -> Content:
    """Write the content of the answer that says what went wrong."""
    body, headers = as_json(error_body(error.code, error.message, context.request_id))
    headers += error.headers
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    return body, headers


def common_headers(link: Link, context: RequestContext) -> list[Header]:
    """Return the headers that every answer has. To be called when the answer begins, as its trace then says."""
    recorder = context.recorder
    if recorder.trace is not None:
        recorder.trace.describe(context.attributes())
    headers = [
        (b"x-request-id", context.request_id.encode()),
        (b"server-timing", recorder.timings().encode()),
    ]
    if context.traceparent:
        headers.append((b"traceparent", context.traceparent))
    if link.administration.draining:
        # The client's next request then comes on a new connection, which another service may accept.
        headers.append((b"connection", b"close"))
    return headers
