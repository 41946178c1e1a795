"""Chaos: everything that can go wrong, at once, on real models, for ten minutes; no innocent request notices.

    make nightly ARGS=tests/service/test_chaos.py                 # ANYCHIP_TEST_CHAOS_S=90 makes it shorter
    ANYCHIP_TEST_CHAOS_RESULT=result.md …                      # what was measured, for docs/reliability.md

Innocent clients (tests/support/chaos_clients.py) ask over HTTP and gRPC and compare each answer with the first.
Meanwhile processes are killed, hang, are frozen, models are reloaded and unloaded, one fault after the other
(chaos_faults), while other clients send what is bad, leave, or flood (chaos_offenders).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import platform
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest

from tests.support.chaos_clients import STAGES, Ledger, forwarded, grpc_clients, http_clients, run_client
from tests.support.chaos_faults import SPARE, converters, faults
from tests.support.chaos_offenders import Offenders
from tests.support.constants import CHANGES_PER_MINUTE, DECODE_TIMEOUT_S, HEADER_TIMEOUT_S, HEARTBEAT_TIMEOUT_S
from tests.support.liveness import observed
from tests.support.load import WAIT_S, until
from tests.support.loop_guard import told
from tests.support.null_service import is_ready, metric
from tests.support.service_process import free_port, running

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

SECONDS = int(os.environ.get("ANYCHIP_TEST_CHAOS_S", "600"))
SEED = int(os.environ.get("ANYCHIP_TEST_CHAOS_SEED", "0"))
MIB = 1 << 20
MODELS = f"resnet50,yolov8n,{SPARE}=mobilenet_v3_small:random,{STAGES}=yolov8n?most=3 > resnet50"
OPTIONS = (
    *("--models", MODELS, "--weights", "sample", "--device", "cpu", "--plugins", "tests.support.hanging_worker"),
    *("--admin", "port", "--batch-timeout-s", "8", "--grace-s", "2"),
)
CONSTANTS = {CHANGES_PER_MINUTE: 1000, HEARTBEAT_TIMEOUT_S: 5, HEADER_TIMEOUT_S: 5, DECODE_TIMEOUT_S: 5}
# Else the threads of a network spin while they wait for each other, and nobody else gets the processor.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
_RECOVERED_S = 240.0
_MORE = 2
"""Answers that each innocent client has had after a fault when that is over: the second was asked for after it."""


@dataclass
class Try:
    """One fault, from its beginning until all innocent clients had answers again."""

    fault: str
    began_s: float
    in_flight: int
    ended_s: float = 0.0


@dataclass
class Chaos:
    """What went on."""

    ledger: Ledger = field(default_factory=Ledger)
    tries: list[Try] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def trying(self, fault):
        one = Try(fault, time.monotonic(), len(self.ledger.under_way))
        self.tries.append(one)
        yield
        one.ended_s = time.monotonic()

    async def recovered(self, service):
        """Until every innocent client has been answered again."""
        before = dict(self.ledger.answered)
        end_s = time.monotonic() + _RECOVERED_S
        while any(self.ledger.answered[client] < count + _MORE for client, count in before.items()):
            assert time.monotonic() < end_s, "some innocent client is not answered any more"
            await asyncio.sleep(0.05)
        await until(lambda: is_ready(service) and len(service.workers()) == 1)

    def row(self, fault, slow):
        """Format the line of the table that has all tries of a fault."""
        tries = [one for one in self.tries if one.fault == fault]
        bad = [
            request
            for request in self.ledger.bad
            if any(request.began_s < one.ended_s and request.ended_s > one.began_s for one in tries)
        ]
        stalls = [taken for asked, taken in slow for one in tries if one.began_s - taken < asked < one.ended_s]
        wrong = sum(request.wrong for request in bad)
        return (
            f"| {fault} | {len(tries)} | {sum(one.in_flight for one in tries)} | {len(bad) - wrong} | {wrong} "
            f"| {1e3 * max(stalls, default=0):.0f} | {max(one.ended_s - one.began_s for one in tries):.1f} |"
        )

    def write(self, live, stall_s, seconds, offended, before, after):
        """Write a run, if somebody wants it, as its part of docs/reliability.md."""
        asked, bad = self.ledger.requests, self.ledger.bad
        wrong = sum(request.wrong for request in bad)
        lines = [
            f"Measured on {datetime.date.today()}, {os.cpu_count()} cores of {processor()}, {seconds:.0f} s:",
            f"{len(asked):,} requests of innocent clients, {len(bad) - wrong} lost, {wrong} wrong. `/v2/health/live` "
            f"was asked {live.asked:,} times; the slowest answer took {1e3 * live.slowest_s:.0f} ms. The event loop's "
            f"longest stall was {1e3 * stall_s:.0f} ms.",
            "",
            "| fault | times tried | requests in flight | lost | wrong | longest stall, ms | until all was well, s |",
            "|---|---|---|---|---|---|---|",
            *(self.row(fault, live.slow) for fault in dict.fromkeys(one.fault for one in self.tries)),
            "",
            "| what the service held | at the start | at the end |",
            "|---|---|---|",
            *(f"| {what} | {value:,.0f} | {after[what]:,.0f} |" for what, value in before.items()),
            "",
            "| bad request | answers |",
            "|---|---|",
            *(
                f"| {what} | {', '.join(f'{answer}: {count}' for answer, count in sorted(answers.items()))} |"
                for what, answers in sorted(offended.items())
            ),
        ]
        Path(os.environ.get("ANYCHIP_TEST_CHAOS_RESULT", os.devnull)).write_text("\n".join(lines) + "\n")


def held(service):
    """Return the numbers that must come back to what they were: images, processes, threads, descriptors, memory."""
    server, workers = psutil.Process(service.process.pid), service.workers()
    decoders = service.named("anychip-decoder").values()
    others = len(service.children()) - len(workers) - len(decoders) - len(converters(service))
    status = Path(f"/proc/{server.pid}/status").read_text()
    anonymous = int(status.split("RssAnon:")[1].split()[0]) / 1024
    return {
        "images in flight": metric(service, "anychip_images_in_flight"),
        "images waiting": metric(service, "anychip_queue_depth") + metric(service, "anychip_queue_reserved"),
        "slots taken": metric(service, "anychip_slots_taken"),
        "images at decoders": metric(service, "anychip_decode_depth"),
        "workers": len(workers),
        "decoders": len(decoders),
        "other processes": others,
        "threads of the server": server.num_threads(),
        # Processes that convert come and go, and each has a socket.
        "descriptors of the server": server.num_fds() - len(converters(service)),
        "threads of the worker": sum(each.num_threads() for each in workers),
        "descriptors of the worker": sum(each.num_fds() for each in workers),
        "memory of the server, MiB": anonymous,
        "memory of the worker, MiB": sum(each.memory_info().rss for each in workers) / MIB,
        "memory of the decoders, MiB": sum(each.memory_full_info().uss for each in decoders) / MIB,
    }


GROWS = {
    "threads of the server": 4,
    "descriptors of the server": 4,
    "memory of the server, MiB": 96,
    "memory of the worker, MiB": 256,
    "memory of the decoders, MiB": 64,
}
"""By how much these may be more at the end: pools of threads that fill up once, what allocators keep."""


def not_as_before(before, after):
    return {
        what: (before[what], value)
        for what, value in after.items()
        if value > before[what] + GROWS.get(what, 0) or (what not in GROWS and value != before[what])
    }


async def settled(service):
    """Return `held` once the service's connections are closed and its counts do not move."""
    await until(lambda: metric(service, "anychip_images_in_flight") == 0)
    await until(lambda: len(service.workers()) == 1)
    last, same = held(service), 0
    for _ in range(60):
        await asyncio.sleep(0.5)
        now = await asyncio.to_thread(held, service)
        counts = [value for what, value in now.items() if "memory" not in what]
        same = same + 1 if counts == [value for what, value in last.items() if "memory" not in what] else 0
        last = now
        if same == 6:
            break
    return last


@contextlib.asynccontextmanager
async def innocent(service, grpc_port, ledger):
    """Run the innocent clients as long as the block lasts; then each gets its last answer."""
    async with (
        forwarded(grpc_port) as address,
        grpc.aio.insecure_channel(address) as channel,
        http_clients(service.url) as over_http,
        asking({**over_http, **grpc_clients(channel)}, ledger),
    ):
        yield


@contextlib.asynccontextmanager
async def asking(clients, ledger):
    stop = asyncio.Event()
    ledger.answered.update(dict.fromkeys(clients, 0))
    tasks = [asyncio.create_task(run_client(name, ask, ledger, stop)) for name, ask in clients.items()]
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)


async def offend(chaos, offenders, end_s, chance):
    """One kind after the other, in any order."""
    while time.monotonic() < end_s:
        kinds = list(offenders.all)
        for kind in chance.sample(kinds, len(kinds)):
            if time.monotonic() < end_s:
                async with chaos.trying(kind):
                    await offenders.all[kind]()


async def break_things(chaos, service, end_s, chance):
    """One fault after the other, each once the last one is over."""
    all_faults = faults(service)
    while time.monotonic() < end_s:
        for name in chance.sample(list(all_faults), len(all_faults)):
            if time.monotonic() < end_s:
                async with chaos.trying(name):
                    work = all_faults[name]()
                    if work is not None:
                        await work
                    await chaos.recovered(service)


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


async def test_chaos(tmp_path):
    chance = random.Random(SEED)
    chaos = Chaos()
    grpc_port = free_port()
    options = (*OPTIONS, "--grpc-port", str(grpc_port))
    with running(tmp_path, *options, environment=ENVIRONMENT, constants=CONSTANTS, guarded=True) as service:
        offenders = Offenders(service.url, f"127.0.0.1:{grpc_port}", SEED)
        # Once around, so that buffers have their sizes, and pools their threads.
        async with innocent(service, grpc_port, Ledger()):
            await asyncio.gather(*(offend() for offend in offenders.all.values()))
        assert offenders.unfair == []
        before = await settled(service)
        offenders.answers.clear()
        with observed(service) as live:  # The result is to be kept in any case.
            began_s = time.monotonic()
            async with innocent(service, grpc_port, chaos.ledger):
                await until(lambda: min(chaos.ledger.answered.values()) >= _MORE)
                end_s = began_s + SECONDS
                await asyncio.gather(
                    break_things(chaos, service, end_s, chance),
                    offend(chaos, offenders, end_s, random.Random(SEED + 1)),
                    offend(chaos, offenders, end_s, random.Random(SEED + 2)),
                )
            seconds = time.monotonic() - began_s
            after = await settled(service)
            if not_as_before(before, after):  # A worker that is about to be replaced, a connection that is closed late.
                after = await settled(service)
        stall_s = metric(service, "anychip_event_loop_stall_seconds")
        chaos.write(live, stall_s, seconds, offenders.answers, before, after)
    assert [(request.client, request.outcome) for request in chaos.ledger.bad] == []
    assert chaos.ledger.under_way == set()
    assert offenders.unfair == []
    assert not_as_before(before, after) == {}
    assert live.failed == []
    assert live.held == [], told(live.held)
    assert "Traceback" not in (tmp_path / "service.log").read_text()
