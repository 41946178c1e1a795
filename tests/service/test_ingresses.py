"""Ingresses in processes of their own: they answer as the owner does, and each may end at any time."""

from __future__ import annotations

import asyncio
import base64
import os
import signal

import httpx
import pytest

from tests.support import small_classifier, work
from tests.support.images import GREY
from tests.support.load import WAIT_S, Load, until
from tests.support.null_service import PREDICT, assert_nothing_left, is_ready, metric
from tests.support.service_process import libraries_of, own_mib, running

LOOKED_AT = ("delay_ms=5,fail=*1000000", "--decoders", "2", "--ingresses", "2")
"""With a fault that does not come the null device looks at images, so there are decoders."""
HOT = "/v1/models/{}:predict", "/predictions/{}"
MOST_MIB = 80


def ingresses(service):
    return service.named("anychip-ingress")


def answered(client, path, **more):
    answer = client.post(path, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


LOST = 0
"""Status of a request whose connection ended; its client takes another one."""


def settled(answer):
    """Without what differs from request to request."""
    return {name: each for name, each in answer.items() if name != "id"} if isinstance(answer, dict) else answer


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Serve the same model by the owner alone and by ingresses."""
    folder = tmp_path_factory.mktemp("ingresses")
    options = ("--models", small_classifier.written(folder), "--device", "cpu")
    with (
        running(folder, *options, "--ingresses", "0") as alone,
        running(folder, *options, "--ingresses", "2") as beside,
    ):
        yield alone, beside


pytestmark = pytest.mark.xdist_group("ingresses")


def name_in(client):
    return client.get("/v1/models").json()["models"][0]["name"]


def test_ingresses_answer_as_the_owner_does(both):
    alone, beside = both
    assert len(ingresses(beside)) == 2
    with alone.client() as one, beside.client() as other:
        name = name_in(one)
        small, several = {"content": GREY}, {"files": [("images", ("a.jpg", GREY, "image/jpeg"))] * 3}
        for path in HOT:
            for sent in (small, several):
                assert settled(answered(other, path.format(name), **sent)) == settled(
                    answered(one, path.format(name), **sent)
                )
        inputs = [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["x"]}]
        for path, sent in (
            (f"/v2/models/{name}/infer", {"json": {"inputs": inputs}}),
            (f"/v1/models/{name}:predict", {"content": b"no image"}),
            (f"/v1/models/{name}:predict?top_k=0", {"content": GREY}),
            ("/v1/models/nothing:predict", {"content": GREY}),
            (f"/v1/models/{name}:predict", {"content": [GREY]}),
        ):
            mine, theirs = other.post(path, **sent), one.post(path, **sent)
            assert mine.status_code == theirs.status_code
            assert {**mine.json(), "request_id": ""} == {**theirs.json(), "request_id": ""}


def test_a_connection_may_ask_for_anything_and_all_is_counted_once(tmp_path):
    """By a service of its own: an ingress tells the owner periodically, and may not have told of a test before."""
    options = ("--models", small_classifier.written(tmp_path), "--device", "cpu", "--ingresses", "2")
    with running(tmp_path, *options) as beside, beside.client() as client:
        name = name_in(client)
        for _ in range(5):
            with beside.client() as another:
                answered(another, f"/v1/models/{name}:predict", content=GREY)  # By an ingress.
                assert another.get("/v2/health/ready").status_code == 200
                answered(another, f"/v1/models/{name}:predict", content=GREY)  # By the owner, on the same connection.
                assert another.head("/").status_code in (200, 404)
        work.until(lambda: metric(beside, "anychip_requests_total", code="OK", model=name) == 10)
        image = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(GREY).decode()]}
        assert answered(client, f"/v2/models/{name}/infer", json={"inputs": [image]})["model_name"] == name


@pytest.mark.cold
def test_an_ingress_has_no_torch_and_little_memory(tmp_path):
    options = ("--models", "resnet50,yolov8n", "--weights", "sample", "--device", "null", "--engine", "auto")
    with running(tmp_path, *options, "--ingresses", "2", fresh=True) as service:
        for model in ("resnet50", "yolov8n"):
            for _ in range(4):
                with service.client() as client:
                    answered(client, f"/v1/models/{model}:predict", content=GREY)
        assert len(ingresses(service)) == 2
        for pid in ingresses(service):
            assert not libraries_of(pid)
            assert own_mib(pid) < MOST_MIB


@pytest.mark.parametrize("beside", ["", "anychip-ingress", "fork-workers"])
async def test_an_ingress_that_is_killed_costs_its_own_connections_alone(serve, beside):
    """Alone, and together with another process."""
    with serve(*LOOKED_AT, at_admin=True) as service:
        first = ingresses(service)
        assert len(first) == 2
        async with Load(service.url, PREDICT, GREY, 8) as load:
            await load.answers(40)
            pids = [next(iter(first))]
            if beside:
                pids += [each.pid for each in service.children() if each.name() == beside and each.pid not in pids][:1]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: len(ingresses(service)) == 2 and not ingresses(service).keys() & {*pids})
            await until(lambda: metric(service, "anychip_ingresses_up") == 2)
            await load.answers(40)
            killed = sum(pid in first for pid in pids)
            assert metric(service, "anychip_ingress_restarts_total") == killed
        assert {status for status, _ in load.outcomes} <= {200, LOST}
        # Those of an ingress that was killed, and what came to it in the moment before that was seen.
        assert sum(count for (status, _), count in load.outcomes.items() if status == LOST) <= 8 * killed
        await until(lambda: metric(service, "anychip_images_in_flight") == 0)
        assert is_ready(service)
        assert_nothing_left(service)


async def test_what_was_accepted_is_answered_when_the_service_ends(serve):
    with serve("delay_ms=1000", "--ingresses", "2", ends=True) as service:
        async with Load(service.url, PREDICT, GREY, 4) as load:
            await load.answers(8)
            load._stopping = True  # Else its images count among those below, which may not have been accepted yet.
            await until(lambda: metric(service, "anychip_images_in_flight") == 0)
            asked = httpx.AsyncClient(base_url=service.url, timeout=WAIT_S, trust_env=False)
            under_way = [asyncio.create_task(asked.post(PREDICT, content=GREY)) for _ in range(4)]
            await until(lambda: metric(service, "anychip_images_in_flight") >= 4)
            service.process.send_signal(signal.SIGTERM)
            assert [answer.status_code for answer in await asyncio.gather(*under_way)] == [200] * 4
            await asked.aclose()
        assert service.process.wait(WAIT_S) == 0


async def test_limits_of_a_caller_are_exact_over_all_ingresses(serve):
    with serve("delay_ms=300", "--ingresses", "2", "--client-limits", "requests=2") as service:
        clients = [httpx.AsyncClient(base_url=service.url, timeout=WAIT_S, trust_env=False) for _ in range(6)]
        answers = await asyncio.gather(*(each.post(PREDICT, content=GREY) for each in clients))
        assert sorted(each.status_code for each in answers) == [200, 200, 429, 429, 429, 429]
        await asyncio.gather(*(each.aclose() for each in clients))
