"""Workers as the event loop sees them: one process from spawn to death, and the place on a device that always has one.

Owns: a worker's channel, the batches it has not answered, and its limits; the plan that the next worker of a place
follows, and what is counted of workers that died. Must not know what a batch is for. app.processes.place owns when a
worker is started, watched, replaced and given up. All of it runs in the event loop's thread: workers also die with the
thread that started them (see main).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from anychip_base.interpreter import module_path
from app.core import Loaded, ServedOn
from app.fleet.spawn import SpawnedChild, spawn_with
from app.link import ReturnedBytes
from app.processes.arena import Arena
from app.processes.channel import ChannelError
from app.processes.place import Cause, ChildStartError, ChildStatus, PlaceStatus, Supervisor
from app.worker.begin import Begin
from app.worker.messages import (
    Beat,
    Done,
    Ended,
    Failed,
    FromWorker,
    HandOver,
    ModelLoaded,
    ModelUnloaded,
    Ready,
    Release,
    Released,
    Run,
    Stats,
    Stop,
    ToWorker,
    WorkerPlan,
)
from app.worker.results import Arrays, map_large, read_results
from models import WeightsError
from models.weights.opened import mend

if TYPE_CHECKING:
    from models import Model

log = logging.getLogger("anychip.workers")

_UNASKED_BYTES_PER_S = 2 << 20
"""Limit of what a worker may say unasked, two thousand times the usual."""


Message: TypeAlias = Failed | Stats | Released | HandOver | ModelLoaded | ModelUnloaded
"""Messages of a serving worker that are passed on to its owner."""


@dataclass(frozen=True)
class Events:
    """Callbacks for the owner of workers.

    `ready`: it serves from now on; `computed`: a batch is done, with the results of its items; `retiring`: it is to get
    nothing more; `gone`: once for each that was prepared, with the reason. `died`: the place on a device has lost its
    worker: "died", "hung", "lost" (its device), "leaked" or "start" (it was never ready); `broken`: none starts there
    for a while.
    """

    ready: Callable[[WorkerProcess], None]
    computed: Callable[[WorkerProcess, Done, Sequence[Arrays]], None]
    message: Callable[[WorkerProcess, Message], None]
    retiring: Callable[[WorkerProcess], None]
    gone: Callable[[WorkerProcess, str], None]
    died: Callable[[str, str], None]
    broken: Callable[[], None]


class WorkerProcess(SpawnedChild):
    """One worker process. `ready`: what it has reported of its models; `loaded`: the numbers of those that it has
    loaded so far; `left_out`: of those whose files are lost, with the reason, if it `mends` copies before it loads.
    """

    look_s, end_s, kill_s = 0.25, 10.0, 10.0
    _numbers = itertools.count(1)

    def __init__(self, device: str, plan: WorkerPlan, arena: Arena, events: Events) -> None:
        super().__init__(f"{device}#{next(self._numbers)}")
        self.mends = False
        self.left_out: dict[int, str] = {}
        self.start_s = plan.start_timeout_s
        self.device, self.plan = device, plan
        self.ready: Ready | None = None
        self.loaded: set[int] = set()
        self._arena, self._events = arena, events
        self._sent: deque[tuple[Run, float]] = deque()  # Batches without an answer, and when they were sent.
        self._answered_s = 0.0
        self._releasing: asyncio.Future[ReturnedBytes] | None = None

    def model(self, index: int) -> Model:
        """Return a model as this worker serves it; after a hand-over another may serve other weights and labels."""
        model = self.plan.plans[index].model
        assert model is not None
        return model

    def served_on(self, index: int) -> ServedOn:
        """Return how this worker serves a model that it has loaded."""
        served_on = None if self.ready is None else self.ready.loaded[index]
        assert served_on is not None
        return served_on

    def hold(self, index: int, loaded: Loaded | None) -> None:
        """Record that the worker has loaded a model on demand; `loaded` None: that it has unloaded it."""
        assert self.ready is not None
        held = tuple(loaded if number == index else each for number, each in enumerate(self.ready.loaded))
        self.ready = msgspec.structs.replace(self.ready, loaded=held)

    def send(self, message: ToWorker) -> None:
        """Send a message at the end of this turn of the loop."""
        if isinstance(message, Run):
            self._sent.append((message, self._clock.now_s()))
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
        """Answer those that wait for a release: bytes by rung."""
        asked, self._releasing = self._releasing, None
        if asked is not None:
            asked.set_result(ReturnedBytes(device, host))

    async def begin(self) -> None:
        """Start the process and tell it what to load. Raises OSError."""
        if self.mends:
            self.left_out = await asyncio.to_thread(_mended, self.plan)
            models = enumerate(self.plan.models)
            self.plan = self.plan.with_models([None if index in self.left_out else each for index, each in models])
        plan, memory = self.plan, self.plan.memory
        try:
            spawning = spawn_with(plan, "anychip-load", self.name, forks=plan.forks, bare=plan.confined)
            spawned, packed = await asyncio.wait_for(spawning, plan.start_timeout_s)
        except asyncio.TimeoutError:
            raise OSError(f"it had no process within {plan.start_timeout_s:g} s") from None
        environment = dict(plan.environment)
        if not plan.confined:  # It has the service's other variables, except those set since its start.
            environment = {**dict(os.environ.items() - spawned.environment.items()), **environment}
        afresh = plan.confined and not spawned.bare
        begin = Begin(self.name, environment, plan.log_style, self._arena.pools_in(memory), module_path(), afresh)
        self.connect(
            spawned,
            begin,
            (*self._arena.descriptors(memory), packed),
            FromWorker,
            self._heard,
            most_bytes_per_s=_UNASKED_BYTES_PER_S,
            asked=(Done, Failed),
        )

    def disconnect(self) -> None:
        """Tell it to stop, and close the channel. Idempotent."""
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
        return math.inf if self.ready is None else self.plan.heartbeat_timeout_s

    def has_work(self) -> bool:
        """Return True while a batch has no answer."""
        return bool(self._sent)

    def look(self) -> None:
        """Kill it if a batch takes too long."""
        if self._sent:
            running_s = self._clock.now_s() - max(self._sent[0][1], self._answered_s)
            if running_s > self.plan.batch_timeout_s:
                self.kill(f"it hung: a batch was not done after {running_s:.1f} s", Cause.HUNG)

    def move(self, status: ChildStatus) -> None:
        """Change the status, and tell the owner whether it takes work. Raises ValueError."""
        super().move(status)
        if status is ChildStatus.READY:
            self._events.ready(self)
        elif status is ChildStatus.RETIRING:
            self._events.retiring(self)

    def gone(self) -> None:
        """Tell the owner that its batches are lost."""
        if self.ready is not None:
            self._events.gone(self, self.reason)

    def _heard(self, message: FromWorker) -> None:
        """Handle a message. Raises for a false one; then its process is killed."""
        if self.ready is not None:  # The limit of a start is for all of it.
            self.hear()
        match message:
            case Beat():
                pass
            case Done():
                run = self._answered(message.batch_id)
                self.has_served = True
                self._events.computed(self, message, self._results(run, message))
                self.leave()
            case Failed():
                self._answered(message.batch_id)
                self._events.message(self, message)
                self.leave()
            case ModelLoaded() if self.ready is None:
                self.loaded.add(message.model)
            case Ready():
                self.ready = message
                self.hear()
                self.move(ChildStatus.PREPARED)
            case Ended():
                self.end(message.reason, Cause(message.kind))
            case Stats() | Released() | HandOver() | ModelLoaded() | ModelUnloaded():
                self._events.message(self, message)

    def _answered(self, batch_id: int) -> Run:
        """Return the batch that is answered, always the oldest. Raises ChannelError."""
        if not self._sent or self._sent[0][0].batch_id != batch_id:
            raise ChannelError(f"it answered batch {batch_id}, which is not its next one")
        self._answered_s = self._clock.now_s()
        return self._sent.popleft()[0]

    def _results(self, run: Run, done: Done) -> list[Arrays]:
        """Read the results of a batch. Raises ResultError, ChannelError, OSError, ValueError."""
        large = map_large(self.talk.take_descriptor(), done.large_bytes) if done.large_bytes else None
        return read_results(done.results, len(run.slots), done.small if large is None else large)


class Replica(Supervisor[WorkerProcess]):
    """One place on a device; its workers follow `plan`, which a hand-over changes."""

    def __init__(self, device: str, plan: WorkerPlan, arena: Arena, events: Events) -> None:
        self.device, self.plan = device, plan
        self._arena, self._events = arena, events
        self._mends = False
        super().__init__(self._next, log, breaks=True, exclusive=True)

    def worker(self, plan: WorkerPlan) -> WorkerProcess:
        """Make a worker that follows `plan`, for this place or to take over from the one in it."""
        return WorkerProcess(self.device, plan, self._arena, self._events)

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
        self._events.died(self.device, "hung" if child.cause is Cause.FROZEN else child.cause.value)
        if child.status is ChildStatus.QUARANTINED or self.status is PlaceStatus.BROKEN:
            log.error("%s is %s: %s", self.device, self.status.value, self.reason)
            self._events.broken()


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
