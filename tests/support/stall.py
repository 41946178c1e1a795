"""Whether a service answers without a pause while something happens to it, measured from another process.

    with answering(service):  # fails if /v2/health/live took more than 250 ms, or the loop stood still for 100 ms
        service.worker().kill()

The measuring process imports the standard library alone. What it, or the server, waited for a processor is subtracted:
on a busy machine that says nothing about the service. So is the time in which the server itself was stopped (SIGSTOP),
and that in which the machine was, whose processors a hypervisor gave to others: nobody could answer then. Once the
server is to end, as `ends` says, it may refuse to be asked.

`running_loop` measures the loop that a test runs in, where there is no service. `pauses` notes when that loop stood
still, for tests that count what a server answers in time: it may be the machine that took the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

LIVE_S = 0.25
STALL_S = 0.1
_INTERVAL_S = 0.02
_STALL_INTERVAL_S = 0.5
_SLOW_S = 0.01
_MACHINE_S = 0.03


@dataclass
class Answering:
    """What was measured: times of answers in seconds, those that failed, and the loop's longest stall since its start;
    `earlier_stall_s`: the longest of those before the block.
    `machine_stall_s`: the longest time in which no process ran.
    `slow`: when an answer was asked for that took some time, by time.monotonic(), and how long it took.

    All zero until the block ends.
    """

    asked: int = 0
    slowest_s: float = 0.0
    failed: int = 0
    longest_stall_s: float = 0.0
    earlier_stall_s: float = 0.0
    machine_stall_s: float = 0.0
    slow: list[tuple[float, float]] = field(default_factory=list, repr=False)


@contextlib.contextmanager
def answering(
    service: Any, live_s: float = LIVE_S, stall_s: float = STALL_S, *, ends: bool = False, at_admin: bool = False
) -> Iterator[Answering]:
    """Measure a ServiceProcess, or whatever has `url` and `process`, for the length of the block; then assert.

    `ends`: the service comes to its end in the block; from the first time it cannot be asked any more, nobody asks.
    `at_admin`: its administration's port is asked.
    """
    measured = Answering()
    url = service.admin_url if at_admin else service.url
    command = [sys.executable, "-I", __file__, url, str(service.process.pid), "ends" if ends else "lives"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "measuring\n"
            yield measured
        except BaseException:
            process.kill()
            raise
        answer = json.loads(process.communicate("", timeout=60)[0])
    for name, value in answer.items():
        setattr(measured, name, value)
    assert measured.asked > 0
    assert measured.failed == 0 or ends, f"{measured.failed} of {measured.asked} got no answer: {measured}"
    assert measured.slowest_s <= live_s, f"the service paused: {measured}"
    earlier = measured.longest_stall_s == measured.earlier_stall_s  # Another test's, which has failed by now.
    assert measured.longest_stall_s <= stall_s + measured.machine_stall_s or earlier, (
        f"the event loop stood still: {measured}"
    )


class LoopStall:
    """`longest_s`: the longest time the loop stood still, in seconds, less what its thread waited for a processor."""

    longest_s = 0.0
    wanted_s = 0.0

    def stand_still(self, seconds: float) -> None:
        """Block the loop, as if this process were stopped: that does not count."""
        began_s = time.monotonic()
        time.sleep(seconds)
        self.wanted_s += time.monotonic() - began_s


@contextlib.asynccontextmanager
async def running_loop(stall_s: float = STALL_S) -> AsyncIterator[LoopStall]:
    """Measure the running event loop for the length of the block; then assert."""
    measured = LoopStall()

    async def tick() -> None:
        pid, thread = os.getpid(), threading.get_native_id()
        while True:
            before_s, waited_s = time.monotonic(), _waited_s(pid, thread) + measured.wanted_s
            await asyncio.sleep(_INTERVAL_S / 2)
            waited_s = _waited_s(pid, thread) + measured.wanted_s - waited_s
            stood_s = time.monotonic() - before_s - _INTERVAL_S / 2 - waited_s
            measured.longest_s = max(measured.longest_s, stood_s)

    # As the service does once it is ready: a collection that walks over all of PyTorch is no fault of what is measured.
    gc.collect()
    gc.freeze()
    try:
        async with _beside(tick()):
            yield measured
    finally:
        gc.unfreeze()
    assert measured.longest_s <= stall_s, f"the event loop stood still for {measured.longest_s:.3f} s"


@contextlib.asynccontextmanager
async def pauses() -> AsyncIterator[list[tuple[float, float]]]:
    """From when to when the running event loop stood still for more than STALL_S, by time.perf_counter(), for the
    length of the block. The loop of a client that does little stands still where the machine gave it no processor.
    """
    noted: list[tuple[float, float]] = []

    async def tick() -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(_INTERVAL_S / 2)
            if (now_s := time.perf_counter()) - before_s > STALL_S:
                noted.append((before_s, now_s))

    async with _beside(tick()):
        yield noted


@contextlib.asynccontextmanager
async def _beside(ticking: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """It runs for the length of the block."""
    task = asyncio.create_task(ticking)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _waited_s(pid: int, thread: int = 0) -> float:
    """What a thread of a process, its first one if none is named, has waited for a processor so far."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/task/{thread or pid}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


class _Client:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port or 80
        self._socket: socket.socket | None = None

    def get(self, path: str) -> bytes:
        """The body. Raises OSError, ValueError."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=30)
        try:
            self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            received = b""
            while b"\r\n\r\n" not in received:
                received += self._more()
            head, _, body = received.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            while length and len(body) < int(length[1]):
                body += self._more()
            if not head.startswith(b"HTTP/1.1 200"):
                raise ValueError(head)
            return body
        except (OSError, ValueError):
            self._socket.close()
            self._socket = None
            raise

    def longest_stall_s(self) -> float:
        """As the service itself has measured it since it was ready; 0 where it cannot be asked."""
        with contextlib.suppress(OSError, ValueError):
            found = re.search(rb"(?m)^anychip_event_loop_stall_seconds (\S+)", self.get("/metrics"))
            return float(found[1]) if found else 0.0
        return 0.0

    def _more(self) -> bytes:
        assert self._socket is not None
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionResetError("closed")
        return data


class _Stopped(threading.Thread):
    """Counts the time in which a process, or the machine, is stopped. `total_s`: so many seconds until now.

    `machine_s`: the longest time in which this thread did neither run nor wait for a processor.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._path, self.total_s, self.machine_s = f"/proc/{pid}/stat", 0.0, 0.0

    def run(self) -> None:
        before_s, was = time.monotonic(), False
        pid, thread = os.getpid(), threading.get_native_id()
        waited_s = _waited_s(pid, thread)
        while True:
            time.sleep(_INTERVAL_S / 2)
            with contextlib.suppress(OSError), open(self._path) as file:
                stopped = file.read().rpartition(")")[2].split()[0] in "Tt"
                now_s, waiting_s = time.monotonic(), _waited_s(pid, thread)
                lost_s = now_s - before_s - _INTERVAL_S / 2 - (waiting_s - waited_s)
                # It began and ended between two looks: both of these intervals count.
                if stopped or was:
                    self.total_s += now_s - before_s
                elif lost_s > _MACHINE_S:
                    self.total_s += lost_s
                    self.machine_s = max(self.machine_s, lost_s)
                before_s, was, waited_s = now_s, stopped, waiting_s


def main(url: str, pid: int, ends: bool) -> None:
    """Ask until standard input ends, or until the service does, then print what was measured."""
    client = _Client(url)
    measured = Answering()
    stopped = _Stopped(pid)
    stopped.start()
    measured.earlier_stall_s = client.longest_stall_s()
    print("measuring", flush=True)
    asked_stall_s = -_STALL_INTERVAL_S
    # At least once, however short the block is.
    while not (select.select([sys.stdin], [], [], _INTERVAL_S)[0] and measured.asked):
        unfair_s = _waited_s(pid) + _waited_s(os.getpid()) + stopped.total_s
        asked_s = time.monotonic()
        try:
            measured.asked += 1
            client.get("/v2/health/live")
        except (OSError, ValueError):
            measured.failed += 1
            if ends:
                break
        taken_s = time.monotonic() - asked_s - (_waited_s(pid) + _waited_s(os.getpid()) + stopped.total_s - unfair_s)
        measured.slowest_s = max(measured.slowest_s, taken_s)
        if taken_s > _SLOW_S:
            measured.slow.append((asked_s, taken_s))
        if ends and asked_s - asked_stall_s > _STALL_INTERVAL_S:
            asked_stall_s = asked_s
            measured.longest_stall_s = max(measured.longest_stall_s, client.longest_stall_s())
    measured.longest_stall_s = max(measured.longest_stall_s, client.longest_stall_s())
    measured.machine_stall_s = stopped.machine_s
    print(json.dumps(vars(measured)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "ends")
