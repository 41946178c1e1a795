"""Receiving of messages: within the budgets that HTTP has as well, and parsed only after a check of their parts.

Owns: the limits on one client's calls and bytes here, and refusals before a method sees a message. Must not know the
meaning of a message.

gRPC reads a message when asked for it, and then all of it. So room for the largest one is taken first, and the excess
is given back when the message is there. A stream keeps that room: its next message may begin at any time.

gRPC copies a message in the event loop once all of it is there: 10 to 30 ms for 18 MB. While messages are large, calls
ask for theirs one after the other, so that the loop does other work between two copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import DecodeError

from anychip_grpc.call import Message
from anychip_grpc.contents import RawRequest, parsed, raw_form, split
from app.access.access import Caller
from app.errors import ServiceError, invalid_request, without_frames
from app.ingress.budget import Budget, Lease
from app.ingress.converter import Converter
from app.ingress.interrupt import interrupted_at
from app.protocols import wire

OVERHEAD_BYTES = 64 * 1024
"""Bytes of a message beyond the limit max_body_bytes."""
_INLINE_BYTES = 64 * 1024
"""Largest request without its raw tensors that the event loop reads; larger ones are read in another process."""
_RECEIVE_S = 30.0
_LARGE_BYTES = 1024 * 1024
_FORGOTTEN = 0.2
"""Share of its size by which a large message counts less after each later message."""
_TURN_S = 0.02
"""Longest time a call waits alone for its message; after that other calls wait, too."""


class Receiver:
    """Receiver of one server's methods that draw on the same budgets."""

    def __init__(self, largest_bytes: int, converter: Converter, calls: Budget, bodies: Budget) -> None:
        """Keep the budgets. `largest_bytes`: of a message, gRPC's own limit."""
        self._largest_bytes, self._converter, self._calls, self._bodies = largest_bytes, converter, calls, bodies
        self._turn = asyncio.Semaphore(1)
        self._large_of_late_bytes = float(self._largest_bytes)  # The first message may be large.

    def leases(self, caller: Caller) -> tuple[Lease, Lease]:
        """Return the caller's leases of calls and of bytes, as context managers."""
        return self._calls.lease(caller.name), self._bodies.lease(caller.name)

    async def one(self, requests: AsyncIterator[bytes], lease: Lease, kind: Any) -> Message:
        """Receive the only message of a call. Raises ServiceError."""
        with interrupted_at(time.monotonic() + _RECEIVE_S):
            # gRPC's own buffers, and the message made of them; if that exceeds one client's limit, the limit.
            room = min(2 * self._largest_bytes, self._bodies.most_for_one)
            await lease.wait(room)
            data = await self._in_turn(requests)
            if data is None:
                raise invalid_request("the call has no message")
            if len(data) <= room:
                lease.give(room - len(data))
            else:
                lease.take(len(data) - room)
        return await self._parsed(data, kind)

    async def _in_turn(self, requests: AsyncIterator[bytes]) -> bytes | None:
        """Return the message, or None if there is none."""
        with contextlib.ExitStack() as turn:
            if self._large_of_late_bytes > _LARGE_BYTES:
                await self._turn.acquire()
                turn.callback(self._turn.release)
                timer = asyncio.get_running_loop().call_later(_TURN_S, turn.close)
                turn.callback(timer.cancel)
            data = await anext(requests, None)
        forgetting = (1 - _FORGOTTEN) * self._large_of_late_bytes
        self._large_of_late_bytes = max(forgetting, len(data or b""))
        return data

    async def each(
        self, requests: AsyncIterator[bytes], lease: Lease, kind: Any
    ) -> AsyncIterator[Message | ServiceError]:
        """Yield the messages of a stream, or an error for each unreadable one. Raises QUEUE_FULL at once."""
        lease.take(min(self._largest_bytes, self._bodies.most_for_one))
        async for data in requests:
            try:
                request = await self._parsed(data, kind)
            except ServiceError as error:
                request = without_frames(error)
            del data
            yield request

    async def _parsed(self, data: bytes, kind: Any) -> Message:
        if kind.DESCRIPTOR.name == "ModelInferRequest":
            return await self._infer_request(data)
        if len(data) > _INLINE_BYTES:
            raise invalid_request(f"the message is larger than the {_INLINE_BYTES} bytes that are read of its kind")
        try:
            return kind.FromString(data)
        except DecodeError:
            raise invalid_request("the message cannot be read") from None

    async def _infer_request(self, data: wire.Buffer) -> RawRequest:
        rest, raw = split(data)
        if len(rest) > _INLINE_BYTES:
            rest, raw = split(await self._converter.convert(raw_form, 0, data))
        if len(rest) > _INLINE_BYTES:
            raise invalid_request(f"without its tensors the request is larger than {_INLINE_BYTES} bytes")
        return parsed(rest, raw)
