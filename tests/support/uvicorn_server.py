"""uvicorn in the test's own event loop, with one of our protocols for connections, and its clients, byte by byte."""

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


Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


async def read(reader: asyncio.StreamReader) -> Answer:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if line)
    return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def ask(port: int, *parts: bytes, answers: int = 1) -> list[Answer]:
    """Send these bytes on a connection; return so many answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(0)
        return [await read(reader) for _ in range(answers)]
    finally:
        writer.close()
