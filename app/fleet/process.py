"""One worker process as the event loop sees it, from spawn to death.

Owns: its channel, the messages it has not answered, its limits, and its end. Must not know what a batch is for, nor
what follows on a death (replica). Nothing here waits for a worker but `await`: the channel never blocks.

Limits count only the time in which this process could hear its workers. Time in which this process was itself stopped,
as by `docker pause`, or stood still counts against no worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from anychip_base.interpreter import module_path
from app import logs
from app.fleet.spawn import Spawned, spawn
from app.processes.arena import Arena
from app.processes.channel import Channel, ChannelError, NotReadError
from app.processes.packing import write_packed
from app.processes.place import AttendedClock
from app.processes.talk import Talk
from app.worker.begin import Begin, to_process
from app.worker.messages import (
    Beat,
    Done,
    Ended,
    Failed,
    FromWorker,
    HandOver,
    Load,
    Loaded,
    ModelLoaded,
    ModelUnloaded,
    Progress,
    Ready,
    Released,
    Run,
    Stats,
    Stop,
    ToWorker,
)
from app.worker.results import Arrays, map_overflow, read_results

if TYPE_CHECKING:
    from models import Model

log = logging.getLogger("anychip.workers")

STOP_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 10.0
"""Time after which a killed process that is still there is taken to be in a driver call that cannot be ended."""
_WATCH_INTERVAL_S = 0.25
_UNASKED_BYTES_PER_S = 2 << 20
"""Limit of what a worker may say unasked, two thousand times the usual."""


@dataclass(frozen=True)
class WorkerPlan:
    """A worker's models, the environment of its process, and its limits.

    `forks`: the process may be forked, as the environment may come when the libraries are loaded already. `serves`: the
    numbers of the models that it may have, None: all; `memory`: number of the arena's memory that they lie in. `bare`:
    the process gets nothing of the service's own environment.
    """

    load: Load
    environment: Mapping[str, str] = field(default_factory=dict)
    forks: bool = False
    serves: tuple[int, ...] | None = None
    memory: int = 0
    bare: bool = False
    start_timeout_s: float = 600.0
    batch_timeout_s: float = 30.0
    heartbeat_timeout_s: float = 10.0
    log_style: logs.Style = ("info", "auto")

    def has(self, index: int) -> bool:
        """Return True if the worker may have the model of this number."""
        return self.serves is None or index in self.serves

    def with_models(self, models: Sequence[Model | None]) -> WorkerPlan:
        """Return the same plan for other models, of which it takes its own."""
        own = [model if self.has(index) else None for index, model in enumerate(models)]
        return replace(self, load=self.load.with_models(own))


Message: TypeAlias = Failed | Stats | Released | HandOver | ModelLoaded | ModelUnloaded
"""Messages of a serving worker that are passed on to its owner."""
Computed: TypeAlias = "Callable[[WorkerProcess, Done, Sequence[Arrays]], None]"
"""Callback for a batch that is done, with the results of its items."""


class WorkerStartError(Exception):
    """Failure of a worker to start; the message is the worker's own sentence."""

    def __init__(self, reason: str, worker: WorkerProcess) -> None:
        super().__init__(reason)
        self.worker = worker


class WorkerProcess:
    """One worker from spawn to death. `loaded`: the numbers of the models that it has loaded so far. `ended` has the
    reason once it is given up. `abandoned`: its process could not be killed, and is left behind with whatever it holds,
    until `exited`.
    """

    _numbers = itertools.count(1)

    def __init__(
        self,
        device: str,
        plan: WorkerPlan,
        arena: Arena,
        computed: Computed,
        heard: Callable[[WorkerProcess, Message], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.device = device
        self.id = f"{device}#{next(self._numbers)}"
        self.plan = plan
        self.ready: Ready | None = None
        self.loaded: set[int] = set()
        self.answered = False
        self.end = "died"
        self.retiring = False
        self.abandoned = False
        self.drained = asyncio.Event()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.exited: asyncio.Future[None] = loop.create_future()
        self._arena = arena
        self._computed, self._heard = computed, heard
        self._talk: Talk | None = None
        self._spawned: Spawned | None = None
        self._started: asyncio.Future[Ready] = loop.create_future()
        self._closed: asyncio.Future[str] = loop.create_future()
        self._killed = False
        self._clock = AttendedClock(_WATCH_INTERVAL_S)
        self._sent: deque[tuple[Run, float]] = deque()  # Batches without an answer, and when they were sent.
        self._heard_s = self._answered_s = 0.0
        self._task = asyncio.create_task(self._live(), name=f"worker {self.id}")

    @property
    def pid(self) -> int | None:
        """The process's id, None before its start."""
        return self._spawned.child.pid if self._spawned else None

    def model(self, index: int) -> Model:
        """Return a model as this worker serves it; after a hand-over another may serve other weights and labels."""
        model = self.plan.load.plans[index].model
        assert model is not None
        return model

    def hold(self, index: int, loaded: Loaded | None) -> None:
        """Record that the worker has loaded a model on demand; `loaded` None: that it has unloaded it."""
        assert self.ready is not None
        held = tuple(loaded if number == index else each for number, each in enumerate(self.ready.loaded))
        self.ready = msgspec.structs.replace(self.ready, loaded=held)

    async def start(self) -> Ready:
        """Wait until the worker is ready. Raises WorkerStartError; the process is then gone."""
        done, _ = await asyncio.wait((self._started, self._task), return_when=asyncio.FIRST_COMPLETED)
        if self._started not in done:
            raise WorkerStartError(self.ended.result(), self)
        return self._started.result()

    def send(self, message: ToWorker) -> None:
        """Send a message, now or when the worker reads. A worker that is just dying is reported through `ended`."""
        if isinstance(message, Run):
            self._sent.append((message, self._clock.now_s()))
        if self._talk is not None:
            self._talk.say(message)

    def kill(self, reason: str, *, end: str = "") -> None:
        """End the process now. `end`: the kind of end, if it is not the one known so far."""
        self.end = end or self.end
        if self._spawned is not None:
            self._killed = True
            self._spawned.child.kill()
        self._close(reason)

    async def stop(self) -> None:
        """Stop the worker and wait; kill a process that does not stop. Idempotent."""
        if self.ready is not None:
            self.send(Stop())
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
        if not self._task.done():
            # A loading worker does not read its channel and has nothing to lose.
            self.kill("it was stopped")
        await self._task

    async def _live(self) -> None:
        """Run the process from spawn to death."""
        try:
            await self._begin()
            reason = await self._watched()
        except Exception as error:
            if not isinstance(error, OSError):  # The system's own refusal is told in the reason, once.
                log.exception("%s: its process could not be begun", self.id)
            reason = f"its process could not be begun: {error}"
        if self._talk is not None:
            self._talk.flush()
            self._talk.end(reason)
        if self._spawned is not None:
            child = self._spawned.child
            if not await child.ends_within(0.0 if self._killed else STOP_TIMEOUT_S):
                child.kill()
            if await child.ends_within(KILL_TIMEOUT_S):
                code = child.exited.result()
                reason += f", exit code {code}" if code else ""
            else:
                self.abandoned = True
                reason += f"; its process {child.pid} cannot be killed and is left behind, with what it holds"
                log.critical("%s: %s", self.id, reason)
        self.ended.set_result(reason)

    async def _begin(self) -> None:
        """Start the process and tell it what to do. Raises OSError."""
        descriptor = await asyncio.to_thread(write_packed, self.plan.load, "anychip-load")
        if self._closed.done():
            os.close(descriptor)
            return
        spawning = asyncio.create_task(
            spawn(self.id, forks=self.plan.forks, bare=self.plan.bare), name=f"spawn {self.id}"
        )
        try:
            await asyncio.wait(
                (spawning, self._closed),
                timeout=self.plan.start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not spawning.done():
                spawning.cancel()  # If a process begins after all, it finds its socket closed, and ends.
                self._close(f"it had no process within {self.plan.start_timeout_s:g} s")
                os.close(descriptor)
                return
            spawned = self._spawned = spawning.result()
        except BaseException:
            spawning.cancel()
            os.close(descriptor)
            raise
        if self._closed.done():  # It was killed meanwhile.
            self._killed = True
            spawned.child.kill()
        channel = Channel(spawned.socket)
        spawned.child.exited.add_done_callback(self._process_exited)
        plan, memory = self.plan, self.plan.memory
        environment = dict(plan.environment)
        if not plan.bare:  # It has the service's other variables, except those set since its start.
            environment = {**dict(os.environ.items() - spawned.environment.items()), **environment}
        afresh = plan.bare and not spawned.bare
        begin = Begin(self.id, environment, plan.log_style, self._arena.pools_in(memory), module_path(), afresh)
        with contextlib.suppress(OSError):  # It has ended already, which is heard next.
            channel.send(to_process(begin), (*self._arena.descriptors(memory), descriptor))
        self._talk = Talk(
            channel,
            FromWorker,
            self._handle,
            name=self.id,
            most_bytes_per_s=_UNASKED_BYTES_PER_S,
            asked=(Done, Failed),
        )
        self._talk.ended.add_done_callback(self._talk_ended)

    async def _watched(self) -> str:
        """Watch the worker until it is over and return why. Kill it if it hangs."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(asyncio.shield(self._closed), _WATCH_INTERVAL_S)
            now_s = self._clock.look()
            if self.ready is None:
                if now_s > self.plan.start_timeout_s:
                    self.kill(f"it was not ready within {self.plan.start_timeout_s:g} s")
                continue
            if self._sent:
                running_s = now_s - max(self._sent[0][1], self._answered_s)
                if running_s > self.plan.batch_timeout_s:
                    self.kill(f"it hung: a batch was not done after {running_s:.1f} s", end="hung")
            if now_s - self._heard_s > self.plan.heartbeat_timeout_s:
                self.kill(f"it hung: nothing was heard of it for {now_s - self._heard_s:.1f} s", end="hung")

    def _process_exited(self, _: asyncio.Future[int | None]) -> None:
        # A process that it has started may hold its socket; else the last messages come before this.
        asyncio.get_running_loop().call_later(_WATCH_INTERVAL_S, self._close, "it ended")
        self.exited.set_result(None)

    def _talk_ended(self, ended: asyncio.Future[str]) -> None:
        assert self._talk is not None
        if self._talk.error is None:
            self._close(ended.result())
        else:  # A worker that breaks the rules cannot be trusted.
            self.kill(ended.result(), end="hung" if isinstance(self._talk.error, NotReadError) else "")

    def _handle(self, message: FromWorker) -> None:
        self._heard_s = self._clock.now_s()
        match message:
            case Beat():
                pass
            case Done():
                run = self._answered(message.batch_id)
                self.answered = True
                self._computed(self, message, self._results(run, message))
            case Failed():
                self._answered(message.batch_id)
                self._heard(self, message)
            case Progress():
                self.loaded.add(message.model)
            case Ready():
                self.ready = message
                self._started.set_result(message)
            case Ended():
                self.end = message.kind
                self._close(message.reason)
            case Stats() | Released() | HandOver() | ModelLoaded() | ModelUnloaded():
                self._heard(self, message)

    def _answered(self, batch_id: int) -> Run:
        """Return the batch that is answered, always the oldest. Raises ChannelError."""
        if not self._sent or self._sent[0][0].batch_id != batch_id:
            raise ChannelError(f"it answered batch {batch_id}, which is not its next one")
        self._answered_s = self._heard_s
        return self._sent.popleft()[0]

    def _results(self, run: Run, done: Done) -> list[Arrays]:
        """Read the results of a batch. Raises ResultError, ChannelError, OSError, ValueError."""
        if done.small:
            return read_results(done.results, None, run.slots, done.small)
        overflow = None
        if done.overflow_bytes:
            assert self._talk is not None
            overflow = map_overflow(self._talk.take_descriptor(), done.overflow_bytes)
        return read_results(done.results, self._arena.results(run.model), run.slots, overflow)

    def _close(self, reason: str) -> None:
        if not self._closed.done():
            self._closed.set_result(reason)
