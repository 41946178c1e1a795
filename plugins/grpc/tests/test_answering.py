"""Frame of each call: messages come in turn, and a refused one is not kept with the exception that ended its call."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from types import SimpleNamespace

import grpc
import pytest

from anychip_grpc import answering
from anychip_grpc.answering import Method, Receiver
from anychip_grpc.messages import METHODS
from anychip_grpc.methods import RpcContext
from app.errors import ServiceError
from app.ingress import context
from app.ingress.budget import Budget
from app.ingress.converter import Converter
from tests.support.doubles import turns

MB = 1 << 20


class Message:
    """A gRPC call's one message, which comes when the test says so."""

    open = 0

    def __init__(self):
        self.asked = asyncio.Event()
        self.comes = asyncio.get_running_loop().create_future()

    def __aiter__(self):
        return self

    async def __anext__(self):
        Message.open += 1
        self.asked.set()
        try:
            return await self.comes
        finally:
            Message.open -= 1


@pytest.fixture
def receiver():
    Message.open = 0
    return Receiver(20 * MB, Converter(), Budget(10, "calls"), Budget(100 * MB, "bytes"))


async def test_large_messages_come_one_after_the_other(receiver, monkeypatch):
    monkeypatch.setattr(answering, "_TURN_S", 1000)
    messages = [Message() for _ in range(5)]
    reading = [asyncio.create_task(receiver._in_turn(each)) for each in messages]
    for message in messages:
        await message.asked.wait()
        await turns()
        assert Message.open == 1
        message.comes.set_result(bytes(2 * MB))
    assert [len(data) for data in await asyncio.gather(*reading)] == [2 * MB] * 5


async def test_who_sends_nothing_holds_nobody_up_for_long(receiver):
    silent, other = Message(), Message()
    waiting = asyncio.create_task(receiver._in_turn(silent))
    await silent.asked.wait()
    other.comes.set_result(b"x")
    assert await receiver._in_turn(other) == b"x"
    assert not silent.comes.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not receiver._turn.locked()


async def test_small_messages_wait_for_nobody(receiver, monkeypatch):
    monkeypatch.setattr(answering, "_TURN_S", 1000)
    for _ in range(20):  # Until it is known that messages are small.
        small = Message()
        small.comes.set_result(b"x")
        await receiver._in_turn(small)
    messages = [Message() for _ in range(5)]
    reading = [asyncio.create_task(receiver._in_turn(each)) for each in messages]
    await turns()
    assert Message.open == 5
    for message in messages:
        message.comes.set_result(b"x")
    await asyncio.gather(*reading)


class Content:
    """Empty content of a message."""


class AbortError(Exception):
    """Error like gRPC's: `abort` raises it and the call keeps it."""


class Call:
    """Double of a call: it keeps what `abort` raises."""

    def __init__(self, raises):
        self.ended, self.raises = False, raises

    async def abort(self, *_):
        self.ended = True
        raise self.raises

    def invocation_metadata(self):
        return ()

    def peer(self):
        return "unix-abstract:0a1b/127.0.0.1"


LINK = SimpleNamespace(
    tracing=None,
    settings=SimpleNamespace(log_requests=False),
    metrics=SimpleNamespace(
        clients=SimpleNamespace(count=lambda *_, **__: None),
        requests=SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=lambda: None)),
    ),
)


@pytest.mark.parametrize("mistake", [lambda: ServiceError("INVALID_REQUEST", "no"), lambda: ValueError("a fault")])
async def test_what_a_refused_call_held_is_let_go(monkeypatch, mistake):
    seen = []

    class Receives:
        def leases(self, _):
            calls = contextlib.nullcontext(SimpleNamespace(take=lambda _: None))
            return calls, contextlib.nullcontext()

        async def one(self, *_):
            content = Content()
            seen.append(weakref.ref(content))
            try:
                raise KeyError
            except KeyError:
                raise mistake() from None

    monkeypatch.setattr(context.log, "error", lambda *_, **__: None)  # pytest would keep what is logged.
    call = Call(AbortError())
    ingress = SimpleNamespace(link=LINK, access=SimpleNamespace(admit=lambda *_: context.UNKNOWN))
    relay = SimpleNamespace(begin=lambda _: None)
    method = Method(len, METHODS["ModelInfer"], Receives(), relay, ingress=ingress, bind="public")
    with contextlib.suppress(AbortError):
        await method.handler.stream_unary(None, call)
    assert call.ended
    assert seen[0]() is None


async def test_a_client_that_is_gone_when_it_is_refused_is_no_error_of_ours():
    call = Call(grpc.aio.InternalError("Failed grpc_call_start_batch"))
    await answering.refuse(RpcContext(LINK, call, "/"), ServiceError("INVALID_REQUEST", "no"))
    assert call.ended
