"""Versions of a model behind one name: which answers, and changing over."""

from __future__ import annotations

import json

import grpc
import pytest
from PIL import Image

from app.cli import main
from tests.support import small_classifier
from tests.support.grpc_client import image_request, infer
from tests.support.images import encoded
from tests.support.load import Load
from tests.support.null_service import metric
from tests.support.service_process import free_port, running

SIMULATED = ("--device", "npu", "--simulate", "npu:1", "--timeout-ms", "60000")


def picture(colour):
    """Build a JPEG of one colour: the network's class of the same number."""
    rgb = tuple(255 if channel == colour else 30 for channel in range(3))
    return encoded(Image.new("RGB", (48, 48), rgb), "JPEG")


@pytest.fixture(scope="module")
def grpc_address():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def service(tmp_path_factory, grpc_address):
    """`dogs` and a second version that is blind for one class; `cats` and a second version with the same weights."""
    folder = tmp_path_factory.mktemp("rollout")
    models = [
        small_classifier.by_colour(folder, "dogs", "one"),
        small_classifier.by_colour(folder, "dogs@2", "two", blind=2),
        small_classifier.by_colour(folder, "cats", "three"),
        small_classifier.by_colour(folder, "cats@2", "four"),
    ]
    options = (*SIMULATED, "--grpc-port", grpc_address.partition(":")[2])
    with running(folder, "--models", ",".join(models), *options) as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    with service.client() as client:
        yield client


def asked(client, name, colour=0, **query):
    answer = client.post(f"/v1/models/{name}:predict", params=query, content=picture(colour))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_version_is_asked_for_by_its_number(client):
    assert asked(client, "dogs")["weights"] == "one.torchscript"
    assert asked(client, "dogs", version="1")["weights"] == "one.torchscript"
    assert asked(client, "dogs", version="2")["weights"] == "two.torchscript"
    missing = client.post("/v1/models/dogs:predict?version=9", content=picture(0))
    assert (missing.status_code, missing.json()["code"]) == (404, "MODEL_NOT_FOUND")
    assert client.get("/v1/models/dogs/labels?version=9").status_code == 404
    assert client.get("/v2/models/dogs").json()["versions"] == ["1", "2"]
    pixels = {"name": "pixels", "shape": [1, 32, 32, 3], "datatype": "UINT8", "data": [0] * 3072}
    answer = client.post("/v2/models/dogs/versions/2/infer", json={"inputs": [pixels]}).json()
    assert (answer["model_version"], answer["parameters"]["weights"]) == ("2", "two.torchscript")
    index = client.post("/v2/repository/index").json()
    every = {(n, v) for n in ("dogs", "cats") for v in "12"}
    assert {(each["name"], each["version"]) for each in index} == every
    counted = client.get("/v2/models/stats").json()["model_stats"]
    assert {(each["name"], each["version"]) for each in counted} == every


async def test_promoting_changes_over_without_a_lost_request_and_back(service, client, capsys):
    async with Load(service.url, "/v1/models/dogs:predict", picture(0), 4) as load:
        await load.answers(10)
        assert main(["promote", "dogs", "2", "--url", service.admin_url]) == 0
        await load.answers(10)
        assert asked(client, "dogs")["weights"] == "two.torchscript"
        assert main(["promote", "dogs", "1", "--url", service.admin_url]) == 0
        await load.answers(10)
    assert set(load.outcomes) == {(200, "OK")}
    assert asked(client, "dogs")["weights"] == "one.torchscript"
    assert "version 2 answers all requests for dogs" in capsys.readouterr().out
    lines = [json.loads(line) for line in service.log.read_text().splitlines() if "traffic" in line]
    assert {"2:100", "1:100"} <= {line.get("shares") for line in lines}
    assert main(["promote", "dogs", "7", "--url", service.admin_url]) == 1


def test_traffic_is_shared_as_it_is_said(service, client, grpc_address):
    with service.admin_client() as admin:
        shares = {"shares": {"1": 50, "2": 50}}
        assert admin.post("/v2/repository/models/dogs/traffic", json=shares).json()["shares"] == shares["shares"]
        seen = {asked(client, "dogs")["weights"] for _ in range(40)}
        assert seen == {"one.torchscript", "two.torchscript"}
        with grpc.insecure_channel(grpc_address) as channel:
            answers = [infer(channel, image_request(picture(0), model="dogs")) for _ in range(40)]
        said = {(each.model_version, each.parameters["weights"].string_param) for each in answers}
        assert said == {("1", "one.torchscript"), ("2", "two.torchscript")}
        for wrong in ({"3": 1}, {"1": -1, "2": 2}, {"1": 0}, {"1": True}, 5, None):
            assert admin.post("/v2/repository/models/dogs/traffic", json={"shares": wrong}).status_code == 400
    assert client.post("/v2/repository/models/dogs/traffic", json=shares).status_code == 403
    assert metric(service, "anychip_requests_total", model="dogs@2", code="OK") > 10
