"""Chaos: everything that can go wrong, at once, on real models, for ten minutes; no innocent request notices.

    make nightly ARGS=tests/service/test_chaos.py                 # ANYCHIP_TEST_CHAOS_S=90 makes it shorter
    ANYCHIP_TEST_CHAOS_RESULT=result.json …                    # keeps what was measured, for docs/reliability.md

Innocent clients (tests/support/chaos_clients.py) ask over HTTP and gRPC and compare each answer with the first. Others
are in a hurry: they ask two models with a deadline of 2 s, and may be refused, but not for long after a fault.
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
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from tests.support.chaos_clients import IMAGES, STAGES, Ledger, forwarded, grpc_clients, http_clients, run_client
from tests.support.chaos_faults import SPARE, Faults, processes
from tests.support.chaos_offenders import Offenders
from tests.support.chaos_report import FaultRow, Result
from tests.support.constants import CHANGES_PER_MINUTE, DECODE_TIMEOUT_S, HEADER_TIMEOUT_S, HEARTBEAT_TIMEOUT_S
from tests.support.liveness import observed
from tests.support.load import WAIT_S, until
from tests.support.loop_guard import told
from tests.support.null_service import is_ready, metric
from tests.support.pauses import goodput, hurried
from tests.support.service_process import free_port, running

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

SECONDS = int(os.environ.get("ANYCHIP_TEST_CHAOS_S", "600"))
SEED = int(os.environ.get("ANYCHIP_TEST_CHAOS_SEED", "0"))
MIB = 1 << 20
MODELS = f"resnet50,yolov8n,{SPARE}=mobilenet_v3_small:random,{STAGES}=yolov8n?most=3 > resnet50"
OPTIONS = (
    *(
        "--models",
        MODELS,
        "--weights",
        "sample",
        "--device",
        "cpu",
        "--batch-sizes",
        "1,4",
        "--plugins",
        "tests.support.hanging_worker",
    ),
    *("--admin", "port", "--batch-timeout-s", "8", "--grace-s", "2"),
)
CONSTANTS = {CHANGES_PER_MINUTE: 1000, HEARTBEAT_TIMEOUT_S: 5, HEADER_TIMEOUT_S: 5, DECODE_TIMEOUT_S: 5}
# Else the threads of a network spin while they wait for each other, and nobody else gets the processor.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
_RECOVERED_S = 240.0
HURRIED = {"resnet50": "classify_star.jpg", "yolov8n": "detect_3.jpg"}
HURRY_MS = 2000
_GOODPUT_S, _GOODPUT_TRIES = 5.0, 12
"""A minute: what is learned and never forgotten lasts longer, and what others do beside it does not."""
_MORE = 2
"""Answers that each innocent client has had after a fault when that is over: the second was asked for after it."""


@dataclass
class Try:
    """One fault, from its beginning until all innocent clients had answers again."""

    fault: str
    began_s: float
    in_flight: int
    ended_s: float = 0.0
    goodput: float | None = None
    hurried: list[dict[str, dict[str, int]]] = field(default_factory=list)
    """What clients in a hurry were told each time that the goodput was measured, by model and outcome."""


@dataclass
class Chaos:
    """What went on."""

    ledger: Ledger = field(default_factory=Ledger)
    tries: list[Try] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def trying(self, fault):
        one = Try(fault, time.monotonic(), len(self.ledger.under_way))
        self.tries.append(one)
        yield one
        one.ended_s = time.monotonic()

    async def recovered(self, service):
        """Until every innocent client has been answered again."""
        before = dict(self.ledger.answered)
        end_s = time.monotonic() + _RECOVERED_S
        while any(self.ledger.answered[client] < count + _MORE for client, count in before.items()):
            assert time.monotonic() < end_s, "some innocent client is not answered any more"
            await asyncio.sleep(0.05)
        await until(lambda: is_ready(service) and len(service.workers()) == 1)

    def rows(self, slow):
        """By fault, in the order in which they were first tried."""
        rows = {}
        for one in self.tries:
            row = rows.setdefault(one.fault, FaultRow(one.fault))
            row.times += 1
            row.in_flight += one.in_flight
            for request in self.ledger.bad:
                if request.began_s < one.ended_s and request.ended_s > one.began_s:
                    row.wrong += request.wrong
                    row.lost += not request.wrong
            within = [taken_s for asked_s, taken_s in slow if one.began_s - taken_s < asked_s < one.ended_s]
            row.longest_pause_ms = max(row.longest_pause_ms, 1e3 * max(within, default=0.0))
            if one.goodput is not None:
                row.least_goodput = min(one.goodput, one.goodput if row.least_goodput is None else row.least_goodput)
            row.longest_recovery_s = max(row.longest_recovery_s, one.ended_s - one.began_s)
        return list(rows.values())


def held(service):
    """Return the numbers that must come back to what they were: images, processes, threads, descriptors, memory."""
    found = processes(service)
    status = Path(f"/proc/{found.server.pid}/status").read_text()
    anonymous = int(status.split("RssAnon:")[1].split()[0]) / 1024
    return {
        "images in flight": metric(service, "anychip_images_in_flight"),
        "images waiting": metric(service, "anychip_queue_depth") + metric(service, "anychip_queue_reserved"),
        "slots taken": metric(service, "anychip_slots_taken"),
        "images at decoders": metric(service, "anychip_decode_depth"),
        "workers": len(found.workers),
        "decoders and their parent": len(found.decoders) + len(found.fork_server),
        "other processes": len(found.others),
        "threads of the server": found.server.num_threads(),
        # Processes that convert come and go, and each has a socket.
        "descriptors of the server": found.server.num_fds() - len(found.converters),
        "threads of the worker": sum(each.num_threads() for each in found.workers),
        "descriptors of the worker": sum(each.num_fds() for each in found.workers),
        "memory of the server, MiB": anonymous,
        "memory of the worker, MiB": sum(each.memory_info().rss for each in found.workers) / MIB,
        "memory of the decoders, MiB": sum(each.memory_full_info().uss for each in found.decoders) / MIB,
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
    async with forwarded(grpc_port) as address, grpc.aio.insecure_channel(address) as channel:
        with http_clients(service.url) as over_http:
            async with asking({**over_http, **grpc_clients(channel)}, ledger):
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


async def answered_at_all(loads):
    """Return the rate of answers to clients in a hurry before the faults, by model, once each model answers any."""
    for _ in range(_GOODPUT_TRIES):
        before = await goodput(loads, 2 * _GOODPUT_S)
        if min(before.values()) > 0:
            return before
    raise AssertionError(f"no client in a hurry is answered, though nothing is broken: {before}")


async def answered_again(loads, before, told):
    """Return the least share of the former rate at which a model answers clients in a hurry again, once each does: 0 if
    one answers none in all tries. Add outcomes to `told`.
    """
    shares = dict.fromkeys(before, 0.0)
    for _ in range(_GOODPUT_TRIES):
        outcomes = {model: Counter(load.outcomes) for model, load in loads.items()}
        now = await goodput(loads, _GOODPUT_S)
        new = {model: load.outcomes - outcomes[model] for model, load in loads.items()}
        told.append({model: {f"{code} {what}": n for (code, what), n in more.items()} for model, more in new.items()})
        shares = {model: max(shares[model], now[model] / rate) for model, rate in before.items()}
        if min(shares.values()) > 0:
            break
    return min(shares.values())


async def break_things(chaos, service, loads, end_s, chance):
    """One fault after the other, each once the last one is over."""
    faults = Faults(service)
    before = await answered_at_all(loads)
    while time.monotonic() < end_s:
        for name in chance.sample(list(faults.all), len(faults.all)):
            if time.monotonic() < end_s:
                async with chaos.trying(name) as one:
                    await faults.all[name]()
                    await chaos.recovered(service)
                one.goodput = await answered_again(loads, before, one.hurried)


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
    in_a_hurry = {model: (IMAGES / name).read_bytes() for model, name in HURRIED.items()}
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
            async with innocent(service, grpc_port, chaos.ledger), hurried(service, in_a_hurry, 2, HURRY_MS) as loads:
                await until(lambda: min(chaos.ledger.answered.values()) >= _MORE)
                end_s = began_s + SECONDS
                await asyncio.gather(
                    break_things(chaos, service, loads, end_s, chance),
                    offend(chaos, offenders, end_s, random.Random(SEED + 1)),
                    offend(chaos, offenders, end_s, random.Random(SEED + 2)),
                )
            seconds = time.monotonic() - began_s
            after = await settled(service)
            if not_as_before(before, after):  # A worker that is about to be replaced, a connection that is closed late.
                after = await settled(service)
        result = Result(
            datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            processor(),
            os.cpu_count() or 1,
            round(seconds),
            dict(Counter(request.client for request in chaos.ledger.requests)),
            sum(not request.wrong for request in chaos.ledger.bad),
            sum(request.wrong for request in chaos.ledger.bad),
            live.asked,
            1e3 * live.slowest_s,
            1e3 * metric(service, "anychip_event_loop_stall_seconds"),
            chaos.rows(live.slow),
            {what: (value, after[what]) for what, value in before.items()},
            {what: dict(answers) for what, answers in offenders.answers.items()},
        )
        result.faults.append(await told_to_end(service))
    another = tmp_path / "killed"  # A log of its own: the first one is looked at below.
    another.mkdir()
    with running(another, *options, environment=ENVIRONMENT, constants=CONSTANTS) as service:
        result.faults.append(await killed(service))
    if "ANYCHIP_TEST_CHAOS_RESULT" in os.environ:
        result.write(Path(os.environ["ANYCHIP_TEST_CHAOS_RESULT"]))
    assert [(request.client, request.outcome) for request in chaos.ledger.bad] == []
    assert chaos.ledger.under_way == set()
    assert [one for one in chaos.tries if one.goodput == 0] == [], "what was learned is never forgotten"
    assert offenders.unfair == []
    assert not_as_before(before, after) == {}
    assert live.failed == []
    assert live.held == [], told(live.held)
    assert "Traceback" not in (tmp_path / "service.log").read_text()


@contextlib.asynccontextmanager
async def last_requests(service):
    """Yield the last requests of innocent clients, in flight as the block begins; its end waits for their outcomes."""
    ledger, stop = Ledger(), asyncio.Event()
    with http_clients(service.url) as clients:
        tasks = [asyncio.create_task(run_client(name, ask, ledger, stop)) for name, ask in clients.items()]
        await until(lambda: len(ledger.answered) == len(clients) and len(ledger.under_way) > 2)
        stop.set()
        yield list(ledger.under_way)
        await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)


def row(fault, requests, began_s):
    lost, wrong = (sum(request.outcome.startswith(what) for request in requests) for what in ("lost", "wrong"))
    return FaultRow(fault, 1, len(requests), lost, wrong, 0.0, time.monotonic() - began_s)


async def told_to_end(service):
    """SIGTERM under load: what was asked is answered, and nothing is left."""
    children = service.children()
    async with last_requests(service) as requests:
        began_s = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(service.process.wait, WAIT_S) == 0
    assert not psutil.wait_procs(children, timeout=WAIT_S)[1]
    assert {request.outcome for request in requests} == {"ok"}
    return row("server told to end (SIGTERM)", requests, began_s)


async def killed(service):
    """SIGKILL under load: each client hears at once that nobody is there any more, and no process is left."""
    children = service.children()
    async with last_requests(service) as requests:
        began_s = time.monotonic()
        service.process.kill()
    assert all(request.outcome for request in requests)
    assert not psutil.wait_procs(children, timeout=WAIT_S)[1]
    with pytest.raises(httpx.TransportError):
        httpx.get(service.url)
    return row("server killed (SIGKILL)", requests, began_s)
