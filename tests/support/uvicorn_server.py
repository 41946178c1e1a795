"""uvicorn in the test's own event loop, with one of our protocols for connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import uvicorn


@contextlib.asynccontextmanager
async def listening(app: Any, protocol: type[Any], **settings: Any) -> AsyncIterator[tuple[int, uvicorn.Server]]:
    """Run a server; yield its port, and the server; uvloop's loop if that is installed, as in service."""
    config = uvicorn.Config(app, http=protocol, port=0, log_config=None, lifespan="off", **settings)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.wait((serving,), timeout=0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], server
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 30)
