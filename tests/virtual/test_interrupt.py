"""What ends a request from outside: its deadline, its client."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import pytest

from app import clock
from app.errors import ClientLeftError, ServiceError
from app.http.call import AsgiRequest
from app.ingress import context
from app.ingress.budget import Budget
from app.ingress.context import Interruption, RequestContext
from tests.support.doubles import turns


class Client:
    """What a server knows of a client: `receive` tells when it leaves."""

    def __init__(self):
        self.left = asyncio.Event()

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}


def watched(client, run, on_leave):
    return AsgiRequest({"headers": []}, client.receive).watched(run, on_leave)


def others():
    return asyncio.all_tasks() - {asyncio.current_task()}


LIMITS = {
    "it lasts longer": (0.01, 0, [], "DEADLINE_EXCEEDED"),
    "a body that stops, long before its deadline": (1000, 1_000_000, [1000], "REQUEST_TIMEOUT"),
    "a body that comes on and on too slowly": (1000, 1000, range(1, 1000), "REQUEST_TIMEOUT"),
    "a body that is there has its deadline": (0.05, 1_000_000, [1000, None], "DEADLINE_EXCEEDED"),
}
"""When the deadline is, the least rate, how much of a body has come every 5 ms, and with what the request ends."""


@pytest.mark.parametrize(("lasts_s", "least", "arrives", "code"), LIMITS.values(), ids=LIMITS)
async def test_what_ends_a_request(monkeypatch, lasts_s, least, arrives, code):
    monkeypatch.setattr(context, "_FREE_S", 0.01)
    monkeypatch.setattr(context, "STOOD_STILL_S", 0.01)

    async def work():
        with Interruption(deadline_s=clock.monotonic() + lasts_s) as limit:
            limit.least_bytes_per_s = least
            for size in arrives:
                if size is None:
                    limit.arrived_wholly()
                else:
                    limit.arrived(size)
                    await asyncio.sleep(0.005)
            await asyncio.Event().wait()

    with pytest.raises(ServiceError) as raised:
        await work()
    assert raised.value.code == code
    await asyncio.sleep(0)  # The task itself is not cancelled any more.


async def test_a_body_that_could_not_be_read_while_the_server_was_stopped_is_not_too_slow(monkeypatch):
    monkeypatch.setattr(context, "_FREE_S", 0.05)
    with Interruption(deadline_s=clock.monotonic() + 1000) as limit:
        limit.least_bytes_per_s = 1_000_000
        limit.arrived(1000)
        asyncio.get_running_loop().stand_still(0.4)  # As SIGSTOP and SIGCONT would.
        await asyncio.sleep(0.01)
        limit.arrived_wholly()


async def test_the_result_comes_and_nobody_watches_any_more():
    client = Client()
    left = []
    assert await watched(client, partial(asyncio.sleep, 0, "done"), lambda: left.append(1)) == "done"
    await turns()
    assert not others()
    client.left.set()
    await turns()
    assert not left


async def test_a_client_that_leaves_cancels_the_work_and_is_known_to_have_left():
    client, began, events = Client(), asyncio.Event(), []

    async def work():
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    task = asyncio.ensure_future(watched(client, work, lambda: events.append("left")))
    await began.wait()
    client.left.set()
    with pytest.raises(ClientLeftError):
        await task
    assert events == ["left", "cancelled"]
    await turns()
    assert not others()


async def test_a_client_that_leaves_takes_what_it_sent_with_it():
    """Not the collector's next run, which may come dozens of bodies later."""

    class Held:
        """What a request holds."""

    async def request(held):
        link = SimpleNamespace(settings=SimpleNamespace(log_requests=False), tracing=None, count=lambda *_: None)
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "client": None}
        with RequestContext(link, scope) as about:
            try:
                await watched(client, asyncio.Event().wait, lambda: None)
            except Exception as error:
                about.failure(error)
            del held

    client, held = Client(), Held()
    kept = weakref.ref(held)
    gc.disable()
    try:
        task = asyncio.ensure_future(request(held))
        del held
        await turns()
        client.left.set()
        await task
        del task
        await turns()
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("declared", [b"0" * 5000 + b"5", b"9" * 19])
async def test_a_length_that_python_does_not_read_is_too_large(declared):
    request = AsgiRequest({"headers": [(b"content-length", declared)]}, Client().receive)
    with Interruption(deadline_s=clock.monotonic() + 1) as limit, pytest.raises(ServiceError) as raised:
        await request.body(1000, Budget(1000, "bytes").lease("c"), limit)
    assert raised.value.code == "BODY_TOO_LARGE"


async def test_a_cancelled_request_is_not_taken_for_a_client_that_left():
    client = Client()
    task = asyncio.ensure_future(watched(client, asyncio.Event().wait, lambda: None))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns()
    assert not others()


async def test_a_task_that_was_interrupted_can_wait_again():
    client = Client()
    client.left.set()
    with pytest.raises(ClientLeftError):
        await watched(client, asyncio.Event().wait, lambda: None)
    assert await asyncio.wait_for(asyncio.sleep(0, "still here"), 10) == "still here"
    if sys.version_info >= (3, 11):  # Since then a task counts its cancellations.
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
