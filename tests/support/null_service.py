"""A service on the null device (docs/null.md), which fails where a test tells it to, and what tests ask it."""

from __future__ import annotations

import asyncio
import re

import httpx

from tests.support.images import GREY, JPEG
from tests.support.load import WAIT_S
from tests.support.service_process import running

MODEL = "resnet18"
PREDICT = f"/v1/models/{MODEL}:predict"


def serving(folder, null="", *options):
    """A service on the null device; what comes later among the options counts."""
    return running(
        folder,
        "--models",
        MODEL,
        "--weights",
        "random",
        "--engine",
        "auto",
        "--precision",
        "auto",
        "--device",
        "null",
        "--null",
        null,
        "--timeout-ms",
        "200000",
        *options,
    )


def post(service, body=GREY, **headers):
    answer = httpx.post(service.url + PREDICT, content=body, headers={**JPEG, **headers}, timeout=WAIT_S)
    return answer.status_code, answer.json().get("code", "OK")


def metric(service, name, **labels):
    """The sum of a metric's series that have these labels."""
    total, found = 0.0, name.endswith("_sum")  # A histogram has no series before it has seen anything.
    for line in httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text.splitlines():
        if match := re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line):
            given = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
            if labels.items() <= given.items():
                total, found = total + float(match[2]), True
    assert found, f"there is no {name} with {labels}"
    return total


def ready(service):
    return httpx.get(f"{service.url}/v2/health/ready", timeout=WAIT_S)


def is_ready(service):
    return ready(service).status_code == 200


def assert_nothing_left(service):
    assert metric(service, "anychip_images_in_flight") == 0
    assert metric(service, "anychip_queue_depth") == 0


async def gathered(service, bodies, **headers):
    """All at once, each on a connection of its own; outcomes in order."""
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S, limits=limits) as client:
        asked = (client.post(PREDICT, content=body, headers={**JPEG, **headers}) for body in bodies)
        answers = await asyncio.gather(*asked)
    return [(answer.status_code, answer.json().get("code", "OK")) for answer in answers]
