"""Stub drivers, and our adapters over the vendors' own packages that run over them: see tests/support/stub_drivers.py.

Each in a process of its own, because PyTorch has room for one accelerator. It proves what the host does: detection,
memory, copies, errors. No kernel of a vendor's has run, and no time means anything.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support import stub_drivers
from tests.support.device_child import child, over
from tests.support.photographs import FILES
from tests.support.service_process import running
from tests.support.vendor_sources import wheel

ROOT = Path(__file__).parents[2]
SERVE = ("--models", "resnet18", "--weights", "random", "--batch-sizes", "1")
JPEG = {"Content-Type": "image/jpeg"}


@pytest.mark.parametrize("stub", ["cuda", "npu"])
def test_engines_that_a_stub_cannot_have_refuse_and_eager_serves(stub: str) -> None:
    """A stub's driver captures nothing: a failed capture must leave a device on which eager runs."""
    code = (
        "import json\nimport tests.support.stubs.plugin\nfrom backends import BACKENDS\n"
        "from tests.support.networks import Brightness, images\n"
        f"backend = next(each for each in BACKENDS if each.name == {stub!r})\n"
        f"executable, report = backend.load(Brightness(), '{stub}:0', 'auto', 'fp32', (1, 2))\n"
        "pixels = images(2, (8, 8, 3))[:, :, :6].copy()\n"
        "means = executable.run(pixels)[0]\n"
        "right = bool(abs(means - pixels.mean(axis=(1, 2, 3))).max() < 1e-2)\n"
        "print(json.dumps([report.engine, dict(report.refusals), right]))\n"
    )
    done = child(*over(stub), "-c", code)
    assert done.returncode == 0, done.stderr[-3000:]
    engine, refusals, right = json.loads(done.stdout.splitlines()[-1])
    assert (engine, right) == ("eager", True)
    assert list(refusals) == ["torchair" if stub == "npu" else "tensorrt", "graph"]
    assert refusals["graph"].startswith("the network cannot be captured: ")


@pytest.mark.parametrize("error", [2, 801])
def test_a_refusal_to_lock_memory_is_nobody_elses_error(error: int) -> None:
    """CUDA keeps a refusal as the thread's last error, which the next kernel reports: 2 is "out of memory"."""
    code = (
        "import numpy\nfrom tests.support.stubs.plugin import set_knob\nfrom backends import BACKENDS\n"
        "from tests.support.networks import Brightness, images\n"
        "backend = next(each for each in BACKENDS if each.name == 'cuda')\n"
        "executable, report = backend.load(Brightness(), 'cuda:0', 'eager', 'fp32', (1, 2))\n"
        "rows = [each.copy() for each in images(2, (8, 8, 3))[:, :, :6]]\n"
        f"set_knob('refuse_lock', {error})\n"
        "means = executable.start_rows(rows, 2).outputs()[0]\n"
        "set_knob('refuse_lock', 0)\n"
        "again = executable.start_rows(rows, 2).outputs()[0]\n"
        "right = numpy.array(rows).mean(axis=(1, 2, 3))\n"
        "print(bool(abs(means - right).max() < 1e-2 and abs(again - right).max() < 1e-2))\n"
    )
    done = child(*over("cuda"), "-c", code)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "True"


def test_the_service_on_the_stub_cuda_runtime(tmp_path: Path) -> None:
    options = (*SERVE, "--device", "cuda:1", "--plugins", "tests.support.stubs.plugin")
    with running(tmp_path, *options, environment=stub_drivers.cudart(sys.executable)) as service:
        answer = httpx.post(
            f"{service.url}/v1/models/resnet18:predict", content=FILES[0].read_bytes(), headers=JPEG, timeout=120
        )
        assert answer.status_code == 200, answer.text
        [device] = httpx.get(f"{service.url}/v1/devices", timeout=60).json()["devices"]
        assert device["device"] == "cuda:1"
        metrics = httpx.get(f"{service.url}/metrics", timeout=60).text
        found = re.search(r'anychip_device_memory_bytes\{.*device="cuda:1".*kind="allocated".*\} (\S+)', metrics)
        assert found, metrics
        assert float(found[1]) > 40e6  # resnet18's weights


@pytest.fixture(scope="module")
def torch_npu_without_cann(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Unpack the newest wheel as pip would; yield a folder for PYTHONPATH."""
    found = wheel("torch-npu")
    if isinstance(found, str):
        pytest.skip(found)
    if f"cp{sys.version_info[0]}{sys.version_info[1]}-" not in found.name:
        pytest.skip(f"{found.name} is for another Python")
    folder = tmp_path_factory.mktemp("torch_npu")
    with zipfile.ZipFile(found) as archive:
        archive.extractall(folder)
    yield folder
    shutil.rmtree(folder)


def test_torch_npu_without_cann_stops_torch_but_not_us(
    torch_npu_without_cann: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = {"PYTHONPATH": f"{ROOT}:{torch_npu_without_cann}"}
    stopped = child(sys.executable, path, "-c", "import torch", autoload=True)
    assert stopped.returncode != 0
    assert "torch_npu" in stopped.stderr

    done = child(sys.executable, path, "-m", "app", "devices", "--json", autoload=True)
    assert done.returncode == 0, done.stderr
    rows = {row["device"]: row for row in json.loads(done.stdout)}
    assert rows["cpu:0"]["ok"]
    assert not rows["npu"]["ok"]
    assert rows["npu"]["detail"].startswith("torch_npu is installed and cannot be used: ")
    assert "libhccl.so" in rows["npu"]["detail"]

    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")  # Whoever starts the service has not set it.
    with running(tmp_path, *SERVE, environment=path) as service:
        answer = httpx.post(
            f"{service.url}/v1/models/resnet18:predict", content=FILES[0].read_bytes(), headers=JPEG, timeout=120
        )
        assert answer.status_code == 200, answer.text
        assert service.terminate() == 0
