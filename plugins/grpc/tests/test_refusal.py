"""A refused gRPC call does not keep its message: gRPC keeps the exception that ended it."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import grpc
import pytest

from anychip_grpc import answering
from anychip_grpc.answering import Method
from anychip_grpc.call import RpcContext
from anychip_grpc.messages import METHODS
from anychip_grpc.relay import address_in
from app.errors import ServiceError
from app.ingress import context


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
    calls = SimpleNamespace(begin=lambda _: None)
    method = Method(len, METHODS["ModelInfer"], Receives(), calls, ingress=ingress, bind="public")
    with contextlib.suppress(AbortError):
        await method.handler.stream_unary(None, call)
    assert call.ended
    assert seen[0]() is None


async def test_a_client_that_is_gone_when_it_is_refused_is_no_error_of_ours():
    call = Call(grpc.aio.InternalError("Failed grpc_call_start_batch"))
    await answering.refuse(RpcContext(LINK, call, "/"), ServiceError("INVALID_REQUEST", "no"))
    assert call.ended


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("unix-abstract:0a1b/127.0.0.1", "127.0.0.1"),
        ("unix-abstract:0a1b/2001:db8::1", "2001:db8::1"),
        ("unix-abstract:0a1b/fe80::1%25eth0", "fe80::1%eth0"),
        ("unix:", ""),
    ],
)
def test_a_call_says_where_its_client_is(peer, address):
    assert address_in(peer) == address
