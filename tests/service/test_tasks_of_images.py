"""Embeddings, maps, depth, numbers, and a task of another package: every protocol says the same."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from app.http.api_description import PredictAnswer
from models.sample import IMAGES
from tests.support import exports_of_networks
from tests.support.answers import infer_images, outputs_of
from tests.support.grpc_client import arrays_of, image_request, infer, texts_of
from tests.support.images import encoded
from tests.support.service_process import running
from tests.support.task_files import OF_IMAGES, SIDE, answers, written

IMAGE = IMAGES / "detect_1.jpg"  # 640 x 480.
OPTIONS = ("--device", "cpu", "--engine", "eager", "--precision", "fp32", "--batch-sizes", "1,2")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return [written(folder, task) for task in OF_IMAGES]


@pytest.fixture(scope="module")
def service(files, port, tmp_path_factory):
    options = ("--models", ",".join(map(str, files)), "--grpc-port", str(port), *OPTIONS)
    with running(tmp_path_factory.mktemp("service"), *options) as service:
        yield service


@pytest.fixture(scope="module")
def channel(service, port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


def predicted(client, task, query=""):
    answer = client.post(f"/v1/models/{task}:predict{query}", content=IMAGE.read_bytes()).json()
    PredictAnswer.model_validate(answer)
    [prediction] = answer["predictions"]
    assert (prediction.pop("width"), prediction.pop("height")) == (640, 480)
    return prediction


def test_each_answers_in_the_form_that_the_query_says(client):
    assert predicted(client, "embed", "?normalize=l2") == {"embedding": pytest.approx([0.6, 0.8], abs=1e-4)}
    encoded = predicted(client, "embed", "?encoding=base64")["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == pytest.approx([3, 4], abs=1e-4)
    assert "mask" in predicted(client, "segment_semantic", "?masks=rle")["areas"][1]
    assert "float32" in predicted(client, "depth", "?encoding=base64")["depth"]


@pytest.mark.parametrize("task", OF_IMAGES)
def test_every_protocol_says_the_same(client, channel, task):
    image = IMAGE.read_bytes()
    instances = {"instances": [{"b64": base64.b64encode(image).decode()}]}
    [wanted] = client.post(f"/v1/models/{task}:predict", json=instances).json()["predictions"]
    assert client.post(f"/predictions/{task}", content=image).json() == wanted
    described = client.get(f"/v2/models/{task}").json()
    [spec, _] = described["outputs"]
    assert described["parameters"]["task"] == task
    _, rest = outputs_of(infer_images(client, f"/v2/models/{task}", image))
    rpc = infer(channel, image_request(image, model=task))
    assert json.loads(rest["predictions"][0]) == json.loads(texts_of(rpc, "predictions")[0]) == wanted
    tensor = rest[spec["name"]]
    assert [-1, *tensor.shape[1:]] == spec["shape"]
    if spec["datatype"] == "FP32":
        np.testing.assert_array_equal(arrays_of(rpc)[spec["name"]], tensor)
        np.testing.assert_allclose(tensor[0], answers(task).numpy().reshape(tensor.shape[1:]), atol=1e-4)
    else:
        np.testing.assert_array_equal(tensor[0], np.repeat([[0] * 32 + [1] * 32], SIDE, axis=0))


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-tasks.md"


class Mean(nn.Module):
    """How bright an image is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((1, 2, 3)).reshape(-1, 1)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """With the package of the page, installed as its reader would."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:toml|python)\n# ([\w./]+)\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in blocks] == ["pyproject.toml", "anychip_sharpness/__init__.py"]
    for name, content in blocks:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content, encoding="utf-8")
    command = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", *command, str(source)], check=True, timeout=120)
    return {"PYTHONPATH": f"{target}{os.pathsep}{ROOT}"}


def png(level):
    """Grey in the middle, black around it."""
    image = Image.new("RGB", (200, 100))
    image.paste((level, level, level), (60, 10, 140, 90))
    return encoded(image)


@pytest.fixture(scope="module")
def adapted(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    [beside] = re.findall(r"```json\n(\{\"task\": \"sharpness\".*?)\n```", PAGE.read_text(encoding="utf-8"))
    given = torch.rand(1, 3, 64, 64)
    file = exports_of_networks.written(folder / "sharp.onnx", Mean(), given, json.loads(beside))
    with (
        running(folder, "--models", str(file), *OPTIONS, environment=environment) as service,
        service.client() as client,
    ):
        yield client


def test_it_is_served_like_any_network(adapted):
    images = [("file", (f"{level}.png", png(level))) for level in (204, 51)]
    answer = adapted.post("/v1/models/sharp:predict", files=images).json()
    assert answer["predictions"] == [
        {"sharpness": pytest.approx(0.8, abs=1e-4), "is_sharp": True, "width": 200, "height": 100},
        {"sharpness": pytest.approx(0.2, abs=1e-4), "is_sharp": False, "width": 200, "height": 100},
    ]
    [served_on] = adapted.get("/v2/models/sharp").json()["parameters"]["served_on"]
    assert served_on["errors"] == {"sharpness": pytest.approx(0, abs=1e-5)}, "the gate measures what the task does"
    pixels = {"name": "pixels", "datatype": "UINT8", "shape": [1, 64, 64, 3], "data": [51] * (64 * 64 * 3)}
    asked = {"inputs": [pixels], "outputs": [{"name": "sharpness"}]}
    [wanted] = adapted.post("/v2/models/sharp/infer", json=asked).json()["outputs"]
    assert (wanted["shape"], wanted["data"]) == ([1, 1], [pytest.approx(0.2, abs=1e-4)])
    assert adapted.post("/predictions/sharp", content=png(51)).json()["is_sharp"] is False
