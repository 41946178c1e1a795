"""The end of a service whose worker hangs: who was let in gets an answer, and a second signal waits for nothing."""

from __future__ import annotations

import asyncio
import signal
import socket

import grpc
import httpx
import psutil

from tests.support.grpc_client import image_request, infer
from tests.support.images import GREY, JPEG
from tests.support.load import WAIT_S, until
from tests.support.null_service import MODEL, PREDICT, gathered, metric
from tests.support.service_process import free_port

REFUSED = (503, "DRAINING")


async def by_fastapi(service):
    """One image by the general way, which a body in chunks takes."""
    async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S) as client:

        async def chunks():
            yield GREY

        answer = await client.post(PREDICT, content=chunks(), headers=JPEG)
    return answer.status_code, answer.json().get("code", "OK")


async def by_rpc(port):
    """One image over gRPC: the status and its words."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            await infer(channel, image_request(GREY, model=MODEL))
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def uploading(service):
    """Open a connection whose request has begun and does not end."""
    url = httpx.URL(service.url)
    connection = socket.create_connection((url.host, url.port), timeout=WAIT_S)
    connection.sendall(f"POST {PREDICT} HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 100\r\n\r\nhalf".encode())
    return connection


async def under_way(service, port):
    """Send requests by every way; the worker answers none of them."""
    asked = [asyncio.create_task(each) for each in (gathered(service, [GREY]), by_fastapi(service), by_rpc(port))]
    await until(lambda: metric(service, "anychip_images_in_flight") == 3)
    return asked, uploading(service)


async def assert_told(asked, connection):
    hot, general, rpc = await asyncio.wait_for(asyncio.gather(*asked), WAIT_S)
    assert hot == [REFUSED]
    assert general == REFUSED
    assert rpc == (grpc.StatusCode.UNAVAILABLE, "the service is shutting down")
    with connection:
        assert b"503" in await asyncio.to_thread(connection.recv, 100)


async def test_a_second_signal_ends_a_hung_service_at_once_and_everybody_is_told(serve):
    port = free_port()
    # Whoever waited for the hung worker, or for clients, would wait for longer than the test does.
    patient = ("--batch-timeout-s", "2000", "--grace-s", "2000", "--drain-s", "2000")
    with serve("hang=*1", *patient, "--grpc-port", str(port), ends=True) as service:
        children = service.children()
        asked, connection = await under_way(service, port)
        service.process.send_signal(signal.SIGTERM)
        await until(lambda: httpx.get(f"{service.url}/v2/health/ready").status_code == 503)
        service.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.process.wait, WAIT_S) == 0
        await assert_told(asked, connection)
        assert not psutil.wait_procs(children, timeout=WAIT_S)[1]


async def test_what_is_not_done_when_the_drain_ends_is_told_before_its_connection_closes(serve):
    port = free_port()
    with serve("hang=*1", "--batch-timeout-s", "200", "--grpc-port", str(port), "--drain-s", "1", ends=True) as service:
        asked, connection = await under_way(service, port)
        service.process.send_signal(signal.SIGTERM)
        await assert_told(asked, connection)
        service.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.process.wait, WAIT_S) == 0
    assert "3 images were cut off" in service.log.read_text()
