"""Service on the null device (docs/null.md), which fails on a test's demand, and the tests' requests to it.

A test of faults starts its service with the fixture `serve` and nothing else (tests/unit/test_rooms.py): it asserts
that the service answered all the while and that nothing held its event loop up.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import httpx
import pytest

from tests.support.constants import Constants
from tests.support.images import GREY, JPEG
from tests.support.liveness import answering
from tests.support.load import WAIT_S
from tests.support.service_process import UNENCRYPTED, ServiceProcess, running

MODEL = "resnet18"
PREDICT = f"/v1/models/{MODEL}:predict?top_k=17"
"""Route with so many classes that a worker sends all its outputs: 2 MB an image if the device is like real ones."""
AS_REAL_ONES = "as real ones"
DEVICES = {"plain": "", AS_REAL_ONES: "depth=2,probes_mb=11,output_mb=2,import_ms=500"}
"""Behaviours that `serve` adds to the test's own for the null device."""

Serve: TypeAlias = Callable[..., contextlib.AbstractContextManager[ServiceProcess]]


@pytest.fixture(params=[AS_REAL_ONES, pytest.param("plain", marks=pytest.mark.nightly)])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Serve:
    """Return the function to start a service: `with serve("delay_ms=20", "--batch-sizes", "1,2") as service:`.

    The null device has the probes, the outputs, the batches in flight and the import of a real one (at night also
    none of these, and the service starts from nothing); a test may say otherwise. At the end of the block it is
    asserted that /v2/health/live always answered, and that nothing held the event loop up
    (tests/support/liveness.py). `ends`: the test ends the service itself; `at_admin`: ask the administration's port,
    as connections to the public one may end. `constants`: as in tests/support/constants.py.
    """

    @contextlib.contextmanager
    def serve(
        null: str = "",
        *options: str,
        ends: bool = False,
        at_admin: bool = False,
        constants: Constants = MappingProxyType({}),
    ) -> Iterator[ServiceProcess]:
        said = {part.partition("=")[0] for part in null.split(",")}
        unsaid = [part for part in DEVICES[request.param].split(",") if part.partition("=")[0] not in said]
        behaviour = ",".join(filter(None, [null, *unsaid]))
        fresh = request.param != AS_REAL_ONES
        with (
            serving(tmp_path, behaviour, *options, constants=constants, fresh=fresh, guarded=True) as service,
            answering(service, ends=ends, at_admin=at_admin),
        ):
            yield service

    return serve


def serving(folder, null="", *options, constants=MappingProxyType({}), fresh=False, guarded=False):
    usual = ("--models", MODEL, "--weights", "random", "--engine", "auto", "--precision", "auto")
    given = ("--device", "null", "--null", null, "--timeout-ms", "200000", *options)
    return running(folder, *usual, *given, constants=constants, fresh=fresh, guarded=guarded)


def post(service, body=GREY, **headers):
    url, headers = service.url + PREDICT, {**JPEG, **headers}
    answer = httpx.post(url, content=body, headers=headers, timeout=WAIT_S, verify=UNENCRYPTED)
    return answer.status_code, answer.json().get("code", "OK")


def metric(service, name, **labels):
    total, found = 0.0, name.endswith("_sum")  # A histogram has no series before it has seen anything.
    for line in httpx.get(f"{service.url}/metrics", timeout=WAIT_S, verify=UNENCRYPTED).text.splitlines():
        if match := re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line):
            given = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
            if labels.items() <= given.items():
                total, found = total + float(match[2]), True
    assert found, f"there is no {name} with {labels}"
    return total


def ready(service):
    return httpx.get(f"{service.url}/v2/health/ready", timeout=WAIT_S, verify=UNENCRYPTED)


def is_ready(service):
    return ready(service).status_code == 200


def assert_nothing_left(service):
    assert metric(service, "anychip_images_in_flight") == 0
    assert metric(service, "anychip_queue_depth") == 0


async def gathered(service, bodies, **headers):
    """Send all at once, each on its own connection; return outcomes in order."""
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S, limits=limits, verify=UNENCRYPTED) as client:
        asked = (client.post(PREDICT, content=body, headers={**JPEG, **headers}) for body in bodies)
        answers = await asyncio.gather(*asked)
    return [(answer.status_code, answer.json().get("code", "OK")) for answer in answers]
