"""Doubles that decode and compute in the event loop of the service, instead of processes: in virtual seconds.

    Decoders ─► DecoderProcess ═ socket pair, inbox ═ Decoder   in place of what is forked
    Fleet ─► Replica ─► WorkerProcess      ═ socket pair        ═ Worker

Owns: the other ends of these socket pairs, which read and write the real messages. The rest of the server is unchanged:
only the two names that make processes are replaced, `app.fleet.spawn.spawn` and `app.decoding.pool.ForkServer`.
As parameters they would pass through five constructors that have no other use for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from app.decoder.messages import PACKET_BYTES, Decoded, Inbox, Job, Status
from app.decoding import pool as decoding_pool
from app.decoding.pool import CREDITS
from app.fleet import spawn as fleet_spawn
from app.fleet.spawn import Spawned
from app.processes.channel import Channel, reader, socket_pair, to_packet
from app.worker.begin import begin_of
from app.worker.messages import BEAT_INTERVAL_S, Beat, Done, Ready, Run, Stop, ToWorker
from app.worker.results import write_results
from tests.support import doubles
from tests.support.doubles import loaded_as

FIRST_PID = doubles.Process.pid
_read, _jobs = reader(ToWorker), reader(Job)


class Process(doubles.Process):
    """Process that does one work after the other, each for so long, by its own clock: a late loop changes nothing."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.pid = pid
        self._waiting: deque[tuple[float, Any]] = deque()  # Begin of the wait, work.
        self._free_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._paused_s = 0.0

    def takes_s(self, work: Any) -> float:
        """Return how long this work takes."""
        raise NotImplementedError

    def begun(self, work: Any) -> None:
        """Note that it begins to work on this."""

    def ended(self, work: Any) -> None:
        """Report that the work is done."""
        raise NotImplementedError

    def add(self, work: Any) -> None:
        """Queue this work."""
        self._waiting.append((self.loop.time(), work))
        if self._timer is None:
            self._next()

    def _next(self) -> None:
        if self._waiting:
            since_s, work = self._waiting.popleft()
            takes_s = self.takes_s(work)
            self._free_s = max(self._free_s, since_s) + takes_s
            self.begun(work)
            self._timer = self.loop.call_at(self._free_s, self._done, work)

    def _done(self, work: Any) -> None:
        self._timer = None
        self.ended(work)
        if self._timer is None:
            self._next()

    def pause(self, seconds: float) -> None:
        """Stand still for so long from now, like a stopped process."""
        self._free_s = max(self._free_s, self.loop.time()) + seconds
        if self._timer is not None:
            timer, work = self._timer, self._timer._args[0]
            timer.cancel()
            self._timer = self.loop.call_at(timer.when() + seconds, self._done, work)

    def kill(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        super().kill()


class Decoder(Process):
    """Process that decodes an image in `image_s(job)` of all; the slot's content is unchanged."""

    def __init__(self, pid: int, connection: int, inbox: int, all_of_them: Processes) -> None:
        super().__init__(pid)
        self._all, self.images = all_of_them, 0
        self._socket = socket.socket(fileno=os.dup(connection))
        self._socket.setblocking(False)
        self._memory = os.dup(inbox)
        self._inbox = Inbox(CREDITS, (os.fstat(inbox).st_size - 4096) // CREDITS, self._memory)
        self.loop.add_reader(self._socket, self._readable)

    def takes_s(self, work: Job) -> float:
        return self._all.image_s(work)

    def begun(self, work: Job) -> None:
        self._inbox.begin(work.token)

    def ended(self, work: Job) -> None:
        self._inbox.end()
        self.images += 1
        with contextlib.suppress(OSError):
            self._socket.send(to_packet([Decoded(work.token, Status.PLACED, 640, 480)]))

    def _readable(self) -> None:
        try:
            packet = self._socket.recv(PACKET_BYTES)
        except OSError:
            packet = b""
        if not packet:
            self.kill()
            return
        for job in _jobs(packet):
            self.add(job)

    def kill(self) -> None:
        if not self.exited.done():
            self.loop.remove_reader(self._socket)
            self._socket.close()
            os.close(self._memory)
        super().kill()


class Worker(Process):
    """Process that computes a batch in `batch_s(run)` of all; each result is a single zero."""

    def __init__(self, pid: int, end: socket.socket, all_of_them: Processes) -> None:
        super().__init__(pid)
        self._all = all_of_them
        self._channel = Channel(end)
        self._began = False
        self._beat: asyncio.TimerHandle | None = None
        self.loop.add_reader(end, self._readable)

    def takes_s(self, work: Run) -> float:
        return self._all.batch_s(work)

    def ended(self, work: Run) -> None:
        layouts, small, _, _ = write_results([(np.zeros(1, np.float32),)] * len(work.slots))
        self._say(Done(work.batch_id, layouts, self.takes_s(work), small=small))

    def pause(self, seconds: float) -> None:
        super().pause(seconds)
        if self._beat is not None:
            self._beat.cancel()
            self._beat = self.loop.call_later(seconds, self._alive)

    def _say(self, message: Any) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(to_packet((message,)))

    def _alive(self) -> None:
        self._say(Beat())
        self._beat = self.loop.call_later(BEAT_INTERVAL_S, self._alive)

    def _readable(self) -> None:
        try:
            messages = self._channel.receive()
        except (EOFError, OSError):
            self.kill()
            return
        for data in messages:
            if not self._began:
                self._began = True
                begin = begin_of(data)
                loaded = loaded_as("virtual", dict(self._all.latency_s))
                self._say(Ready("null:0", "virtual", (loaded,) * len(begin.pools)))
                self._alive()
                continue
            for message in _read(data):
                match message:
                    case Run():
                        self.add(message)
                    case Stop():
                        self.kill()

    def kill(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        if not self.exited.done():
            self.loop.remove_reader(self._channel.fileno())
            self._channel.close()
        super().kill()


@dataclass
class Processes:
    """Maker and keeper of the doubles of processes; also the double of decoders' ForkServer.

    `image_s`: of a job; `batch_s`: of a run, both from now on; `latency_s`: latency by batch size that a worker reports
    at its start.
    """

    image_s: Callable[[Job], float]
    batch_s: Callable[[Run], float]
    latency_s: Mapping[int, float]
    decoders: list[Decoder] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    pid: int = FIRST_PID - 1
    ready: bool = True

    def _pid(self) -> int:
        return FIRST_PID + len(self.decoders) + len(self.workers)

    async def spawn(self, name: str, *, forks: bool, bare: bool = False) -> Spawned:
        """Make a worker, like app.fleet.spawn.spawn."""
        ours, theirs = socket_pair()
        self.workers.append(Worker(self._pid(), theirs, self))
        return Spawned(self.workers[-1], ours, {})  # type: ignore[arg-type]

    async def fork(self, connection: int, inbox: int, *, fresh: bool = False) -> Decoder:
        """Make a decoder, like app.processes.fork_server.ForkServer."""
        self.decoders.append(Decoder(self._pid(), connection, inbox, self))
        return self.decoders[-1]

    async def stop(self) -> None:
        """Do nothing: what was forked has ended."""

    def parts(self, name: str) -> Sequence[Process]:
        """Return the processes of "worker" or of "decoders", else all of them."""
        parts: dict[str, Sequence[Process]] = {"worker": self.workers, "decoders": self.decoders}
        return parts.get(name, [*self.workers, *self.decoders])


@contextlib.contextmanager
def in_place_of_processes(processes: Processes) -> Iterator[None]:
    """Use these doubles in services that start in this context."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fleet_spawn, "spawn", processes.spawn)
        patched.setattr(decoding_pool, "ForkServer", lambda begin: processes)
        yield
