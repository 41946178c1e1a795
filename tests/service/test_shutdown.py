"""The beginning and the end of a service: starts that are refused, who was let in gets an answer, a second signal."""

from __future__ import annotations

import asyncio
import signal
import socket

import grpc
import httpx
import psutil
import pytest

from tests.support import warm, work
from tests.support.grpc_client import image_request, infer
from tests.support.images import GREY, JPEG
from tests.support.load import WAIT_S, Load, until
from tests.support.null_service import MODEL, PREDICT, gathered, metric, post, ready, serving
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
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            await infer(channel, image_request(GREY, model=MODEL))
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


async def under_way(service, port):
    """Send requests by every way, and one that does not end; the worker answers none of them."""
    asked = [asyncio.create_task(each) for each in (gathered(service, [GREY]), by_fastapi(service), by_rpc(port))]
    await until(lambda: metric(service, "anychip_images_in_flight") == 3)
    url = httpx.URL(service.url)
    connection = socket.create_connection((url.host, url.port), timeout=WAIT_S)
    connection.sendall(f"POST {PREDICT} HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 100\r\n\r\nhalf".encode())
    return asked, connection


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


def test_a_signal_that_scripts_may_still_send_to_the_whole_unit_ends_nothing(tmp_path):
    with serving(tmp_path, fresh=True) as service:
        assert post(service)[0] == 200
        children = service.children()
        for each in children:
            each.send_signal(signal.SIGUSR1)
        service.process.send_signal(signal.SIGUSR1)
        assert post(service)[0] == 200
        assert {each.pid for each in children} == {each.pid for each in service.children()}
        assert {"anychip-worker", "fork-workers"} <= {each.name() for each in children}


def test_during_the_grace_period_it_is_not_ready_and_still_answers(tmp_path):
    with serving(tmp_path, "", "--grace-s", "60") as service:
        service.process.send_signal(signal.SIGTERM)
        work.until(lambda: ready(service).status_code == 503)
        assert ready(service).json()["code"] == "DRAINING"
        assert ready(service).headers["connection"] == "close"
        assert httpx.post(service.url + PREDICT, content=GREY, headers=JPEG, timeout=WAIT_S).status_code == 200
        service.process.send_signal(signal.SIGTERM)  # A second one: no more patience.
        assert service.process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--models", "resnet19"), "resnet"),
        (("--models", "resnet18:random", "--device", "npu"), "npu"),
        (("--models", "resnet18:random", "--models-on-demand", "all,-dogs"), "there is no model 'dogs'"),
        (
            ("--models", "resnet18:random", "--device", "null", "--null", "load_ms=100000", "--start-timeout-s", "1"),
            "not ready within 1 s",
        ),
    ],
)
def test_what_cannot_be_served_stops_the_start_with_one_sentence(tmp_path, arguments, sentence):
    ended = warm.completed(tmp_path, "-m", "app", "serve", *arguments, "--port", "0", timeout_s=360)
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if line.startswith("anychip: ")]
    assert len(lines) == 1
    assert sentence in lines[0]
    assert "Traceback" not in ended.stderr


async def test_two_services_share_a_port_and_one_of_them_drains_under_load(tmp_path):
    port = free_port()
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    shared = ("--reuse-port", str(port), "--grace-s", "1")
    with serving(folders[0], "", *shared) as one, serving(folders[1], "", *shared) as two:
        async with Load(f"http://127.0.0.1:{port}", PREDICT, GREY, 24) as load:
            await load.answers(200)
            counted = [metric(each, "anychip_requests_total", code="OK") for each in (one, two)]
            assert all(counted), "each of them has its own port, where its metrics are"
            one.process.send_signal(signal.SIGTERM)
            await load.answers(50)
            assert one.process.wait(WAIT_S) == 0
            before = metric(two, "anychip_requests_total", code="OK")
            await load.answers(200)
            assert metric(two, "anychip_requests_total", code="OK") >= before + 200 - 24
        assert set(load.outcomes) == {(200, "OK")}
        assert httpx.get(f"{two.url}/v2/health/ready").status_code == 200
