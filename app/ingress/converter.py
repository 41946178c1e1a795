"""Converter processes: large JSON and protobuf requests into bytes, and large answers into JSON.

    loop ─► function, argument, payload ─► child (app.converter_main) ─► converted bytes, or the client's mistake

Owns: these processes, at most `_PROCESSES` of them, started when first needed. Must not know what is converted. Threads
do not suffice: making Python objects holds the interpreter, and so the event loop. If a child dies, its one request
fails with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable

import numpy as np
import orjson

from anychip_base.interpreter import python_command
from app.errors import ServiceError, internal_error, invalid_request, shutting_down
from app.processes.forking import is_stopped
from app.protocols import wire

Conversion = Callable[[wire.Buffer, int], wire.Buffer]
"""Function of a payload and an argument, in a module that imports nothing large. Raises ServiceError."""
REQUEST = struct.Struct("<IIQ")
"""Header of a request: bytes of the function's name, argument, bytes of the payload; name and payload follow."""
ANSWER = struct.Struct("<BxxxxxxxQ")
"""Header of an answer: flags, and the number of bytes that follow; an error's are JSON."""
FAILED, LEAVING = 1, 2

_PROCESSES = 2
_SOCKET_BYTES = 1 << 20
_LOOK_INTERVAL_S = 1.0
_STOPPED_LOOKS = 4
"""Most checks in a row that find a child stopped before it is killed."""
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # The C library raises both by itself once a body was large, and then keeps what the next ones leave.
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}
_KILLED = 2
"""Number of children killed one after the other for which the request is to blame."""
_MAIN = "from app.converter_main import main; main()"


class Converter:
    """Converter with its child processes; made inside a running event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_PROCESSES)
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()
        self._closed = False

    async def convert(self, conversion: Conversion, argument: int, payload: wire.Buffer) -> memoryview:
        """Return the converted payload. Raises the conversion's ServiceError; cancelled, it ends the child."""
        async with self._free:
            child, killed = await self._one(), 0
            while (answered := await self._asked(child, conversion, argument, payload)) is None:
                # A person or a lack of memory killed it. The request may be innocent: try again. Whoever stopped a
                # child may have stopped those that wait as well, so the next one is new.
                killed += not child.was_stopped
                if child.process.returncode not in (-signal.SIGKILL, -signal.SIGTERM) or killed == _KILLED:
                    raise invalid_request("the request is too complex to be read here")
                child = self._new()
        flags, answer = answered
        if not flags & FAILED:
            return memoryview(answer)
        error = orjson.loads(answer)
        raise internal_error() if error["code"] == "INTERNAL" else ServiceError(error["code"], error["message"])

    async def _asked(
        self, child: _Child, conversion: Conversion, argument: int, payload: wire.Buffer
    ) -> tuple[int, memoryview] | None:
        try:
            flags, answer = await child.ask(conversion, argument, payload)
        except (OSError, EOFError):
            await self._end(child)
            return None
        except BaseException:
            await self._end(child)
            raise
        if flags & LEAVING:
            await self._end(child)
        else:
            self._idle.append(child)
        return flags, answer

    async def close(self) -> None:
        """End every child. Idempotent."""
        self._closed = True
        for child in list(self._children):
            await self._end(child)
        self._idle.clear()

    async def _one(self) -> _Child:
        while self._idle:
            child = self._idle.pop()
            if child.process.poll() is None:
                return child
            await self._end(child)
        return self._new()

    def _new(self) -> _Child:
        if self._closed:
            raise shutting_down()
        child = _Child()
        self._children.add(child)
        return child

    async def _end(self, child: _Child) -> None:
        self._children.discard(child)
        await child.end()


class _Child:
    """Child process, and our end of the socket that is its standard input."""

    def __init__(self) -> None:
        self.was_stopped = False
        """True if it was found stopped, and killed for that."""
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        for end in (self._connection, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        with theirs:
            # Not asyncio's: uvloop forks, which copies the page tables of a large process while everything waits.
            self.process = subprocess.Popen(
                python_command("-c", _MAIN),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", ""), **_ENVIRONMENT},
            )

    async def ask(self, conversion: Conversion, argument: int, payload: wire.Buffer) -> tuple[int, memoryview]:
        """Return flags and answer. Raises OSError or EOFError when the child has died, or was stopped (SIGSTOP)."""
        answer = asyncio.ensure_future(self._ask(conversion, argument, payload))
        try:
            looks = 0
            while not answer.done():
                await asyncio.wait((answer,), timeout=_LOOK_INTERVAL_S)
                # In a row, as a pause of the whole service (docker pause) ends for the two of us at once.
                looks = looks + 1 if is_stopped(self.process.pid) else 0
                if looks == _STOPPED_LOOKS:
                    self.was_stopped = True
                    self.process.kill()
            return answer.result()
        finally:
            if not answer.done():
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)

    async def _ask(self, conversion: Conversion, argument: int, payload: wire.Buffer) -> tuple[int, memoryview]:
        loop = asyncio.get_running_loop()
        name = f"{conversion.__module__}:{conversion.__qualname__}".encode()
        await loop.sock_sendall(self._connection, REQUEST.pack(len(name), argument, len(payload)) + name)
        view = memoryview(payload)
        for start in range(0, len(view), _SOCKET_BYTES):
            await loop.sock_sendall(self._connection, view[start : start + _SOCKET_BYTES])
            await asyncio.sleep(0)  # To a child that reads as fast all would go in one call, as below.
        flags, size = ANSWER.unpack(await self._received(ANSWER.size))
        return flags, await self._received(size)

    async def _received(self, size: int) -> memoryview:
        received = view = np.empty(size, np.uint8).data  # Not zeroed: that takes 50 ms of this loop for 100 MB.
        loop = asyncio.get_running_loop()
        while view:
            count = await loop.sock_recv_into(self._connection, view[:_SOCKET_BYTES])
            if not count:
                raise EOFError
            view = view[count:]
            await asyncio.sleep(0)  # A child that writes as fast would keep this loop until all is there.
        return received

    async def end(self) -> None:
        self._connection.close()
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
