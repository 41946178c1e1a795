"""Ten thousand connections that send a byte now and then: neither health checks nor fast clients notice."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time

import httpx
import pytest

from tests.support.constants import HEADER_TIMEOUT_S
from tests.support.images import GREY, JPEG
from tests.support.liveness import answering
from tests.support.load import WAIT_S
from tests.support.null_service import PREDICT, serving

SLOW = 10_000
NEEDED = SLOW + 1000
HEAD = b"POST /v1/models/resnet18:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\nX-Slow: "
_hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        resource.RLIM_INFINITY != _hard < NEEDED, reason=f"{NEEDED} descriptors are needed, {_hard} are allowed"
    ),
]


async def trickle(port, number, stop):
    """Half a head from an address of its own kind, then a byte a second until the service has had enough of it."""
    source = (f"127.0.{1 + number // 250 % 250}.{1 + number % 250}", 0)
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=source)
        with contextlib.suppress(OSError):
            writer.write(HEAD)
            while not stop.is_set() and not writer.is_closing():
                writer.write(b"x")
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stop.wait(), 1)
        writer.close()


async def test_slow_connections_stop_nobody(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NEEDED, hard))
    try:
        options = ("--max-connections", "12000")
        with (
            serving(tmp_path, "delay_ms=1", *options, constants={HEADER_TIMEOUT_S: 600}, guarded=True) as service,
            answering(service),
        ):
            port, stop = int(service.url.rpartition(":")[2]), asyncio.Event()
            slow = [asyncio.create_task(trickle(port, number, stop)) for number in range(SLOW)]
            try:
                await asyncio.sleep(5)  # All of them are there: what follows is measured beside them.
                times_s: dict[str, list[float]] = {"health": [], "predict": []}  # Printed: a figure of this machine.
                async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S) as client:
                    for _ in range(100):
                        began_s = time.monotonic()
                        assert (await client.get("/v2/health/live")).status_code == 200
                        times_s["health"].append(time.monotonic() - began_s)
                        began_s = time.monotonic()
                        assert (await client.post(PREDICT, content=GREY, headers=JPEG)).status_code == 200
                        times_s["predict"].append(time.monotonic() - began_s)
                assert sum(not task.done() for task in slow) > SLOW * 0.9, "they were held, not refused"
                print({what: f"98 of 100 within {1e3 * sorted(each)[97]:.0f} ms" for what, each in times_s.items()})
            finally:
                stop.set()
                await asyncio.gather(*slow, return_exceptions=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
