"""The service on ARM, by qemu: loader, decoders, PyTorch's eager engine and the processes around them.

No processor of ARM is at hand. What is emulated is slow, and says nothing of speed, nor of a kernel's confinement
there: qemu passes on neither seccomp nor Landlock. Nor does it pass on PR_SET_CHILD_SUBREAPER, by which what is forked
for the server becomes its child: that is set before qemu is started, and stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import torchvision

from models.sample import IMAGES
from tests.support.constants import words as constants_before
from tests.support.service_process import running, stop

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("ANYCHIP_TEST_ARM_PYTHON") or ROOT / ".venv-arm" / "bin" / "python")
ADOPTING = """
import ctypes, os, sys
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
PATIENT = {"app.processes.fork_server._ANSWER_S": 120, "app.processes.fork_server._IMPORT_S": 500}
"""What is emulated takes a minute to import what takes a second."""
HERE = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="make arm-environment makes .venv-arm, which is not here"),
]


@pytest.fixture
def models(tmp_path: Path) -> str:
    """Write a small classifier whose scores lie apart; return its entry for `--models`."""
    torch.manual_seed(0)
    network = torchvision.models.mobilenet_v3_small(num_classes=10)
    last = network.classifier[-1]
    with torch.no_grad():
        last.bias.zero_()
        last.weight *= 3 / network.eval()(torch.randn(1, 3, 224, 224)).std()  # Else all classes are alike.
    file = tmp_path / "shapes.pth"
    torch.save(network.state_dict(), file)
    file.with_suffix(".labels.txt").write_text("\n".join(f"shape {number}" for number in range(10)))
    return f"shapes=mobilenet_v3_small:{file}"


@contextlib.contextmanager
def emulated(folder: Path, *options: str) -> Iterator[str]:
    """Start a service on emulated ARM and yield its address."""
    log = folder / "arm.log"
    words = [
        *constants_before(PATIENT),
        "serve",
        "--port",
        "0",
        "--admin",
        "off",
        "--device",
        "cpu",
        "--engine",
        "eager",
    ]
    words += ["--precision", "fp32", "--batch-sizes", "1", "--start-timeout-s", "500", *options]
    variables = {**HERE, "HOME": str(folder), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", ADOPTING, str(PYTHON), *words],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"the service did not start: {line!r} {log.read_text()}"
        yield found.group()
    finally:
        stop(process)
        if process.stdout is not None:
            process.stdout.close()
    assert process.returncode == 0, log.read_text()


def asked(url: str) -> list[dict[str, float]]:
    """Return the scores of all classes for two images; one request follows the other."""
    with httpx.Client(base_url=url, timeout=300) as client:
        answers = [
            client.post("/v1/models/shapes:predict?top_k=10&timeout_ms=250000", content=(IMAGES / name).read_bytes())
            for name in ("classify_star.jpg", "detect_1.jpg")
        ]
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    every = [answer.json()["predictions"][0]["classes"] for answer in answers]
    return [{each["label"]: each["score"] for each in classes} for classes in every]


def test_a_service_on_arm_answers_as_the_one_here(tmp_path: Path, models: str) -> None:
    with running(tmp_path, "--models", models, "--batch-sizes", "1") as service:
        expected = asked(service.url)
    with emulated(tmp_path, "--models", models, "--decoders", "1") as url:
        answers = asked(url)
    for ours, theirs in zip(answers, expected, strict=True):
        assert max(theirs.values()) > 0.2  # They lie apart.
        assert ours == pytest.approx(theirs, abs=1e-3)
