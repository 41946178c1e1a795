"""Calls from their first byte to the last byte of their answer: the count for each client, refused ones included.

Owns: these counts, and the budget held for an answer until its client has read it. Must not know methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator

from anychip_grpc.call import CallContext
from anychip_grpc.relay import Connection, Relay
from app.errors import ServiceError
from app.ingress.budget import Budget, Lease

_FEW = 16


class Calls:
    """Calls of one server."""

    def __init__(self, relay: Relay, most: int) -> None:
        """Set the limit: `most` calls, and as many again that are being refused."""
        self._relay = relay
        self._budget = Budget(2 * most, "calls", least=min(_FEW, most // 4), spare=most // 8)

    def begin(self, call: CallContext) -> Connection:
        """Count a call until its task ends, when its answer has been read. Raises CancelledError: its client has gone.

        A client over its limit does not read its refusals either, so it loses its connection.
        """
        connection = self._relay.of(call)
        if connection is None:
            raise asyncio.CancelledError
        client = connection.client
        try:
            self._budget.take(client, 1)
        except ServiceError:
            connection.abort()
            raise asyncio.CancelledError from None
        _at_end(functools.partial(self._budget.give, client, 1))
        return connection


def hold_answer(connection: Connection, size: int, lease: Lease, held: contextlib.ExitStack) -> None:
    """Hold the bytes of a call's only answer, and all that is held already, until its client has read it.

    The bytes of the request are given back. Raises QUEUE_FULL.
    """
    lease.give(lease.held_bytes)
    lease.take(_room(size, lease))
    end = held.pop_all()
    end.callback(connection.answer_begins(size))
    _at_end(end.close)


@contextlib.contextmanager
def holding(connection: Connection, size: int, lease: Lease) -> Iterator[None]:
    """Hold the bytes of one of a stream's answers while it is written. Raises QUEUE_FULL."""
    room = _room(size, lease)
    lease.take(room)
    ends = connection.answer_begins(size)
    try:
        yield
    finally:
        ends()
        lease.give(room)


def _room(size: int, lease: Lease) -> int:
    """Return the bytes of the answer and gRPC's copy of it; if that exceeds one client's limit, the limit."""
    return max(size, min(2 * size, lease.most))


def _at_end(function: Callable[[], None]) -> None:
    """Call a function when the call's task ends: gRPC sends an only answer after the method has returned it.

    The call's own callbacks would keep the call, and its part of the C core, until garbage is collected.
    """
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: function())
