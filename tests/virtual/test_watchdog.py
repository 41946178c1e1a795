"""The clock of the event loop, and its watchdog: what that takes for a stall, and what it says."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from app.observability import watchdog as watchdog_module
from app.observability.watchdog import LoopWatchdog

TICK_S = watchdog_module._TICK_S
REPORT_S = 0.3


class Watchdog(LoopWatchdog):
    """Looks when `stand_still` says so. `waited_s`: how long the loop's thread has waited for a processor."""

    waited_s = 0.0

    def __init__(self):
        self.heard = []
        super().__init__(REPORT_S, self.heard.append)

    def _watch(self):
        pass

    def _waited(self):
        return self.waited_s

    def stand_still(self, seconds, looks=0, waited_s=0.0):
        """Stand the loop still for so long; other threads go on, in which the watchdog looks so often."""
        for _ in range(looks):
            asyncio.get_running_loop().stand_still(seconds / looks)
            self._look()
        if not looks:
            asyncio.get_running_loop().stand_still(seconds)
        self.waited_s += waited_s


@pytest.fixture
async def watchdog(monkeypatch):
    made = Watchdog()
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(process_time=lambda: 0.0))
    made.start()
    yield made
    made.close()
    made.close()


async def test_a_loop_that_runs_has_no_stall(watchdog, caplog):
    for _ in range(40):
        await asyncio.sleep(0.25)
        watchdog._look()
    assert watchdog.longest_s == pytest.approx(0.0)
    assert not caplog.records


async def test_a_call_that_blocks_is_a_stall_and_reported_once_while_it_lasts(watchdog, caplog):
    caplog.set_level(logging.WARNING, "anychip.watchdog")
    await asyncio.sleep(TICK_S / 2)
    watchdog.stand_still(2.0, looks=8)
    [record] = caplog.records
    assert "has stood still for 0.5 s" in record.getMessage()
    assert "watchdog.stand_still(2.0, looks=8)" in record.getMessage()
    await asyncio.sleep(TICK_S)
    assert watchdog.longest_s == watchdog.heard[-1] == pytest.approx(2.0 - TICK_S / 2)
    assert [each.getMessage() for each in caplog.records[1:]] == ["the event loop goes on after 2.0 s"]
    watchdog.stand_still(1.0, looks=4)
    await asyncio.sleep(TICK_S)
    assert len(caplog.records) == 4
    assert len(watchdog.heard) == 1, "that one was no longer"


async def test_time_in_which_the_process_was_stopped_is_no_stall(watchdog, caplog):
    """No thread wakes in it, and nothing is computed."""
    watchdog.stand_still(1.5)
    watchdog._look()
    await asyncio.sleep(TICK_S)
    assert watchdog.longest_s == pytest.approx(0.0)
    assert not caplog.records


async def test_what_the_loop_waited_for_a_processor_is_no_stall(watchdog):
    watchdog.stand_still(0.2, waited_s=0.15)
    await asyncio.sleep(TICK_S)
    assert watchdog.longest_s == pytest.approx(0.2 - 0.15 - TICK_S, abs=1e-6)
