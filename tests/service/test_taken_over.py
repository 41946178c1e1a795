"""Processes that were taken over, by a file that they loaded or by what a client sent, and what they can do then."""

from __future__ import annotations

import httpx
import psutil
import pytest

from tests.support.images import GREY
from tests.support.load import WAIT_S, until
from tests.support.null_service import is_ready, metric, post

ROGUE = ("--plugins", "tests.support.rogue_worker")


def order(service, text):
    """Written whole: the worker may look at any moment."""
    folder = service.log.parent
    (folder / "order").write_text(text)
    (folder / "order").rename(folder / "rogue")


@pytest.mark.parametrize("what", ["beats", "crowds"])
async def test_a_worker_that_floods_the_server_is_replaced_and_the_loop_goes_on(serve, what):
    with serve("", *ROGUE) as service:
        server, flooding = psutil.Process(service.process.pid), service.worker()
        before = server.memory_info().rss
        order(service, what)
        await until(lambda: not flooding.is_running() and is_ready(service))
        assert metric(service, "anychip_worker_restarts_total", reason="died") == 1
        assert post(service, GREY) == (200, "OK")
        assert "invented" not in httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
        assert server.memory_info().rss - before < 50_000_000


async def test_a_worker_cannot_invent_names_of_metrics(serve):
    with serve("", *ROGUE) as service:
        worker = service.worker()
        order(service, "names")
        await until(lambda: "anychip_operator_fallbacks_total{" in httpx.get(f"{service.url}/metrics").text)
        await until(lambda: metric(service, "anychip_operator_fallbacks_total", operator="other") == 20_000)
        assert "invented" not in httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
        assert service.worker() == worker
        assert post(service, GREY) == (200, "OK")
