"""A refused gRPC call does not keep its message: gRPC keeps the exception that ended it."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import pytest

from app.errors import ServiceError
from app.grpc import server


class Content:
    """What a message holds."""


class AbortError(Exception):
    """As gRPC's: raised by `abort`, and kept by the call."""


class Call:
    def __init__(self):
        self.kept = None

    async def abort(self, *_):
        self.kept = AbortError()
        raise self.kept

    def invocation_metadata(self):
        return ()


@contextlib.contextmanager
def admitted(_):
    yield SimpleNamespace(caller=None, about=lambda _: None)


@pytest.mark.parametrize("mistake", [lambda: ServiceError("INVALID_REQUEST", "no"), lambda: ValueError("a fault")])
async def test_what_a_refused_call_held_is_let_go(monkeypatch, mistake):
    seen = []

    class Receives:
        def shares(self, _):
            calls = contextlib.nullcontext()
            calls.take = lambda _: None
            return calls, contextlib.nullcontext()

        async def one(self, *_):
            content = Content()
            seen.append(weakref.ref(content))
            try:
                raise KeyError
            except KeyError:
                raise mistake() from None

    monkeypatch.setattr(server.log, "exception", lambda *_: None)  # pytest would keep what is logged.
    call = Call()
    answer = server._answering(len, Receives(), SimpleNamespace(recorded=admitted), object)
    with contextlib.suppress(AbortError):
        await answer(None, call)
    assert call.kept is not None
    assert seen[0]() is None
