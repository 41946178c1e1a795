"""NVIDIA's tritonclient, unchanged and in an environment of its own, against a running service: HTTP and gRPC."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from models import open_model, parse_spec
from tests.support.clients_page import assert_on_the_page
from tests.support.images import JPEG
from tests.support.photographs import FILES
from tests.support.service_process import running

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ANYCHIP_TEST_CLIENTS_PYTHON") or ROOT / ".venv-clients" / "bin" / "python")
WAIT_S = 280

pytestmark = [
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason=f"tritonclient is not there: make clients-environment, or name a Python that has it; {PYTHON}",
    ),
]


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    network = open_model(parse_spec("resnet18:random"), ROOT).network()
    with torch.inference_mode():
        logits = network(torch.from_numpy(pixels))[0].numpy()
        normalised = network.normalise(torch.from_numpy(pixels)).contiguous().numpy()
    return pixels, normalised, logits


@pytest.fixture(scope="module")
def service(tmp_path_factory, port):
    options = ("--models", "resnet18,yolov8n", "--weights", "random", "--batch-sizes", "1,2", "--grpc-port", str(port))
    options += ("--engine", "eager", "--precision", "fp32")  # What others compile is nothing to a client.
    options += ("--admin", "port")  # Its client has one address for everything.
    with running(tmp_path_factory.mktemp("service"), *options, "--compat", "triton") as service:
        yield service


@pytest.fixture(scope="module", params=["http", "grpc"])
def report(request, service, port, given, tmp_path_factory):
    pixels, normalised, _ = given
    file = tmp_path_factory.mktemp("arrays") / "given.npz"
    first, second = (np.frombuffer(path.read_bytes(), np.uint8) for path in FILES[:2])
    np.savez(file, first=first, second=second, pixels=pixels, input=normalised)
    url = service.url.removeprefix("http://") if request.param == "http" else f"127.0.0.1:{port}"
    script = Path(__file__).parents[1] / "support" / "tritonclient_session.py"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [PYTHON, script, request.param, url, file],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    return {**json.loads(ran.stdout), "transport": request.param}


@pytest.fixture(scope="module")
def expected(client):
    return {
        model: [
            client.post(f"/v1/models/{model}:predict", content=file.read_bytes(), headers=JPEG).json()["predictions"][0]
            for file in FILES[:2]
        ]
        for model in ("resnet18", "yolov8n")
    }


def test_it_finds_the_server_alive_and_described(report):
    ran = (
        "REST and gRPC: metadata",
        "configuration",
        "images",
        "tensors",
        "classification",
        "compression",
        "statistics",
    )
    assert_on_the_page("tritonclient", report["version"], (*ran, "repository"))
    assert report["live"]
    assert report["ready"]
    assert report["model_ready"] == [True, True]
    assert report["server"]["name"] == "anychip"
    names = [{each["name"] for each in report["metadata"][key]} for key in ("inputs", "outputs")]
    assert names == [{"image", "pixels", "input"}, {"logits", "probabilities", "predictions"}]
    assert report["config"]["max_batch_size"] == 64


def test_images_are_answered_as_everywhere_to_the_bit(report, expected):
    assert report["id"] == "mine"
    assert [json.loads(each) for each in report["image"]["predictions"]] == expected["resnet18"]
    assert [json.loads(each) for each in report["detections"]["predictions"]] == expected["yolov8n"]
    assert np.shape(report["image"]["logits"]) == (2, 1000)


def test_pixels_and_normalised_tensors_reach_the_network(report, given):
    logits = given[2]
    keys = [key for key in report if key.startswith(("pixels_", "input_", "compressed"))]
    assert len(keys) == (6 if report["transport"] == "http" else 3)
    for key in keys:
        # Of half precision the tensors themselves are rounded, by up to a two-thousandth.
        atol = 0.03 if key == "input_half" else 1e-4
        np.testing.assert_allclose(report[key], logits, rtol=1e-4, atol=atol, err_msg=key)


def test_classification_and_priority(report, expected):
    classes = expected["resnet18"][0]["classes"][:3]
    assert [int(text.split(":")[1]) for text in report["classification"]] == [each["class_id"] for each in classes]
    assert [text.split(":", 2)[2] for text in report["classification"]] == [each["label"] for each in classes]
    assert report["priority"] == [1, 1000]


def test_statistics_and_the_repository(report):
    [statistics] = report["statistics"]["model_stats"]
    assert statistics["name"] == "resnet18"
    assert int(statistics["inference_count"]) >= 8
    assert int(statistics["inference_stats"]["success"]["count"]) >= 5
    assert {(each["name"], each["state"]) for each in report["index"]} == {("resnet18", "READY"), ("yolov8n", "READY")}
    assert (report["unloaded"], report["loaded"]) == (False, True)


def test_errors_are_clear(report):
    statuses = {what: error and error[0] for what, error in report["errors"].items()}
    timeout = statuses.pop("timeout")
    if report["transport"] == "http":
        wrong = dict.fromkeys(("input", "datatype", "shape", "output", "config"), "400")
        assert statuses == {**wrong, "model": "404", "content": "422"}
        assert timeout in ("503", "504")
    else:
        wrong = dict.fromkeys(
            ("input", "datatype", "shape", "output", "config", "content"), "StatusCode.INVALID_ARGUMENT"
        )
        assert statuses == {**wrong, "model": "StatusCode.NOT_FOUND"}
        assert timeout in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")
    assert all(error[1] for error in report["errors"].values())
    assert "resnet18, yolov8n" in report["errors"]["model"][1]
