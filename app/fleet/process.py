"""Workers as the event loop sees them: how their processes are spawned, one from spawn to death, and the place of each.

A process is forked from one that has imported its libraries, or is a fresh interpreter. A worker that touches no driver
(`forks` in backends.vendors.table) is forked and goes on: it is there a second or two sooner, and shares the memory of
its libraries with the others. One that touches a driver is forked and replaced by a fresh interpreter. One that runs a
foreign file is forked from a process that never had the server's data.

app.processes.place owns when a worker is started, watched, replaced and given up. All of it runs in the event loop's
thread: workers also die with the thread that started them (see main).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from anychip_base.interpreter import bare_environment, module_path
from app import clock
from app.core import Loaded
from app.link import ReturnedBytes
from app.prepared import CONFINED, WORKERS
from app.processes import fork_server
from app.processes.arena import Arena
from app.processes.channel import Channel, ChannelError, NotReadError, Talk, close_all, socket_pair, to_packet
from app.processes.fork_server import ForkServer, discard_prepared, is_prepared, start
from app.processes.packing import write_packed
from app.processes.place import Cause, Child, ChildStartError, ChildStatus, SupervisedChild, Supervisor
from app.worker.main import Begin, fresh_command, in_bytes
from app.worker.messages import (
    Beat,
    Done,
    Ended,
    Failed,
    FromWorker,
    Release,
    Run,
    Stats,
    Stop,
    ToWorker,
    WorkerPlan,
)
from app.worker.results import Arrays, map_large, read_results
from models import Model, WeightsError
from models.weights.opened import mend

log = logging.getLogger("anychip.workers")

_fork_servers: dict[str, ForkServer] = {}
_UNASKED_BYTES_PER_S = 2 << 20
"""Limit of what a worker may say unasked, two thousand times the usual."""


async def spawn(begin: Begin, descriptors: Sequence[int] = (), *, forks: bool) -> tuple[Child, Channel]:
    """Start a process and send its first message; return it and our end of its channel. Raises OSError.

    `descriptors`: go with the message; they are closed here. `forks`: it may go on with a fork server's libraries, if
    there is one.
    """
    bare = begin.bare and forks and not begin.program
    main = CONFINED if bare else WORKERS
    child = None
    with contextlib.ExitStack() as undo:
        undo.callback(close_all, descriptors)
        if main not in _fork_servers and (bare or is_prepared(main)):
            _fork_servers[main] = ForkServer(partial(fork_server.begin, main, bare_environment() if bare else None))
        ours, theirs = socket_pair()
        channel = Channel(ours)
        undo.callback(channel.close)
        with theirs:  # Ours would keep the socket open after the process's death.
            if main in _fork_servers:
                try:
                    # A process forked later finds its socket closed, and ends.
                    child = await _fork_servers[main].fork(theirs.fileno(), fresh=not forks)
                    if bare:  # It has nothing of the server's already.
                        begin = msgspec.structs.replace(begin, bare=False)
                except OSError as error:
                    log.warning("%s: no process could be forked (%s); one is spawned", begin.name, error)
            if child is None:
                child = Child(start(fresh_command(theirs.fileno()), dict(os.environ), theirs))
        undo.pop_all()
    try:
        with contextlib.suppress(OSError):  # It has ended already, which is seen next.
            channel.send(to_packet((begin,)), descriptors)
    except ChannelError as error:
        child.kill()
        channel.close()
        raise OSError(f"its first message cannot be sent: {error}") from error
    return child, channel


async def pack(content: object, kind: str) -> int:
    """Call `write_packed` outside the loop; cancelled, it leaves no descriptor open. Raises TypeError, OSError."""
    packing = asyncio.ensure_future(asyncio.to_thread(write_packed, content, kind))
    try:
        return await asyncio.shield(packing)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError, TypeError):
            os.close(await packing)
        raise


class SpawnedChild(SupervisedChild):
    """A child that talks once it has had its first message."""

    talk: Talk

    def connect(self, child: Child, channel: Channel, kind: Any, handle: Callable[[Any], None], **limits: Any) -> None:
        """Begin to talk with a child: as Talk says."""
        self.process = child
        self.talk = Talk(channel, kind, handle, name=self.name, **limits)
        self.talk.ended.add_done_callback(self._talk_ended)

    def disconnect(self) -> None:
        if self.process is not None:
            self.talk.end(self.over.result())

    def _talk_ended(self, ended: asyncio.Future[str]) -> None:
        if self.talk.error is None:
            self.end(ended.result())
        else:  # A child that breaks the rules cannot be trusted.
            hung = isinstance(self.talk.error, NotReadError)
            self.kill(ended.result(), Cause.HUNG if hung else Cause.DIED)


async def stop_forking() -> None:
    """End all fork servers: no worker is wanted any more. Idempotent."""
    for main in (WORKERS, CONFINED):
        discard_prepared(main)
    while _fork_servers:
        await _fork_servers.popitem()[1].stop()


class Owner(Protocol):
    """Owner of workers, who hears of them."""

    def worker_ready(self, worker: WorkerProcess) -> None:
        """Note that it serves from now on."""

    def worker_retires(self, worker: WorkerProcess) -> None:
        """Note that it is to get nothing more."""

    def worker_gone(self, worker: WorkerProcess, reason: str) -> None:
        """Note that it has ended: once for each that was prepared."""

    def worker_reported(self, worker: WorkerProcess, message: FromWorker) -> None:
        """Handle a message of a serving worker, other than Done."""

    def worker_computed(self, worker: WorkerProcess, done: Done, results: Sequence[Arrays]) -> None:
        """Handle the results of a batch: one for each item."""

    def worker_lost(self, replica: Replica, kind: str) -> None:
        """Note that a place has lost its worker: "died", "hung", "lost" (its device), "leaked" or "start" (it was never
        ready).
        """


class WorkerProcess(SpawnedChild):
    """One worker process. `loaded`: how it serves the models that it has loaded so far, by their numbers; `stats`: its
    last report; `left_out`: models whose files are lost, with the reason, if it `mends` copies before it loads.
    """

    look_s, end_s, kill_s = 0.25, 10.0, 10.0
    _numbers = itertools.count(1)

    def __init__(self, device: str, plan: WorkerPlan, arena: Arena, owner: Owner) -> None:
        super().__init__(f"{device}#{next(self._numbers)}")
        self.mends = False
        self.left_out: dict[int, str] = {}
        self.start_s = plan.start_timeout_s
        self.device, self.plan = device, plan
        self.loaded: dict[int, Loaded] = {}
        self.stats: Stats | None = None
        self._arena, self._owner = arena, owner
        self._sent: deque[Run] = deque()  # Batches without an answer.
        self._begun_s = 0.0  # When the first of them was its next one.
        self._releasing: asyncio.Future[ReturnedBytes] | None = None

    def model(self, index: int) -> Model:
        """Return a model as this worker serves it; after a hand-over another may serve other weights and labels."""
        model = self.plan.plans[index].model
        assert model is not None
        return model

    @property
    def is_provisional(self) -> bool:
        """True if a worker with more time may serve some models faster; models on demand have none."""
        plans = self.plan.plans
        return any((on.staged or on.grows) and not plans[index].on_demand for index, on in self.loaded.items())

    def send(self, message: ToWorker) -> None:
        """Send a message at the end of this turn of the loop."""
        if isinstance(message, Run):
            if not self._sent:
                self._begun_s = clock.monotonic()
            self._sent.append(message)
        self.talk.say(message)

    def release(self) -> asyncio.Future[ReturnedBytes]:
        """Have it release cached memory after the batches it has. Callers that ask meanwhile share the answer, so that
        they cannot fill the channel.
        """
        if self._releasing is None:
            self._releasing = asyncio.get_running_loop().create_future()
            self.send(Release())
        return self._releasing

    def released(self, device: Mapping[int, int], host: Mapping[int, int]) -> None:
        """Answer those that wait for a release: bytes by release level."""
        asked, self._releasing = self._releasing, None
        if asked is not None:
            asked.set_result(ReturnedBytes(device, host))

    async def begin(self) -> None:
        if self.mends:
            self.left_out = await asyncio.to_thread(_mended, self.plan)
            models = enumerate(self.plan.models)
            self.plan = self.plan.with_models([None if index in self.left_out else each for index, each in models])
        plan, memory = self.plan, self.plan.memory
        # One that is not confined has the service's other variables, as they are now.
        environment = in_bytes({**({} if plan.confined else os.environ), **plan.environment})
        begin = Begin(
            self.name, environment, plan.log_style, module_path(), self._arena.pools_in(memory), bare=plan.confined
        )
        try:
            child, channel = await asyncio.wait_for(self._spawned(begin), plan.start_timeout_s)
        except asyncio.TimeoutError:
            raise OSError(f"it had no process within {plan.start_timeout_s:g} s") from None
        self.connect(
            child,
            channel,
            FromWorker,
            self._received,
            most_bytes_per_s=_UNASKED_BYTES_PER_S,
            asked=(Done, Failed),
        )

    async def _spawned(self, begin: Begin) -> tuple[Child, Channel]:
        with contextlib.ExitStack() as undo:
            descriptors = self._arena.descriptors(self.plan.memory)
            undo.callback(close_all, descriptors)
            packed = await pack(self.plan, "anychip-load")
            undo.pop_all()
        return await spawn(begin, (*descriptors, packed), forks=self.plan.forks)

    def disconnect(self) -> None:
        if self.process is not None:
            self.talk.say(Stop())
            self.talk.flush()
        super().disconnect()

    def stop(self) -> None:
        """Let it finish; one that loads does not read its channel, and has nothing to lose."""
        if self.status is ChildStatus.STARTING:
            super().stop()
        else:
            self.end("it was stopped", Cause.STOPPED)

    def answer_s(self) -> float:
        """Return how long it may be silent: it sends beats once it has loaded."""
        return self.plan.heartbeat_timeout_s if self.started.done() else math.inf

    def has_work(self) -> bool:
        return bool(self._sent)

    def forgive(self, seconds: float, now_s: float) -> None:
        super().forgive(seconds, now_s)
        self._begun_s = min(self._begun_s + seconds, now_s)

    def look(self) -> None:
        if self._sent:
            running_s = clock.monotonic() - self._begun_s
            if running_s > self.plan.batch_timeout_s:
                self.kill(f"it hung: a batch was not done after {running_s:.1f} s", Cause.HUNG)

    def move(self, status: ChildStatus) -> None:
        """Change the status, and tell the owner whether it takes work. Raises ValueError."""
        super().move(status)
        if status is ChildStatus.READY:
            self._owner.worker_ready(self)
        elif status is ChildStatus.RETIRING:
            self._owner.worker_retires(self)

    def gone(self) -> None:
        if self.started.done():
            self._owner.worker_gone(self, self.reason)

    def _received(self, message: FromWorker) -> None:
        if self.started.done():  # The limit of a start is for all of it.
            self.received_s = clock.monotonic()
        match message:
            case Done():
                run = self._answered(message.batch_id)
                self.has_served = True
                large = map_large(self.talk.take_descriptor(), message.large_bytes) if message.large_bytes else None
                results = read_results(message.results, len(run.slots), message.small if large is None else large)
                self._owner.worker_computed(self, message, results)
            case Failed():
                self._answered(message.batch_id)
                self._owner.worker_reported(self, message)
            case Beat():
                pass
            case Loaded():
                if not 0 <= message.model < len(self.plan.plans) or self.plan.plans[message.model].model is None:
                    raise ChannelError(f"it has loaded model {message.model}, which is none of its own")
                message.device = self.device  # A worker may say anything.
                if self.started.done():
                    self._owner.worker_reported(self, message)
                else:
                    self.loaded[message.model] = message
            case Ended():
                self.end(message.reason, Cause(message.kind))
            case Stats():
                self.stats = message
                if not self.started.done():
                    self.received_s = clock.monotonic()
                    self.move(ChildStatus.PREPARED)
                self._owner.worker_reported(self, message)
            case _:
                self._owner.worker_reported(self, message)
        if self.status is ChildStatus.RETIRING:
            self.leave()

    def _answered(self, batch_id: int) -> Run:
        if not self._sent or self._sent[0].batch_id != batch_id:
            raise ChannelError(f"it answered batch {batch_id}, which is not its next one")
        self._begun_s = self.received_s
        return self._sent.popleft()


class Replica(Supervisor[WorkerProcess]):
    """One place on a device; its workers follow `plan`, which a hand-over changes."""

    def __init__(self, device: str, plan: WorkerPlan, arena: Arena, owner: Owner) -> None:
        self.device, self.plan = device, plan
        self._arena, self._owner = arena, owner
        self._mends = False
        super().__init__(self._next, log, breaks=True, exclusive=True)

    def worker(self, plan: WorkerPlan) -> WorkerProcess:
        """Make a worker that follows `plan`, for this place or to take over from the one in it."""
        return WorkerProcess(self.device, plan, self._arena, self._owner)

    def _next(self) -> WorkerProcess:
        """Make the worker of this place; after one that could not start it looks first whether copies are damaged."""
        worker = self.worker(self.plan)
        worker.mends = self._mends
        return worker

    @property
    def loaded(self) -> set[int]:
        """The numbers of the models that its workers have loaded, also of one that is not ready yet."""
        return {index for worker in self.children for index in worker.loaded}

    async def wait_ready(self) -> None:
        """Wait until a worker is ready. Raises ChildStartError with the worker's own sentence."""
        try:
            await asyncio.shield(self.ready)
        except ChildStartError:
            raise ChildStartError(self.child.reason) from None

    def lost(self, child: WorkerProcess) -> None:
        """Count a worker that died; the first one that cannot start is an error of the whole service."""
        if child.cause is Cause.START and self.restarts == 1:
            self.close()
            return
        self._mends = child.cause is Cause.START
        self._owner.worker_lost(self, "hung" if child.cause is Cause.FROZEN else child.cause.value)


def _mended(plan: WorkerPlan) -> dict[int, str]:
    """Make damaged copies of files again. Return the numbers of models whose files are lost, with the reason."""
    lost = {}
    for index, model in enumerate(plan.models):
        if model is not None and model.files is not None:
            try:
                mend(model.files)
            except WeightsError as error:
                lost[index] = str(error)
    return lost
