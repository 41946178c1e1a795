"""Whether a service answers without a pause while something happens to it, measured from another process.

    with answering(service):  # fails if /v2/health/live took more than 250 ms, or the loop stood still for 100 ms
        service.worker().kill()

The measuring process imports the standard library alone. What it, or the server, waited for a processor is subtracted:
on a busy machine that says nothing about the service. A test that stops the server itself does so outside the block.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

LIVE_S = 0.25
STALL_S = 0.1
_INTERVAL_S = 0.02


@dataclass
class Answering:
    """What was measured: times of answers in seconds, those that failed, and the loop's longest stall since its start.

    All zero until the block ends.
    """

    asked: int = 0
    slowest_s: float = 0.0
    failed: int = 0
    longest_stall_s: float = 0.0


@contextlib.contextmanager
def answering(service: Any, live_s: float = LIVE_S, stall_s: float = STALL_S) -> Iterator[Answering]:
    """Measure a ServiceProcess, or whatever has `url` and `process`, for the length of the block; then assert."""
    measured = Answering()
    command = [sys.executable, "-I", __file__, service.url, str(service.process.pid)]
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
    assert measured.failed == 0, f"{measured.failed} of {measured.asked} got no answer: {measured}"
    assert measured.slowest_s <= live_s, f"the service paused: {measured}"
    assert measured.longest_stall_s <= stall_s, f"the event loop stood still: {measured}"


def _waited_s(pid: int) -> float:
    """What a process's first thread has waited for a processor so far."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/task/{pid}/schedstat") as file:
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
            self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
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

    def _more(self) -> bytes:
        assert self._socket is not None
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionResetError("closed")
        return data


def main(url: str, pid: int) -> None:
    """Ask until standard input ends, then print what was measured."""
    client = _Client(url)
    measured = Answering()
    client.get("/v2/health/live")
    print("measuring", flush=True)
    while not select.select([sys.stdin], [], [], _INTERVAL_S)[0]:
        waited_s = _waited_s(pid) + _waited_s(os.getpid())
        asked_s = time.monotonic()
        try:
            measured.asked += 1
            client.get("/v2/health/live")
        except (OSError, ValueError):
            measured.failed += 1
        taken_s = time.monotonic() - asked_s - (_waited_s(pid) + _waited_s(os.getpid()) - waited_s)
        measured.slowest_s = max(measured.slowest_s, taken_s)
    found = re.search(rb"(?m)^anychip_event_loop_stall_seconds (\S+)", client.get("/metrics"))
    measured.longest_stall_s = float(found[1]) if found else 0.0
    print(json.dumps(vars(measured)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
