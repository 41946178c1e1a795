"""The installed command and its children, in a folder that has files of the names they import."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import httpx
import numpy as np
import orjson
import pytest
import torch
from PIL import Image

from anychip_base import interpreter
from tests.support.exported_files import frozen

SCRIPT = Path(sys.executable).with_name("anychip")
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="anychip is not installed in this environment")
NAMES = (
    *("app", "models", "backends", "anychip_tools", "anychip_compat", "torch", "torchvision", "numpy", "cv2", "PIL"),
    *(
        "onnx",
        "onnxruntime",
        "openvino",
        "orjson",
        "msgspec",
        "pydantic",
        "json",
        "pickle",
        "random",
        "queue",
        "socket",
    ),
    *("asyncio", "logging", "multiprocessing", "subprocess", "tempfile", "threading", "runpy", "signal", "struct"),
)
"""Ours, libraries, and modules of Python that no script of pip and no .pth file imports before the command begins."""
COUNT = 501  # So many that processes decode.
LIMIT_S = 240


class Mean(torch.nn.Module):
    """Two classes, of the mean of an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean((1, 2, 3)).unsqueeze(1)
        return torch.cat([mean, -mean], 1)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a module and a package of each name; an import of one leaves a mark and ends the process."""
    folder = tmp_path_factory.mktemp("hostile")
    mark = folder / "imported.txt"
    text = f"import os\nopen({str(mark)!r}, 'a').write(__file__ + chr(10))\nos._exit(66)\n"
    for name in NAMES:
        (folder / f"{name}.py").write_text(text)
        if name in interpreter.OURS:
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(text)
    frozen(Mean(), (torch.rand(2, 3, 32, 32),), folder / "net.pt2")
    (folder / "net.json").write_bytes(orjson.dumps({"task": "classify", "labels": ["light", "dark"], "size": [32, 32]}))
    (folder / "images").mkdir()
    Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(folder / "images" / "0.png")
    for number in range(1, COUNT):
        (folder / "images" / f"{number}.png").hardlink_to(folder / "images" / "0.png")
    return folder


@pytest.fixture
def environment(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Of the command, which has this as its current folder and on PYTHONPATH. No child has imported one in the end."""
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(hostile / "home"), "ANYCHIP_TRUST_EXPORTED": "true"}
    bare["PYTHONPATH"] = str(hostile)
    monkeypatch.chdir(hostile)
    yield bare
    mark = hostile / "imported.txt"
    assert not mark.exists(), mark.read_text()


def ran(environment: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [SCRIPT, *words], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_files_are_read_decoded_and_computed(environment: dict[str, str]) -> None:
    """By the child that tries a file, children that look for devices, decoders, and the confined worker."""
    options = ("--device", "cpu", "--engine", "eager", "--precision", "fp32", "--decoders", "2")
    assert ran(environment, "predict", "net=net.pt2", "images", *options).count("light") == COUNT


def test_a_service_answers(environment: dict[str, str]) -> None:
    """By fork servers, workers of both kinds, decoders, an ingress and the converter of large requests."""
    models = ("--models", "net=net.pt2,sample=resnet50:sample", "--device", "cpu", "--engine", "eager")
    options = ("--precision", "fp32", "--batch-sizes", "1", "--port", "0", "--ingresses", "1")
    log = Path(environment["HOME"]).with_name("service.log")
    with log.open("w") as errors:
        process = subprocess.Popen(
            [SCRIPT, "serve", *models, *options], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        found = re.search(r"https?://\S+", process.stdout.readline())
        assert found, log.read_text()
        photo = Path("images/1.png").read_bytes()
        noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)
        encoded = base64.b64encode(cv2.imencode(".png", noise)[1].tobytes()).decode()
        with httpx.Client(base_url=found[0], timeout=LIMIT_S, trust_env=False) as client:
            for name in ("net", "sample"):
                answer = client.post(f"/v1/models/{name}:predict", content=photo, headers={"Content-Type": "image/png"})
                assert answer.status_code == 200, answer.text
                answer = client.post(f"/v1/models/{name}:predict", json={"instances": [{"b64": encoded}]})
                assert answer.status_code == 200, answer.text
    finally:
        process.terminate()
        assert process.wait(LIMIT_S) == 0, log.read_text()
        if process.stdout is not None:
            process.stdout.close()


def test_the_doctor_finds_what_is_installed(environment: dict[str, str]) -> None:
    printed = ran(environment, "doctor", "--device", "cpu", "--skip", "port,weights,limits,cache")
    assert "torch" in printed


def test_a_child_keeps_what_vendors_put_on_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CANN's set_env.sh does; and the variable, for Pythons that vendors' compilers start."""
    (tmp_path / "acl_of_a_vendor.py").write_text("name = 'acl'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import acl_of_a_vendor, os; print(acl_of_a_vendor.name, os.environ['PYTHONPATH'])"
    done = subprocess.run(
        interpreter.python_command("-c", code), capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == f"acl {tmp_path}\n"
