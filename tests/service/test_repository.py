"""Models that are unloaded and loaded while the service runs: nobody else notices, and nothing accepted is lost."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.answers import assert_error
from tests.support.images import JPEG
from tests.support.load import Load, until
from tests.support.photographs import FILES
from tests.support.service_process import running

PHOTO = FILES[0].read_bytes()
NULL = ("--device", "null", "--engine", "auto", "--null", "delay_ms=20")
REPOSITORY = "/v2/repository"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    options = (*NULL, "--models", "kept=resnet18:random,other=resnet18:random", "--compat", "triton")
    with running(tmp_path_factory.mktemp("service"), *options) as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    """Of the administration, which answers everything else, too."""
    with service.admin_client() as client:
        yield client


def states(client, **asked):
    return {each["name"]: each["state"] for each in client.post(f"{REPOSITORY}/index", json=asked).json()}


async def test_unloading_and_loading_under_load_loses_nothing(service, client):
    def post(path, **body):
        return client.post(f"{REPOSITORY}/models/other/{path}", json=body)

    async with Load(service.url, "/v1/models/kept:predict", PHOTO, clients=4) as kept:
        async with Load(service.url, "/v1/models/other:predict", PHOTO, clients=4) as other:
            await asyncio.gather(kept.answers(20), other.answers(20))
            unloaded = await asyncio.to_thread(post, "unload", parameters={"unload_dependents": False})
            await other.answers(4)
        assert unloaded.json() == {"name": "other"}
        # Those who asked before were answered, those who ask now are refused.
        assert set(other.outcomes) == {(200, "OK"), (503, "NOT_READY")}
        assert states(client) == {"kept": "READY", "other": "UNAVAILABLE"}
        assert states(client, ready=True) == {"kept": "READY"}
        refused = client.post("/v1/models/other:predict", content=PHOTO, headers=JPEG)
        assert "load" in assert_error(refused, 503, "NOT_READY")
        assert_error(client.get("/v2/models/other/ready"), 503, "NOT_READY")
        for path in ("/v2/health/ready", "/ping"):
            assert "other" in assert_error(client.get(path), 503, "NOT_READY")
        assert (await asyncio.to_thread(post, "unload")).status_code == 200, "a second time changes nothing"
        await kept.answers(20)
        assert (await asyncio.to_thread(post, "load")).json() == {"name": "other", "weights": "random"}
        await kept.answers(20)
    assert set(kept.outcomes) == {(200, "OK")}
    assert states(client) == {"kept": "READY", "other": "READY"}
    assert client.post("/v1/models/other:predict", content=PHOTO, headers=JPEG).status_code == 200
    await until(lambda: len(service.workers()) == 1)


@pytest.mark.parametrize(
    ("path", "content", "status", "code"),
    [
        ("/models/nobody/load", b"", 404, "MODEL_NOT_FOUND"),
        ("/models/nobody/unload", b"{}", 404, "MODEL_NOT_FOUND"),
        ("/models/other/load", b"no JSON", 400, "INVALID_REQUEST"),
        ("/models/other/load", b"[]", 400, "INVALID_REQUEST"),
        ("/models/other/load", b'{"parameters": 1}', 400, "INVALID_REQUEST"),
        ("/models/other/load", b'{"parameters": {"config": "{}"}}', 400, "INVALID_REQUEST"),
        ("/models/other/load", b'{"parameters": {"file:1/model": "aGk="}}', 400, "INVALID_REQUEST"),
        ("/models/other/load", b" " * 100_000, 400, "INVALID_REQUEST"),
        ("/index", b'{"ready": "yes"}', 400, "INVALID_REQUEST"),
    ],
)
def test_requests_that_make_no_sense(client, path, content, status, code):
    assert_error(client.post(f"{REPOSITORY}{path}", content=content), status, code)


def test_normalised_tensors_that_make_no_sense(client):
    def infer(**tensor):
        good = {"name": "input", "shape": [1, 3, 224, 224], "datatype": "FP32"}
        return client.post("/v2/models/kept/infer", json={"inputs": [{**good, **tensor}]})

    zeros = [0] * (3 * 224 * 224)
    assert infer(data=zeros).status_code == 200
    wrong = {
        "NaN": {"data": [1e300, *zeros[1:]]},
        "shape": {"data": zeros, "shape": [1, 224, 224, 3]},
        "FP32": {"data": zeros, "datatype": "INT32"},
        "JSON": {"data": zeros, "datatype": "FP16"},
        "values": {"data": zeros[1:]},
    }
    for reason, tensor in wrong.items():
        assert reason in assert_error(infer(**tensor), 400, "INVALID_REQUEST")
    inputs = {each["name"]: each for each in client.get("/v2/models/kept").json()["inputs"]}
    assert inputs["input"] == {"name": "input", "datatype": "FP32", "shape": [-1, 3, 224, 224]}
