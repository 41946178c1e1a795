"""A task of another package: the example of docs/own-tasks.md is installed and serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from tests.support.images import encoded
from tests.support.service_process import running

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-tasks.md"


class Mean(nn.Module):
    """How bright an image is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((1, 2, 3)).reshape(-1, 1)


class Box(nn.Module):
    """The same box in every image, as bright as the image is."""

    def __init__(self) -> None:
        super().__init__()
        self.box = nn.Parameter(torch.tensor([[16.0, 16.0, 48.0, 32.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.box.expand(x.shape[0], 4), x.mean((1, 2, 3)).reshape(-1, 1)), 1)


def written(path: Path, network: nn.Module, sidecar: str) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network.eval(), (torch.rand(1, 3, 64, 64),), str(path), dynamo=False)
    path.with_suffix(".json").write_text(sidecar)
    return path


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


@pytest.fixture(scope="module")
def sidecar():
    return re.search(r"```json\n(\{\"task\": \"sharpness\".*?)\n```", PAGE.read_text(encoding="utf-8"))[1]


def png(level):
    """Grey in the middle, black around it."""
    image = Image.new("RGB", (200, 100))
    image.paste((level, level, level), (60, 10, 140, 90))
    return encoded(image)


@pytest.fixture(scope="module")
def client(environment, sidecar, tmp_path_factory):
    """Ask a service of the page's task and of one that finds objects."""
    folder = tmp_path_factory.mktemp("service")
    files = (
        written(folder / "sharp.onnx", Mean(), sidecar),
        written(folder / "best.onnx", Box(), '{"task": "largest", "size": 64, "labels": ["thing"]}'),
    )
    options = ("--device", "cpu", "--engine", "eager", "--precision", "fp32", "--compat", "deepstack")
    models = ",".join(map(str, files))
    with running(folder, "--models", models, *options, environment=environment) as service, service.client() as client:
        yield client


def test_it_is_served_like_any_network(client):
    images = [("file", (f"{level}.png", png(level))) for level in (204, 51)]
    answer = client.post("/v1/models/sharp:predict", files=images).json()
    assert answer["predictions"] == [
        {"sharpness": pytest.approx(0.8, abs=1e-4), "is_sharp": True, "width": 200, "height": 100},
        {"sharpness": pytest.approx(0.2, abs=1e-4), "is_sharp": False, "width": 200, "height": 100},
    ]
    described = client.get("/v2/models/sharp").json()
    assert [each["name"] for each in described["outputs"]] == ["sharpness", "predictions"]
    [served_on] = described["parameters"]["served_on"]
    assert served_on["errors"] == {"sharpness": pytest.approx(0, abs=1e-5)}, "the gate measures what the task does"
    raw = {"Inference-Header-Content-Length": "0"}
    answer = client.post("/v2/models/sharp/infer", content=png(204), headers=raw)
    assert b"is_sharp" in answer.content
    pixels = {"name": "pixels", "datatype": "UINT8", "shape": [1, 64, 64, 3], "data": [51] * (64 * 64 * 3)}
    asked = {"inputs": [pixels], "outputs": [{"name": "sharpness"}]}
    [wanted] = client.post("/v2/models/sharp/infer", json=asked).json()["outputs"]
    assert (wanted["shape"], wanted["data"]) == ([1, 1], [pytest.approx(0.2, abs=1e-4)])
    status = client.get("/v1/models").json()["models"][0]
    assert (status["task"], status["finds"]) == ("sharpness", "other")
    assert client.post("/predictions/sharp", content=png(51)).json()["is_sharp"] is False
    assert "finds no objects" in client.post("/v1/models/sharp:predict?tile=64", files=images).json()["error"]


def test_one_that_finds_objects_is_asked_and_shown_like_ours(client):
    white = encoded(Image.new("RGB", (128, 128), "white"))
    upload = {"file": ("white.png", white)}
    assert client.get("/v1/models").json()["models"][1]["finds"] == "objects"
    [prediction] = client.post("/v1/models/best:predict", files=upload).json()["predictions"]
    [found] = prediction["detections"]
    assert (found["label"], found["score"]) == ("thing", pytest.approx(1, abs=1e-4))
    assert found["box"] == pytest.approx({"x1": 32, "y1": 32, "x2": 96, "y2": 64})
    [tiled] = client.post("/v1/models/best:predict?tile=64&overlap=0", files=upload).json()["predictions"]
    corners = {(each["box"]["x1"], each["box"]["y1"]) for each in tiled["detections"]}
    assert {(80, 80), (16, 80)} <= corners, "each tile has one of its own"
    named = {"image": ("white.png", white)}
    [theirs] = client.post("/v1/vision/detection", files=named).json()["predictions"]
    assert theirs["label"] == "thing"


@pytest.mark.parametrize(
    ("sidecar", "words"),
    [
        ('{"task": "sharpness", "size": 64, "options": {"limit": "much"}}', "could not convert string to float"),
        ('{"task": "blur", "size": 64}', "there is no task 'blur', but classify, detect"),
    ],
)
def test_what_does_not_fit_stops_the_start_in_a_sentence(environment, tmp_path, sidecar, words):
    file = written(tmp_path / "sharp.onnx", Mean(), sidecar)
    command = [sys.executable, "-m", "app", "serve", "--models", str(file), "--port", "0", "--device", "cpu"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
