"""Two services behind one port: the system deals connections out, and one of them drains without losing a request."""

from __future__ import annotations

import signal

import httpx

from tests.support.images import GREY
from tests.support.load import WAIT_S, Load
from tests.support.null_service import PREDICT, metric, serving
from tests.support.service_process import free_port


async def test_two_services_share_a_port_and_one_of_them_drains_under_load(tmp_path):
    port = free_port()
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    shared = ("--reuse-port", str(port), "--grace-s", "1")
    with serving(folders[0], "", *shared) as one, serving(folders[1], "", *shared) as two:
        async with Load(f"http://127.0.0.1:{port}", PREDICT, GREY, 24) as load:
            await load.answers(200)
            counted = [metric(each, "anychip_requests_total", code="OK") for each in (one, two)]
            assert all(counted), "each of them has its own port, where its metrics are"
            one.process.send_signal(signal.SIGTERM)
            await load.answers(50)
            assert one.process.wait(WAIT_S) == 0
            before = metric(two, "anychip_requests_total", code="OK")
            await load.answers(200)
            assert metric(two, "anychip_requests_total", code="OK") >= before + 200 - 24
        assert set(load.outcomes) == {(200, "OK")}
        assert httpx.get(f"{two.url}/v2/health/ready").status_code == 200
