"""The worker's end of its channel.

Owns: the lock between the worker's threads, and the thread that says that the process lives. Must not know what a
message means.

A server that does not read costs nothing here: what it does not take waits (channel), and beats are left out meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence

from app.processes.channel import Channel
from app.worker.messages import Beat, FromWorker, ToWorker, from_server, to_server

BEAT_INTERVAL_S = 0.5


class ServerLink:
    """A context in which the heart beats."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._received: deque[bytes] = deque()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> ServerLink:
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._heart.join()

    def send(self, message: FromWorker, descriptors: Sequence[int] = ()) -> None:
        """Raises ConnectionError when the server is gone, ChannelError when it has not read for long."""
        with self._lock:
            self._channel.send(to_server(message), descriptors)

    def receive(self, timeout_s: float) -> ToWorker | None:
        """The next message, None when none came in time. Raises EOFError, ConnectionError."""
        ends_s = time.monotonic() + timeout_s
        while not self._received:
            left_s = ends_s - time.monotonic()
            if not self._waited(left_s) and left_s <= 0:
                return None
        return from_server(self._received.popleft())

    def flush(self, timeout_s: float) -> None:
        """Before the end: let the server have what still waits, if it reads. Raises EOFError, ConnectionError."""
        ends_s = time.monotonic() + timeout_s
        while self._channel.waiting and time.monotonic() < ends_s:
            self._waited(ends_s - time.monotonic())

    def _waited(self, timeout_s: float) -> bool:
        """Read and write what can be within this time; whether there was anything."""
        readable, writable = self._channel.wait(timeout_s)  # Not under the lock: the heart must beat meanwhile.
        with self._lock:
            if writable:
                self._channel.flush()
            if readable:
                self._received.extend(self._channel.receive())
        return readable or writable

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # The server is gone: the other thread hears it too.
            while not self._stop.wait(BEAT_INTERVAL_S):
                if not self._channel.waiting:
                    self.send(Beat())
