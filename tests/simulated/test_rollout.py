"""Versions of a model behind one name: which answers, what the other one would have said, and changing over."""

from __future__ import annotations

import asyncio
import io
import json
import time

import grpc
import httpx
import pytest
from PIL import Image

from app.cli import main
from tests.support import small_classifier
from tests.support.grpc_client import image_request, infer
from tests.support.load import Load, until
from tests.support.null_service import metric
from tests.support.service_process import free_port, running
from tests.support.work import until as until_it_is

SIMULATED = ("--device", "npu", "--simulate", "npu:1", "--timeout-ms", "60000")
OUTCOMES = ("same", "different", "dropped")


def picture(colour):
    """Build a JPEG of one colour: the network's class of the same number."""
    buffer = io.BytesIO()
    rgb = tuple(255 if channel == colour else 30 for channel in range(3))
    Image.new("RGB", (48, 48), rgb).save(buffer, "JPEG")
    return buffer.getvalue()


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
    options = (*SIMULATED, "--shadow", "dogs=2:1,cats=2:1")
    options += ("--grpc-port", grpc_address.partition(":")[2])
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


def by_grpc(channel):
    """Return the version that an answer over gRPC names, and the weights that made it."""
    answer = infer(channel, image_request(picture(0), model="dogs"))
    return answer.model_version, answer.parameters["weights"].string_param


def shadows(client):
    return {each["model"]: each for each in client.get("/v1/stats").json()["shadows"]}


def test_a_version_is_asked_for_by_its_number(client):
    assert asked(client, "dogs")["weights"] == "one.torchscript"
    assert asked(client, "dogs", version="1")["weights"] == "one.torchscript"
    assert asked(client, "dogs", version="2")["weights"] == "two.torchscript"
    missing = client.post("/v1/models/dogs:predict?version=9", content=picture(0))
    assert (missing.status_code, missing.json()["code"]) == (404, "MODEL_NOT_FOUND")
    assert client.get("/v2/models/dogs").json()["versions"] == ["1", "2"]
    pixels = {"name": "pixels", "shape": [1, 32, 32, 3], "datatype": "UINT8", "data": [0] * 3072}
    answer = client.post("/v2/models/dogs/versions/2/infer", json={"inputs": [pixels]}).json()
    assert (answer["model_version"], answer["parameters"]["weights"]) == ("2", "two.torchscript")
    index = client.post("/v2/repository/index").json()
    every = {(n, v) for n in ("dogs", "cats") for v in "12"}
    assert {(each["name"], each["version"]) for each in index} == every
    counted = client.get("/v2/models/stats").json()["model_stats"]
    assert {(each["name"], each["version"]) for each in counted} == every


def test_a_shadow_finds_the_class_that_another_version_does_not_see_and_nothing_where_weights_are_the_same(client):
    for number in range(60):
        for name in ("dogs", "cats"):
            asked(client, name, number % 3)
        time.sleep(0.05)  # A moment of rest, as live traffic has it.

    def compared(name):
        return shadows(client)[name]["same"] + shadows(client)[name]["different"]

    def enough():
        asked(client, "dogs", 2)
        asked(client, "cats", 2)
        return min(compared("dogs"), compared("cats")) >= 10

    until_it_is(enough)
    found = shadows(client)
    assert found["cats"]["different"] == 0
    assert found["cats"]["same"] >= 10
    by_class = found["dogs"]["classes"]
    assert by_class["star"]["images"] == by_class["star"]["different"] > 0
    assert all(each["different"] == 0 for label, each in by_class.items() if label != "star")
    assert found["dogs"]["different"] == by_class["star"]["different"]


async def test_a_shadow_stands_back_while_the_device_is_busy(tmp_path):
    """Sixteen clients for batches of four, which take half a second: the device always has work."""
    models = [small_classifier.by_colour(tmp_path, name, name.replace("@", "_")) for name in ("dogs", "dogs@2")]
    slow = ("--device", "npu", "--simulate", "npu:1,copy_delay_ms=500", "--batch-sizes", "1,2,4", *SIMULATED[4:])
    with running(tmp_path, "--models", ",".join(models), *slow, "--shadow", "dogs=2:1") as service:

        def counted(*outcomes):
            return sum(
                metric(service, "anychip_shadow_images_total", model="dogs@2", outcome=each) for each in outcomes
            )

        async with Load(service.url, "/v1/models/dogs:predict", picture(0), 16) as load:
            await until(lambda: counted("dropped") >= 8)
            assert counted("same", "different") == 0
        assert set(load.outcomes) == {(200, "OK")}


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
            said = {by_grpc(channel) for _ in range(40)}
        assert said == {("1", "one.torchscript"), ("2", "two.torchscript")}
        for wrong in ({"shares": {"3": 1}}, {"shares": {"1": -1, "2": 2}}, {"shares": {"1": 0}}, {"shares": 5}, {}):
            assert admin.post("/v2/repository/models/dogs/traffic", json=wrong).status_code == 400
    assert client.post("/v2/repository/models/dogs/traffic", json=shares).status_code == 403
    assert metric(service, "anychip_requests_total", model="dogs@2", code="OK") > 10


async def asked_in_turn(url, images):
    """So many images of all three classes, one after the other with moments of rest, at versions of two models."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for number in range(images):
            for name in ("dogs", "cats"):
                answer = await client.post(f"/v1/models/{name}:predict", content=picture(number % 3))
                assert answer.status_code == 200
            await asyncio.sleep(0.05)


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_a_regression_of_one_class_is_seen_within_a_thousand_images(tmp_path):
    models = [
        small_classifier.by_colour(tmp_path, "dogs", "one"),
        small_classifier.by_colour(tmp_path, "dogs@2", "two", blind=2),
        small_classifier.by_colour(tmp_path, "cats", "three"),
        small_classifier.by_colour(tmp_path, "cats@2", "four"),
    ]
    shadow = ("--shadow", "dogs=2,cats=2")  # A tenth of the images, as by default.
    with running(tmp_path, "--models", ",".join(models), *SIMULATED, *shadow) as service, service.client() as client:
        await asked_in_turn(service.url, 1000)
        await until(lambda: all(sum(found[each] for each in OUTCOMES) > 50 for found in shadows(client).values()))
        found = shadows(client)
    print({name: {each: of[each] for each in (*OUTCOMES, "classes")} for name, of in found.items()})
    assert found["cats"]["different"] == 0
    assert found["cats"]["same"] > 30
    by_class = found["dogs"]["classes"]
    assert by_class["star"]["images"] == by_class["star"]["different"] >= 10
    assert all(each["different"] == 0 for label, each in by_class.items() if label != "star")


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_at_capacity_a_shadow_costs_nothing(tmp_path):
    """Answers a second of a model with a shadow, beside those of one like it without, turn and turn about."""
    models = [
        small_classifier.by_colour(tmp_path, name, name.replace("@", "_")) for name in ("dogs", "dogs@2", "plain")
    ]
    answers = {"dogs": 0, "plain": 0}
    with running(tmp_path, "--models", ",".join(models), *SIMULATED, "--shadow", "dogs=2:1") as service:
        for turn in range(12):
            for name in [*answers][:: 1 if turn % 2 else -1]:
                async with Load(service.url, f"/v1/models/{name}:predict", picture(0), 16) as load:
                    await asyncio.sleep(3)
                assert set(load.outcomes) == {(200, "OK")}
                answers[name] += load.outcomes.total()
        with service.client() as client:
            report = shadows(client)["dogs"]
    ratio = answers["dogs"] / answers["plain"]
    print(answers, f"ratio {ratio:.3f}", {each: report[each] for each in OUTCOMES})
    assert ratio >= 0.98
    assert report["dropped"] > 0
