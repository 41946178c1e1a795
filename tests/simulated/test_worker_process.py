"""Worker processes as the event loop sees them, real ones on the null device: every way to end, and none blocks."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import uvloop

from app.fleet.process import Replica, WorkerProcess
from app.processes.arena import Arena
from app.processes.channel import MAX_WAITING_BYTES
from app.processes.place import Cause, Child, ChildStatus, PlaceStatus
from app.worker.messages import ModelPlan, Release, Run, Stats, WorkerPlan
from backends import Device
from models import Options, open_model, parse_spec
from tests.support.doubles import owner
from tests.support.load import until
from tests.support.loop_guard import CallbackGuard, Held, Witness, guarded_loop, told

WAIT_S = 240
MODEL = open_model(parse_spec("resnet18:random"), Path("nowhere"))


class Watched:
    """An arena, and what its owner heard."""

    def __init__(self, null="depth=2,output_mb=2", **plan):
        self.arena = Arena([(int(np.prod(MODEL.input_shape)), 8)])
        self.arena.slot(0, 0)[:] = 128
        self.messages = asyncio.Queue()
        self.said = []
        self.owner = owner(
            worker_ready=lambda worker: self.said.append("ready"),
            worker_reported=lambda worker, message: self.messages.put_nowait(message),
            worker_computed=lambda worker, done, results: self.messages.put_nowait((done, results)),
            worker_retires=lambda worker: self.said.append("retiring"),
            worker_gone=lambda worker, reason: self.said.append("gone"),
            worker_lost=lambda replica, kind: self.said.append(kind),
        )
        model, device = ModelPlan(MODEL, "auto", "auto", (1, 2)), Device("null:0", "none", 1 << 30, "fp32")
        environment = {"ANYCHIP_NULL": null}
        self.plan = WorkerPlan((model,), device, ballast=bytes(11 << 20), environment=environment, **plan)
        gc.freeze()  # As the server does it once it is loaded: to look through all of torch takes 150 ms.

    async def __aenter__(self):
        return self

    async def __aexit__(self, *raised):
        await self.replica.stop()
        self.arena.close()

    async def worker(self, **plan):
        """Start a worker and wait until it is ready; return it. Raises ChildStartError."""
        self.replica = Replica("null:0", replace(self.plan, **plan), self.arena, self.owner)
        await asyncio.wait_for(self.replica.wait_ready(), WAIT_S)
        return self.replica.child

    async def hear(self, kind):
        while True:
            message = await asyncio.wait_for(self.messages.get(), WAIT_S)
            if isinstance(message, kind):
                return message


def run(batch_id, slots=(0,)):
    return Run(batch_id, 0, slots, (Options(tensors=True),), 2)


async def until_gone(worker):
    """Wait until its process has ended, or is given up; return why."""
    await until(lambda: worker.status in (ChildStatus.ENDED, ChildStatus.QUARANTINED), blocks=False)
    return worker.reason


def on_uvloop(test):
    """As the service runs; it hears of the ends of sockets otherwise than asyncio's own loop. Nothing holds it up."""

    @functools.wraps(test)
    def tested():
        held: list[Held] = []
        guard = CallbackGuard(held.append)
        loop = guarded_loop(uvloop.Loop, guard)()
        try:
            with Witness() as witness:
                loop.run_until_complete(test())
        finally:
            loop.close()
            guard.close()
        held = witness.confirmed(held)
        assert not held, told(held)

    del tested.__wrapped__  # To pytest it is no coroutine.
    return tested


@on_uvloop
async def test_a_worker_that_does_not_read_holds_nobody_up_and_is_ended():
    async with Watched() as watched:
        worker = await watched.worker()
        os.kill(worker.pid, signal.SIGSTOP)
        for number in range(MAX_WAITING_BYTES // 256):
            worker.send(Release())
            worker.talk.flush()
            if number % 200 == 0:
                await asyncio.sleep(0)
        assert "does not read" in await until_gone(worker)
        assert not psutil.pid_exists(worker.pid)
        await asyncio.sleep(0)


@on_uvloop
async def test_a_crash_with_an_unread_message_is_heard_of_at_once():
    with pytest.MonkeyPatch.context() as patch:
        # No watch looks: the socket says it.
        patch.setattr(WorkerProcess, "look_s", 2 * WAIT_S)
        async with Watched("crash=*1") as watched:
            worker = await watched.worker()
            process = psutil.Process(worker.pid)
            worker.send(run(1))
            worker.send(run(2))  # Nobody will read this one.
            await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, blocks=False)
            await until_gone(worker)
            assert worker.cause is Cause.DIED


@on_uvloop
async def test_a_process_that_cannot_be_killed_is_given_up_and_its_device_left_alone():
    async with Watched() as watched:
        # A driver call in state D takes no signal; here the signal is not sent.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Child, "kill", lambda child: None)
            patch.setattr(WorkerProcess, "kill_s", 0.5)
            patch.setattr(WorkerProcess, "end_s", 0.5)
            stuck = await watched.worker(heartbeat_timeout_s=1.0)
            replica = watched.replica
            os.kill(stuck.pid, signal.SIGSTOP)
            assert "cannot be killed" in await until_gone(stuck)
            await asyncio.sleep(0.01)
            assert replica.status is PlaceStatus.QUARANTINED
            assert str(stuck.pid) in replica.reason
            assert watched.said == ["ready", "gone", "hung"]
            # When it is gone at last, the device is used again.
            os.kill(stuck.pid, signal.SIGKILL)
            await until(lambda: replica.status is PlaceStatus.READY, blocks=False)
            assert stuck.status is ChildStatus.ENDED
            # And another one like it does not hold up the end.
            worker = replica.child
            os.kill(worker.pid, signal.SIGSTOP)
            await asyncio.wait_for(replica.stop(), WAIT_S)
            assert worker.status is ChildStatus.QUARANTINED
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: worker.status is ChildStatus.ENDED, blocks=False)


@on_uvloop
async def test_an_answer_out_of_turn_ends_the_worker():
    async with Watched() as watched:
        worker = await watched.worker()
        worker.send(run(1))
        worker._sent[0] = run(2)
        assert "not its next one" in await until_gone(worker)


@on_uvloop
async def test_statistics_come_though_the_vendor_does_not_answer():
    async with Watched() as watched:
        worker = await watched.worker(plugins=("tests.support.silent_vendor",))
        stats = [await watched.hear(Stats) for _ in range(2)]
        assert all(each.resident > 10_000_000 for each in stats)
        worker.send(run(1))
        await watched.hear(tuple)
