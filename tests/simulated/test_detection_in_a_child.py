"""What a child reports of a vendor's package: devices, failures, one that ends the process or hangs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from backends.detect import found

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
