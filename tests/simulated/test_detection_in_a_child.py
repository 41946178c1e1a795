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
    """Put a torch that takes no time to import in front of the child's path."""
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


SICK_CARDS = """
class npu(npu):
    @staticmethod
    def device_count(): return 5
    @staticmethod
    def get_device_properties(index):
        import os, sys, threading
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        index = int(visible.split(",")[index]) if visible else index
        if index in {hangs}:
            threading.Event().wait()
        if index in {aborts}:
            print("terminate called", file=sys.stderr, flush=True)
            os.abort()
        if index in {raises}:
            raise RuntimeError("drvErr=87")
        return Properties
"""


@pytest.mark.parametrize("hanging", [(2,), (0, 3), (1, 2, 3, 4)], ids=["one", "first-and-another", "all-but-one"])
def test_a_card_that_hangs_does_not_disable_the_others(
    packages: Path, monkeypatch: pytest.MonkeyPatch, hanging: tuple[int, ...]
) -> None:
    monkeypatch.setattr("backends.detect.CARD_LIMIT_S", 0.5)
    source = FAKE_TORCH + SICK_CARDS.format(hangs=hanging, aborts=(), raises=())
    (packages / "torch.py").write_text(source, encoding="utf-8")
    said = found("", "npu", 1.5)
    assert (said.error, len(said.devices)) == ("", 5)
    assert {index for index, one in enumerate(said.devices) if one.get("error")} == set(hanging)
    assert all("did not answer within" in said.devices[index]["error"] for index in hanging)


@pytest.mark.parametrize("visible", [None, "4,3,2,1,0"])
def test_cards_that_end_the_process_or_raise_do_not_disable_the_others(
    packages: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    """Card 0 as well, which a runtime may open first: test_simulation.py."""
    if visible is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    source = FAKE_TORCH + SICK_CARDS.format(hangs=(), aborts=(1, 4), raises=(3,))
    (packages / "torch.py").write_text(source, encoding="utf-8")
    said = found("", "npu")
    errors = [str(one.get("error", "")) for one in (said.devices if visible is None else reversed(said.devices))]
    assert errors[0] == errors[2] == ""
    assert "terminate called" in errors[1]
    assert errors[3] == "drvErr=87"
    assert "terminate called" in errors[4]
