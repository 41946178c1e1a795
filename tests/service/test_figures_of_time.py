"""What a client of a service waits for while it has work to do and a worker dies, in seconds of this machine.

    make nightly ARGS=tests/service/test_figures_of_time.py

On a machine that does nothing else. What must hold on every machine is in the other files: each request is answered,
and nothing holds the event loop up (tests/support/liveness.py).
"""

from __future__ import annotations

import base64
import json

import httpx
import pytest

from tests.support.images import GREY, JPEG
from tests.support.liveness import observed
from tests.support.load import WAIT_S, Load, until
from tests.support.null_service import PREDICT, is_ready, metric, serving

pytestmark = [pytest.mark.nightly, pytest.mark.alone]

LIVE_S, STALL_S = 0.25, 0.1
JSON = {"Content-Type": "application/json"}
DEAR = json.dumps({"instances": [{"b64": base64.b64encode(bytes(14_000_000)).decode()}]}).encode()


async def test_health_is_answered_within_a_quarter_of_a_second_whatever_happens(tmp_path):
    null = "delay_ms=2,depth=2,probes_mb=11,output_mb=2,import_ms=500"
    with serving(tmp_path, null, guarded=True) as service, observed(service) as live:
        async with Load(service.url, PREDICT, GREY, 16) as load, httpx.AsyncClient(timeout=WAIT_S) as client:
            for _ in range(4):
                await until(lambda: is_ready(service))
                await load.answers(200)
                answer = await client.post(service.url + PREDICT, content=DEAR, headers=JSON)
                assert answer.status_code == 422  # It is no image.
                assert (await client.post(service.url + PREDICT, content=GREY, headers=JPEG)).status_code == 200
                service.worker().kill()
        stall_s = metric(service, "anychip_event_loop_stall_seconds")
    print(f"{live.asked} answers, the slowest {1e3 * live.slowest_s:.0f} ms; longest stall {1e3 * stall_s:.0f} ms")
    assert live.failed == []
    assert live.slowest_s <= LIVE_S
    assert stall_s <= STALL_S
