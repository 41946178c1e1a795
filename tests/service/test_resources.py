"""What a service does where there is no room: in a queue that is too small for a request, on a disk, in memory."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json

import httpx
import psutil
import pytest

from tests.support.images import GREY
from tests.support.load import WAIT_S, until
from tests.support.null_service import PREDICT, assert_nothing_left

pytestmark = pytest.mark.paired


JSON = {"Content-Type": "application/json"}


def files(count):
    return [("file", (f"{number}.jpg", GREY)) for number in range(count)]


def test_more_images_than_may_ever_wait_are_refused_for_good(serve):
    with serve("", "--queue-size", "8") as service:
        fits = httpx.post(service.url + PREDICT, files=files(8), timeout=WAIT_S)
        assert fits.status_code == 200
        never = httpx.post(service.url + PREDICT, files=files(9), timeout=WAIT_S)
        assert (never.status_code, never.json()["code"]) == (400, "INVALID_REQUEST")
        assert "8 images" in never.json()["error"]
        assert "retry-after" not in never.headers
        assert_nothing_left(service)


def held_bytes(service):
    """By the service and everything that it has started; what they share counts once."""
    total = 0
    for process in (psutil.Process(service.process.pid), *service.children()):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


async def test_what_large_json_has_taken_is_given_back(serve):
    """Two processes read it, and kept a hundred megabytes each."""
    image = base64.b64encode(GREY + bytes(14_000_000)).decode()
    body = json.dumps({"instances": [{"b64": image}]})
    with serve("") as service:
        before = held_bytes(service)
        async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S) as client:
            for _ in range(4):
                asked = [client.post(PREDICT, content=body, headers=JSON) for _ in range(2)]
                assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        await until(lambda: held_bytes(service) - before < 150 << 20)
        assert_nothing_left(service)
