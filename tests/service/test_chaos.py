"""Chaos: everything that can go wrong, at once, on real models, for ten minutes; no innocent request notices.

    make nightly ARGS=tests/service/test_chaos.py                 # ANYCHIP_TEST_CHAOS_S=90 makes it shorter

Innocent clients repeat one request over HTTP or gRPC and compare each answer with the first. Meanwhile processes are
killed, hang, are frozen, models are reloaded and unloaded, one after the other, while others send what is bad or leave.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from models.sample import IMAGES
from tests.support.constants import CHANGES_PER_MINUTE, DECODE_TIMEOUT_S, HEADER_TIMEOUT_S, HEARTBEAT_TIMEOUT_S
from tests.support.grpc_client import arrays_of, image_request, method
from tests.support.liveness import answering
from tests.support.load import WAIT_S, client_at, until
from tests.support.null_service import is_ready, metric
from tests.support.service_process import free_port, running

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

SECONDS = int(os.environ.get("ANYCHIP_TEST_CHAOS_S", "600"))
SEED = int(os.environ.get("ANYCHIP_TEST_CHAOS_SEED", "0"))
SPARE, STAGES, TILE = "spare", "shapes", 320
"""A model that is unloaded and loaded, for which no innocent client asks; a model of two stages; the side of tiles."""
INNOCENT, OFFENDING = "127.0.0.2", "127.0.0.66"
"""Addresses of clients over HTTP, as the limits hold for each client."""
MODELS = f"resnet50,yolov8n,{SPARE}=mobilenet_v3_small:random,{STAGES}=yolov8n?most=3 > resnet50"
OPTIONS = (
    *("--models", MODELS, "--weights", "sample", "--device", "cpu", "--plugins", "tests.support.hanging_worker"),
    *("--admin", "port", "--batch-timeout-s", "8", "--grace-s", "2"),
)
CONSTANTS = {CHANGES_PER_MINUTE: 1000, HEARTBEAT_TIMEOUT_S: 5, HEADER_TIMEOUT_S: 5, DECODE_TIMEOUT_S: 5}
# Else the threads of a network spin while they wait for each other, and nobody else gets the processor.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
DEADLINE_S = 120.0
_PAUSE_S = 0.15
_CLOSE, _CLOSE_PIXELS = 0.02, 1.0
"""Allowed differences of scores and of boxes' corners between batches: rounding, which is no fault."""
_MORE = 2
"""Answers that each innocent client has had after a fault when that is over: the second was asked for after it."""
_PREDICT = "/v1/models/resnet50:predict"
_IDS = itertools.count(1)


def image(name):
    return (IMAGES / f"{name}.jpg").read_bytes()


def assert_same(found, first, where="the answer", close=_CLOSE):
    if isinstance(first, dict):
        assert found.keys() == first.keys(), where
        for name, value in first.items():
            assert_same(found[name], value, f"{where}.{name}", _CLOSE_PIXELS if name in ("box", "boxes") else close)
    elif isinstance(first, list):
        assert len(found) == len(first), where
        for index, (one, other) in enumerate(zip(found, first, strict=True)):
            assert_same(one, other, f"{where}[{index}]", close)
    elif isinstance(first, float):
        assert abs(found - first) <= close, where
    else:
        assert found == first, where


def http_client(client, path, body, kind):
    """Return a function that sends one request and returns what must not change of its answer."""
    headers = {"Content-Type": kind, "X-Timeout-Ms": str(int(DEADLINE_S * 1e3))}

    async def ask():
        wanted = f"chaos-{next(_IDS)}"
        answer = await client.post(path, content=body, headers={**headers, "X-Request-Id": wanted})
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, wanted), answer.text[:300]
        found = answer.json()
        if "predictions" in found:
            return found["predictions"]
        return {output["name"]: output["data"] for output in found["outputs"] if output["datatype"] != "BYTES"}

    return ask


def http_requests():
    several = [{"b64": base64.b64encode(image(f"detect_{number}")).decode()} for number in (1, 2, 3, 2)]
    star = base64.b64encode(image("classify_star")).decode()
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [star]}
    yolo = "/v1/models/yolov8n:predict"
    return {
        "HTTP, an image for a classifier": (_PREDICT, image("classify_heart"), "image/jpeg"),
        "HTTP, an image for a detector": (yolo, image("detect_1"), "image/jpeg"),
        "HTTP, a large JSON of images": (yolo, json.dumps({"instances": several}).encode(), "application/json"),
        "HTTP, a tensor": ("/v2/models/resnet50/infer", json.dumps({"inputs": [tensor]}).encode(), "application/json"),
        "HTTP, an image in tiles": (f"{yolo}?tile={TILE}", image("detect_2"), "image/jpeg"),
        "HTTP, two stages": (f"/v1/models/{STAGES}:predict", image("detect_3"), "image/jpeg"),
    }


def grpc_clients(channel):
    infer, stream = method(channel, "ModelInfer"), method(channel, "ModelStreamInfer")

    def kept(answer, request):
        assert answer.id == request.id
        return {name: array.tolist() for name, array in arrays_of(answer).items()}

    async def unary():
        request = image_request(image("detect_2"), image("detect_3"), model="yolov8n", id=f"chaos-{next(_IDS)}")
        return kept(await infer(request, timeout=DEADLINE_S), request)

    async def streamed():
        names = ("classify_heart", "classify_ring")
        requests = [image_request(image(name), model="resnet50", id=f"chaos-{next(_IDS)}") for name in names]
        answers = [answer async for answer in stream(iter(requests), timeout=DEADLINE_S)]
        assert not any(answer.error_message for answer in answers), answers
        by_id = {answer.infer_response.id: answer.infer_response for answer in answers}
        return [kept(by_id[request.id], request) for request in requests]

    return {"gRPC, two images for a detector": unary, "gRPC, a stream": streamed}


class Ledger:
    """Answers by innocent client, and what was lost or wrong."""

    def __init__(self):
        self.answered, self.bad = Counter(), []

    async def run(self, name, ask, stop):
        """Run one innocent client until `stop`; its last request is answered before this returns."""
        first = None
        while not stop.is_set():
            try:
                answer = await ask()
                first = answer if first is None else first
                assert_same(answer, first)
            except (AssertionError, KeyError, OSError, httpx.HTTPError, grpc.RpcError) as error:
                self.bad.append(f"{name}: {type(error).__name__}: {error}"[:400])
            self.answered[name] += 1
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), _PAUSE_S)

    async def more(self, number):
        """Wait until every innocent client has had so many more answers."""
        before = dict(self.answered)
        await until(lambda: all(self.answered[name] >= count + number for name, count in before.items()), blocks=False)


@contextlib.asynccontextmanager
async def innocent(service, grpc_port):
    """Run the innocent clients as long as the block lasts; then each gets its last answer."""
    ledger, stop = Ledger(), asyncio.Event()
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
        client_at(service.url, INNOCENT, connections=None, timeout_s=DEADLINE_S + 30) as client,
    ):
        clients = {name: http_client(client, *request) for name, request in http_requests().items()}
        clients |= grpc_clients(channel)
        ledger.answered.update(dict.fromkeys(clients, 0))
        tasks = [asyncio.create_task(ledger.run(name, ask, stop)) for name, ask in clients.items()]
        try:
            await ledger.more(1)
            yield ledger
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)


def converters(service):
    found = []
    for child in service.children():
        with contextlib.suppress(psutil.Error):  # It has just ended.
            if "converter_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def faults(service):
    """Return the faults by name. Each waits for its own work, none for its consequences."""

    async def change(path, status=200):
        """Ask for a change; ask again while an earlier change runs."""
        async with client_at(service.url) as client:
            while (answer := await client.post(f"/v2/repository/models/{path}")).status_code == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        assert answer.status_code == status, answer.text

    async def reload_fails():
        before = set(service.workers())
        loading = asyncio.create_task(change("resnet50/load", 500))
        await until(lambda: len(service.workers()) > len(before) or loading.done())
        for worker in set(service.workers()) - before:
            worker.kill()
        await loading

    async def reloaded():
        await change("resnet50/load")

    async def unloaded():
        for path in (f"{SPARE}/unload", f"{SPARE}/load"):
            await change(path)

    async def signalled(processes, number):
        for process in processes:
            process.send_signal(number)

    async def paused(processes, seconds):
        await signalled(processes, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def decoders():
        return [*service.named("anychip-decoder").values()]

    server = psutil.Process(service.process.pid)
    return {
        "worker killed": lambda: signalled(service.workers(), signal.SIGKILL),
        "worker hangs": lambda: signalled(service.workers(), signal.SIGUSR2),
        "worker frozen": lambda: signalled(service.workers(), signal.SIGSTOP),
        "decoder killed": lambda: signalled(decoders()[:1], signal.SIGKILL),
        "decoder frozen": lambda: signalled(decoders()[:1], signal.SIGSTOP),
        "decoders' parent killed": lambda: signalled(service.named("fork-decoders").values(), signal.SIGKILL),
        "converter killed": lambda: signalled(converters(service)[:1], signal.SIGKILL),
        "server frozen for 2 s": lambda: paused([server], 2.0),
        "all processes paused for 8 s": lambda: paused([server, *service.children()], 8.0),
        "model reloaded": reloaded,
        "reload whose new worker is killed": reload_fails,
        "other model unloaded, and loaded": unloaded,
    }


async def offend(service, end_s, chance):
    """Send what is bad, and leave at any moment, at least once; return answers that must not occur."""
    large = json.dumps({"instances": [{"b64": base64.b64encode(bytes(10_000_000)).decode()}]}).encode()
    bad = ((image("detect_2")[:20_000], "image/jpeg"), (bytes(30_000_000), "image/jpeg"), (large, "application/json"))
    unfair, address = [], httpx.URL(service.url)
    async with client_at(service.url, OFFENDING) as client:
        while True:
            body, kind = chance.choice(bad)
            answer = await client.post(_PREDICT, content=body, headers={"Content-Type": kind})
            if not 400 <= answer.status_code < 500 and answer.status_code not in (503, 504):
                unfair.append(f"{answer.status_code} to {len(body)} bytes")
            _, writer = await asyncio.open_connection(address.host, address.port, local_addr=(OFFENDING, 0))
            part = image("detect_2")[: chance.choice((20_000, None))]
            head = f"POST {_PREDICT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(image('detect_2'))}\r\n\r\n"
            writer.write(head.encode() + part)
            await asyncio.sleep(chance.random() * 0.3)
            writer.transport.abort()
            if time.monotonic() >= end_s:
                return unfair


async def break_things(service, ledger, end_s, chance):
    """One fault after the other, each once the last one is over."""
    all_faults = faults(service)
    while time.monotonic() < end_s:
        for name in chance.sample(list(all_faults), len(all_faults)):
            if time.monotonic() < end_s:
                await all_faults[name]()
                await ledger.more(_MORE)
                await until(lambda: is_ready(service) and len(service.workers()) == 1)


GROWS = {
    "threads of the server": 4,
    "descriptors of the server": 4,
    "memory of the server, MiB": 96,
    "memory of the worker, MiB": 256,
}
"""By how much these may be more at the end: pools of threads that fill up once, what allocators keep."""


def held(service):
    """Return the numbers that must come back to what they were: images, processes, threads, descriptors, memory."""
    server, workers = psutil.Process(service.process.pid), service.workers()
    anonymous = int(Path(f"/proc/{server.pid}/status").read_text().split("RssAnon:")[1].split()[0]) / 1024
    return {
        "images in flight": metric(service, "anychip_images_in_flight"),
        "images waiting": metric(service, "anychip_queue_depth") + metric(service, "anychip_queue_reserved"),
        "slots taken": metric(service, "anychip_slots_taken"),
        "workers": len(workers),
        "decoders": len(service.named("anychip-decoder")),
        "threads of the server": server.num_threads(),
        # Processes that convert come and go, and each has a socket.
        "descriptors of the server": server.num_fds() - len(converters(service)),
        "memory of the server, MiB": anonymous,
        "memory of the worker, MiB": sum(each.memory_info().rss for each in workers) / (1 << 20),
    }


def more_than(before, service):
    """Return what the service holds more than before."""
    return {
        what: (before[what], value)
        for what, value in held(service).items()
        if value > before[what] + GROWS.get(what, 0) or (what not in GROWS and value != before[what])
    }


async def test_chaos(tmp_path):
    chance, grpc_port = random.Random(SEED), free_port()
    options = (*OPTIONS, "--grpc-port", str(grpc_port))
    with running(tmp_path, *options, environment=ENVIRONMENT, constants=CONSTANTS, guarded=True) as service:
        async with innocent(service, grpc_port):  # Once around, so that buffers have their sizes, and pools threads.
            await offend(service, 0, chance)
        await until(lambda: metric(service, "anychip_images_in_flight") == 0)
        before = held(service)
        with answering(service) as live:
            async with innocent(service, grpc_port) as ledger:
                end_s = time.monotonic() + SECONDS
                _, *unfair = await asyncio.gather(
                    break_things(service, ledger, end_s, chance),
                    *(offend(service, end_s, random.Random(SEED + number)) for number in (1, 2)),
                )
            await until(lambda: not more_than(before, service))  # A connection may be closed late.
    print(f"{ledger.answered.total():,} requests, {len(ledger.bad)} lost or wrong; alive {live.asked:,} times,")
    print(f"the slowest after {1e3 * live.slowest_s:.0f} ms")
    assert ledger.bad == []
    assert unfair == [[], []]
    assert "Traceback" not in (tmp_path / "service.log").read_text()
