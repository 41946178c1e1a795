"""The server never stands still: faults on a null device that is as real ones are, watched from another process."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import psutil
import pytest

from tests.support.images import GREY
from tests.support.load import WAIT_S, Load, until
from tests.support.null_service import PREDICT, assert_nothing_left, is_ready, metric, post

pytestmark = pytest.mark.paired

SLOW_TO_IMPORT = "delay_ms=20,import_ms=3000"


async def test_workers_that_die_and_floods_of_releases_hold_nobody_up(serve):
    with serve(SLOW_TO_IMPORT, "--batch-sizes", "1,4") as service:
        async with Load(service.url, PREDICT, GREY, 8) as load:
            await load.answers(20)
            service.worker().kill()
            await until(lambda: metric(service, "anychip_worker_restarts_total", reason="died") == 1)
            await until(lambda: is_ready(service))
            await load.answers(20)
            limits = httpx.Limits(max_connections=400)
            async with httpx.AsyncClient(base_url=service.admin_url, timeout=WAIT_S, limits=limits) as client:
                asked = (client.post("/v1/devices/null:0:release") for _ in range(1000))
                answers = await asyncio.gather(*asked)
            assert {answer.status_code for answer in answers} == {200}
            await load.answers(20)
        assert set(load.outcomes) == {(200, "OK")}
        assert_nothing_left(service)


async def test_a_frozen_worker_holds_nobody_up(serve):
    limits = ("--batch-sizes", "1,4", "--heartbeat-timeout-s", "2")
    with serve(SLOW_TO_IMPORT, *limits) as service:
        async with Load(service.url, PREDICT, GREY, 8) as load:
            await load.answers(20)
            os.kill(service.worker().pid, signal.SIGSTOP)
            await until(lambda: metric(service, "anychip_worker_restarts_total", reason="hung") == 1)
            await until(lambda: is_ready(service))
            await load.answers(20)
        assert set(load.outcomes) == {(200, "OK")}
        assert_nothing_left(service)


async def test_a_service_that_was_paused_as_a_whole_goes_on_with_its_workers(serve):
    limits = ("--heartbeat-timeout-s", "2", "--batch-timeout-s", "2")
    with serve("devices=2,delay_ms=100", *limits) as service:
        before = {worker.pid for worker in service.workers()}
        async with Load(service.url, PREDICT, GREY, 8) as load:
            await load.answers(20)
            stopped = [psutil.Process(service.process.pid), *service.children()]
            for process in stopped:
                process.suspend()
            time.sleep(6)  # noqa: ASYNC251 - What is tested is that time passes.
            for process in stopped:
                process.resume()
            await load.answers(40)
        assert set(load.outcomes) == {(200, "OK")}
        assert {worker.pid for worker in service.workers()} == before
        assert metric(service, "anychip_worker_restarts_total") == 0
        assert metric(service, "anychip_event_loop_stall_seconds") < 1
        assert post(service) == (200, "OK")
