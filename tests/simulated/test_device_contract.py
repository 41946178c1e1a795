"""The device contract for every device there is, can be simulated, or can be stubbed; services on stubs.

PyTorch has room for one accelerator a process. Over simulated and stubbed devices it proves what the host does:
detection, memory, copies, errors. No kernel of a vendor's runs there, and no time means anything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest

from anychip_tools.behaviour import device_types
from backends import BACKENDS
from tests.support import cann_double
from tests.support.device_child import child, contract, over
from tests.support.null_service import metric
from tests.support.photographs import FILES
from tests.support.service_process import running
from tests.support.stub_drivers import cann, cudart
from tests.support.vendor_sources import TABLES

FIRST, *OTHERS = device_types()
REAL = [backend.name for backend in BACKENDS if backend.name in ("cpu", "null") or backend.probe().available]

# What must have run, not skipped: on every device, where it computes, where it has knobs, where there is a driver.
EVERYWHERE = {"test_the_probe_and_the_devices"}
COMPUTES = EVERYWHERE | {
    "test_sample_weights_answer_on_photographs_as_on_the_cpu",
    "test_what_anychip_verify_checks_where_it_computes",
}
KNOBS = COMPUTES | {"test_out_of_memory_is_said_and_survived", "test_a_fault_means_that_the_device_is_lost"}
DRIVER = KNOBS | {"test_an_error_that_lasts_means_that_the_device_is_lost_whatever_its_words"}


@pytest.mark.parametrize("name", REAL)
def test_a_device_that_is_here(name: str) -> None:
    ran = contract("tests.support.devices.plain", name, sys.executable, {})
    assert ran >= (EVERYWHERE if name == "null" else COMPUTES)


def test_the_first_simulated_device() -> None:
    assert contract("tests.support.devices.simulated", FIRST, sys.executable, {}) >= KNOBS


@pytest.mark.parametrize("device_type", OTHERS)
def test_every_other_simulated_device_has_its_names(device_type: str) -> None:
    """They differ in names, not in how they compute."""
    chosen = ("-k", "probe or refused_by_name")
    assert contract("tests.support.devices.simulated", device_type, sys.executable, {}, *chosen) >= EVERYWHERE


def test_ascend_without_torch_npu() -> None:
    """CANN's own models over doubles of pyACL and atc."""
    ran = contract("tests.support.devices.cann", "npu", sys.executable, cann_double.variables(), "-k", "not resnet50")
    assert ran >= KNOBS - {"test_out_of_memory_is_said_and_survived"}


OLDER = [pytest.param(f"npu-{each}", marks=pytest.mark.nightly) for each in TABLES["torch_npu"]["older"]]


@pytest.mark.parametrize("stub", ["cuda", "npu", *OLDER])
def test_a_vendors_own_package_over_a_stub_driver(stub: str) -> None:
    python, variables = over(stub)
    device_type = stub.partition("-")[0]
    assert contract("tests.support.stubs.plugin", device_type, python, variables, "-k", "not resnet50") >= DRIVER


def test_torch_npu_that_waits_for_every_kernel() -> None:
    """Its errors come from other calls; its answers were compared without waiting."""
    python, variables = over("npu-blocking")
    chosen = ("-k", "memory or fault or error")
    assert contract("tests.support.stubs.plugin", "npu", python, variables, *chosen) >= DRIVER - COMPUTES


# --- The service, and what the contract has not, over the stub drivers (tests/support/stub_drivers.py)

ROOT = Path(__file__).parents[2]
PREDICT = "/v1/models/resnet18:predict"
SERVE = ("--models", "resnet18", "--weights", "random", "--batch-sizes", "1")
JPEG = {"Content-Type": "image/jpeg"}


@pytest.mark.parametrize(("stub", "error"), [("cuda", 2), ("cuda", 801), ("npu", 207001)])
def test_a_refusal_to_lock_memory_is_nobody_elses_error(stub: str, error: int) -> None:
    """CUDA keeps a refusal as the thread's last error, which the next kernel reports: 2 is "out of memory"."""
    code = (
        "import numpy\nfrom tests.support.stubs.plugin import set_knob\nfrom backends import BACKENDS\n"
        "from tests.support.networks import Brightness, images\n"
        f"backend = next(each for each in BACKENDS if each.name == {stub!r})\n"
        f"executable, report = backend.load(Brightness(), '{stub}:0', 'eager', 'fp32', (1, 2))\n"
        "rows = [each.copy() for each in images(2, (8, 8, 3))[:, :, :6]]\n"
        f"set_knob('refuse_lock', {error})\n"
        "means = executable.start_rows(rows, 2).outputs()[0]\n"
        "set_knob('refuse_lock', 0)\n"
        "again = executable.start_rows(rows, 2).outputs()[0]\n"
        "right = numpy.array(rows).mean(axis=(1, 2, 3))\n"
        "print(bool(abs(means - right).max() < 1e-2 and abs(again - right).max() < 1e-2))\n"
        # The next call sees what is not forgotten.
        "executable._forget_refusal, executable._locked = lambda: None, {}\n"
        f"set_knob('refuse_lock', {error})\n"
        "executable.start_rows(rows, 2).outputs()\n"
    )
    done = child(*over(stub), "-c", code)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr[-3000:]
    assert done.returncode == ("CUDA error: " in done.stderr) == (stub == "cuda"), done.stderr[-3000:]


def test_the_service_on_the_stub_cuda_runtime(tmp_path: Path) -> None:
    """What its plug-in has pinned and left, PyTorch keeps until a release."""
    pinned = "import torch; torch.ones(64 << 20, dtype=torch.uint8, pin_memory=True)\n"
    (tmp_path / "our_pinned.py").write_text(f"import tests.support.stubs.plugin\n{pinned}")
    options = (*SERVE, "--device", "cuda:1", "--plugins", "our_pinned")
    with running(tmp_path, *options, environment=cudart(sys.executable)) as service:
        answer = httpx.post(f"{service.url}{PREDICT}", content=FILES[0].read_bytes(), headers=JPEG, timeout=120)
        assert answer.status_code == 200, answer.text
        [device] = httpx.get(f"{service.url}/v1/devices", timeout=60).json()["devices"]
        assert device["device"] == "cuda:1"
        weights = metric(service, "anychip_device_memory_bytes", device="cuda:1", kind="allocated")
        assert weights > 40e6
        released = httpx.post(f"{service.admin_url}/v1/devices/cuda:1:release", timeout=60)
        [worker] = released.json()["workers"]
        assert worker["returned_host_bytes"]["2"] >= 64 << 20
        counted = metric(service, "anychip_cache_released_host_bytes_total", device="cuda:1", rung="2")
        assert counted == worker["returned_host_bytes"]["2"]


def test_torch_npu_without_cann_stops_torch_but_not_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = {"PYTHONPATH": cann(sys.executable)["PYTHONPATH"]}
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
        answer = httpx.post(f"{service.url}{PREDICT}", content=FILES[0].read_bytes(), headers=JPEG, timeout=120)
        assert answer.status_code == 200, answer.text
        assert service.terminate() == 0
