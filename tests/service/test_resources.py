"""What a service does where there is no room: in a queue that is too small for a request, on a disk, in memory."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys

import httpx
import psutil
import pytest

from tests.support.images import GREY
from tests.support.load import WAIT_S, until
from tests.support.null_service import PREDICT, assert_nothing_left

JSON = {"Content-Type": "application/json"}


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


THREADS = """
import asyncio, threading
import psutil
from app.ingress.budget import Budget
from app.ingress.trim import Trim
from backends.host import release_free_memory

async def main():
    heap = Trim(Budget(1 << 30, "bytes"))
    made, seen = threading.Barrier(5), threading.Barrier(5)
    def answers():
        for _ in range(4):
            bytes(bytearray(16 << 20))
        made.wait()
        seen.wait()
    threads = [threading.Thread(target=answers) for _ in range(4)]
    before = psutil.Process().memory_info().rss
    for each in threads:
        each.start()
    made.wait()
    release_free_memory()
    print(psutil.Process().memory_info().rss - before)
    seen.wait()
    for each in threads:
        each.join()
    await heap.close()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told so")
def test_large_answers_that_threads_made_leave_nothing_behind():
    made = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert int(made.stdout) < 4 << 20
