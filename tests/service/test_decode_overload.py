"""Decoding as the bottleneck: what is asked too much is answered in time, and what matters more goes first.

The device is null and looks at its images, so that they are decoded; requests come whatever becomes of earlier ones.
What was under way while the machine gave the client no processor is `paused`: nothing is in time then. What it could
not send meanwhile it sends later, not all at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import NamedTuple

import pytest
from PIL import Image

from anychip_tools.benchmark.load import OpenLoop, drive, poisson_arrivals
from anychip_tools.benchmark.wire import request_bytes
from tests.support.images import encoded
from tests.support.load import WAIT_S
from tests.support.null_service import PREDICT, serving
from tests.support.stall import STALL_S, pauses

PHOTO = encoded(Image.radial_gradient("L").resize((2000, 1500)).convert("RGB"), "JPEG")
SECONDS = 3.0
DEADLINE_S = 0.25
SETTLE_S = 0.5  # From the end of a pause until what it held up is answered or refused.


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("decoding"), "fail=999999999") as found:
        yield found


def request(**headers):
    return request_bytes(PREDICT, PHOTO, "image/jpeg", headers)


class Answer(NamedTuple):
    status: str
    seconds: float
    paused: bool


class EveryAnswer(OpenLoop):
    """Keeps the status of each answer, when its request was sent and when it came."""

    def __init__(self, *given):
        super().__init__(*given)
        self.answers = []

    def answered(self, connection, answer):
        self.answers.append((answer.status, connection.due_s, time.perf_counter()))
        super().answered(connection, answer)


async def overloaded(port, requests, rate_per_s):
    """All answers of each of the requests, sent in turn."""
    loops = [EveryAnswer(port, each, DEADLINE_S) for each in requests]
    async with pauses() as noted:
        started_s = time.perf_counter()
        for number, due_s in enumerate(poisson_arrivals(rate_per_s, SECONDS, seed=1)):
            await asyncio.sleep(max(0.0, started_s + due_s - time.perf_counter()))
            sent_s = time.perf_counter()
            if (late_s := sent_s - started_s - due_s) > STALL_S:
                started_s += late_s
            loops[number % len(loops)].send(sent_s)
        for loop in loops:
            await loop.settled(5)
            await loop.close()
    return [
        [
            Answer(
                status,
                came_s - sent_s,
                paused=any(began_s < came_s and sent_s < ended_s + SETTLE_S for began_s, ended_s in noted),
            )
            for status, sent_s, came_s in loop.answers
        ]
        for loop in loops
    ]


@pytest.fixture(scope="module")
def capacity_per_s(service):
    port = int(service.url.rpartition(":")[2])
    drive(port, request(), 8, 0.5)
    return drive(port, request(), 16, 1.5).answers_per_s


def late_share(answers):
    counted = [answer.seconds for answer in answers if not answer.paused]
    return sum(seconds > 0.3 for seconds in counted) / len(counted)


async def test_at_three_times_the_load_answers_come_within_their_deadline(service, capacity_per_s):
    port = int(service.url.rpartition(":")[2])
    [answers] = await overloaded(port, [request(**{"X-Timeout-Ms": "250"})], 3 * capacity_per_s)
    assert {answer.status for answer in answers} <= {"200", "429", "503", "504"}
    assert len(answers) > 2 * capacity_per_s
    assert late_share(answers) <= 0.02, sorted(answers, key=lambda answer: answer.seconds)[-20:]
    assert sum(answer.status == "200" for answer in answers) > 0.3 * capacity_per_s * SECONDS


async def test_what_matters_more_is_answered_under_overload(service, capacity_per_s):
    port = int(service.url.rpartition(":")[2])
    usual = request(**{"X-Timeout-Ms": "400"})
    urgent = request(**{"X-Timeout-Ms": "400", "X-Priority": "50"})
    answers = await overloaded(port, [usual, usual, usual, usual, usual, urgent], 2 * capacity_per_s)
    statuses = Counter(answer.status for answer in answers[-1] if not answer.paused)
    assert statuses["200"] > 0.9 * statuses.total(), statuses


class InOrder(OpenLoop):
    """Notes each answer in `noted`, with a name."""

    def __init__(self, port, asked, name, noted, enough):
        super().__init__(port, asked, 100)
        self.name, self.noted, self.enough = name, noted, enough

    def answered(self, connection, answer):
        self.noted.append((self.name, answer.status))
        if len(self.noted) == FIRST:
            self.enough.set()
        super().answered(connection, answer)


USUAL, FIRST, URGENT = 120, 10, 10


async def test_a_higher_priority_overtakes_what_waits_to_be_decoded(service):
    """By the order of the answers alone: how long they take, and how many are refused, is the machine's affair."""
    port = int(service.url.rpartition(":")[2])
    noted, enough = [], asyncio.Event()
    usual = InOrder(port, request(), "usual", noted, enough)
    urgent = InOrder(port, request(**{"X-Priority": "50"}), "urgent", noted, enough)
    for _ in range(USUAL):
        usual.send(time.perf_counter())
    await asyncio.wait_for(enough.wait(), WAIT_S)
    for _ in range(URGENT):
        urgent.send(time.perf_counter())
    for each in (usual, urgent):
        await each.settled(WAIT_S)
        await each.close()
    assert Counter(noted) == {("usual", "200"): USUAL, ("urgent", "200"): URGENT}
    last = max(place for place, (name, _) in enumerate(noted) if name == "urgent")
    assert last < USUAL // 2, [name for name, _ in noted]
