"""The watchdog of the event loop: what it takes for a stall, and what it says."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from app.observability.watchdog import LoopWatchdog


class Watched:
    """A loop with a watchdog."""

    def __init__(self):
        self.heard = []
        self.watchdog = LoopWatchdog(0.3, self.heard.append)

    async def __aenter__(self):
        self.watchdog.start()
        return self

    async def __aexit__(self, *_):
        self.watchdog.close()
        self.watchdog.close()


def block(seconds):
    threading.Event().wait(seconds)


async def test_a_call_that_blocks_is_reported_while_it_lasts_with_its_stack(caplog):
    caplog.set_level(logging.WARNING, "anychip.watchdog")
    async with Watched() as watched:
        await asyncio.sleep(0)
        reported = []

        def look():
            # From another thread, while the loop stands still.
            deadline_s = time.monotonic() + 10
            while not caplog.records and time.monotonic() < deadline_s:
                time.sleep(0.01)
            reported.append([record.getMessage() for record in caplog.records])
            gate.set()

        gate = threading.Event()
        threading.Thread(target=look).start()
        gate.wait(20)
        await asyncio.sleep(0.1)
    [[line]] = reported
    assert "stood still for" in line
    assert "gate.wait(20)" in line
    assert "goes on" in caplog.records[-1].getMessage()
    assert watched.watchdog.longest_s >= 0.2
    assert watched.heard[-1] == watched.watchdog.longest_s


async def test_a_loop_that_runs_has_no_stall(caplog):
    async with Watched() as watched:
        await asyncio.sleep(0.3)
    assert watched.watchdog.longest_s < 0.1
    assert not caplog.records


async def test_what_was_before_can_be_forgotten():
    async with Watched() as watched:
        block(0.2)
        await asyncio.sleep(0.1)
        assert watched.watchdog.longest_s >= 0.1
        watched.watchdog.forget()
        assert watched.watchdog.longest_s == 0.0
        await asyncio.sleep(0.1)
        assert watched.watchdog.longest_s < 0.1
