"""Who is behind torch.cuda, and what children report of packages that fail, end the process or hang."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from backends.detect import Found, Signs, found, vendor_of_cuda

NVIDIA = Signs(pci=frozenset({"0x10de"}))


def answer(torch: str, arch: str = "", hip: str | None = None, private_name: str = "privateuseone") -> Found:
    device = {"name": "Chip", "memory_bytes": 1, "arch": arch}
    return Found(torch=torch, cuda=None if hip else "12.9", hip=hip, private_name=private_name, devices=(device,))


@pytest.mark.parametrize(
    ("said", "here", "vendor"),
    [
        (answer("2.9.0+cu130"), NVIDIA, "nvidia"),
        (answer("2.9.0+cu130"), Signs(), "nvidia"),
        (answer("2.9.0+rocm7.1", "gfx942:sramecc+", "7.1"), Signs(), "amd"),
        (answer("2.9.0+rocm7.1", "gfx906", "7.1"), Signs(pci=frozenset({"0x1002"})), "amd"),
        (answer("2.9.0+das.opt1.dtk2604", "gfx906", "6.3"), Signs(), "hygon"),
        (answer("2.9.0", "gfx906", "6.3"), Signs(pci=frozenset({"0x1d94"})), "hygon"),
        (answer("2.9.0", "gfx906", "6.3"), Signs(hygon_software=True), "hygon"),
        (answer("2.9.0", "gfx936:xnack-", "6.3"), Signs(), "hygon"),
        (answer("2.8.0+metax3.7.2.0"), Signs(), "metax"),
        (answer("2.8.0"), Signs(pci=frozenset({"0x9999"})), "metax"),
        (answer("2.7.1+corex.4.4.0"), NVIDIA, "iluvatar"),
        (answer("2.9.0+cu129"), Signs(kunlun_software=True), "kunlun"),
        (answer("2.12.0+cpu", private_name="supa"), NVIDIA, "shim:supa"),
    ],
)
def test_vendors_behind_torch_cuda_are_told_apart(said: Found, here: Signs, vendor: str) -> None:
    assert vendor_of_cuda(said, here) == vendor


FAKE_TORCH = """
import os
__version__ = "2.9.0+cpu"
class version: cuda = hip = None
class _C:
    @staticmethod
    def _get_privateuse1_backend_name(): return "npu"
class Properties: name, total_memory = "Ascend910B3", 1 << 36
class npu:
    @staticmethod
    def is_available(): return True
    @staticmethod
    def device_count(): return 2
    @staticmethod
    def get_device_properties(index): return Properties
def get_device_module(name):
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    return {"npu": npu}[name]
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the child's path with a torch that takes no time to import."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found.cache_clear()
    return tmp_path


def test_a_child_lists_devices_whatever_the_package_prints(packages: Path) -> None:
    (packages / "fake_npu.py").write_text("print('Warning: ASCEND_HOME_PATH is not set.')", encoding="utf-8")
    said = found("fake_npu", "npu")
    assert (said.error, said.torch, said.private_name) == ("", "2.9.0+cpu", "npu")
    assert [(one["name"], one["memory_bytes"]) for one in said.devices] == [("Ascend910B3", 1 << 36)] * 2
    assert "fake_npu" not in sys.modules


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ImportError('libhccl.so: cannot open')", "ImportError: libhccl.so: cannot open"),
        ("raise Exception('ASCEND_OPP_PATH is not set\\nmore')", "Exception: ASCEND_OPP_PATH is not set"),
        ("try:\n 1/0\nexcept ZeroDivisionError as e:\n raise RuntimeError('x') from e", "ZeroDivisionError"),
        ("import os, sys; print('terminate called', file=sys.stderr, flush=True); os.abort()", "terminate called"),
    ],
    ids=["no-driver", "bare-exception", "cause", "abort"],
)
def test_a_package_that_fails_is_an_error_in_one_line(packages: Path, source: str, error: str) -> None:
    (packages / "fake_npu.py").write_text(source, encoding="utf-8")
    said = found("fake_npu", "npu")
    assert error in said.error
    assert "\n" not in said.error
    assert said.devices == ()


def test_a_package_that_hangs_is_ended_at_the_time_limit(packages: Path) -> None:
    (packages / "fake_npu.py").write_text("import threading; threading.Event().wait()", encoding="utf-8")
    assert "did not answer within 0.5 s" in found("fake_npu", "npu", 0.5).error


def test_a_package_is_asked_once_a_process(packages: Path) -> None:
    log = packages / "log"
    (packages / "fake_npu.py").write_text(f"open({str(log)!r}, 'a').write('x')", encoding="utf-8")
    assert found("fake_npu", "npu") is found("fake_npu", "npu")
    assert log.read_text(encoding="utf-8") == "x"


def test_the_address_on_the_pci_bus_is_as_lspci_writes_it():
    from types import SimpleNamespace

    from backends.detect_child import pci_address

    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    assert pci_address(card) == "0000:17:00.0"
    assert pci_address(SimpleNamespace()) == ""
