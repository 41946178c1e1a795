"""Starts the device contract for every device there is, can be simulated, or can be stubbed: a process each.

PyTorch has room for one accelerator a process. Over simulated and stubbed devices it proves what the host does:
detection, memory, copies, errors. No kernel of a vendor's runs there, and no time means anything.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from backends import BACKENDS
from backends.simulated.behaviour import DEVICE_TYPES
from tests.support.device_child import child, over, passed
from tests.support.photographs import PHOTOGRAPHS

SUITE = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/support/device_contract.py")
REAL = [backend.name for backend in BACKENDS if backend.name in ("cpu", "null") or backend.probe().available]


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Decoded here: the other environments have no packages with images."""
    path = tmp_path_factory.mktemp("photographs") / "photographs.npz"
    np.savez(path, **{name: read() for name, read in PHOTOGRAPHS.items()})
    return str(path)


def run(photographs: str, module: str, device_type: str, python: str | Path, variables: dict[str, str]) -> int:
    told = {"DEVICE_UNDER_TEST": module, "DEVICE_TYPE": device_type, "PHOTOGRAPHS": photographs}
    return passed(child(python, {**told, **variables}, *SUITE))


@pytest.mark.parametrize(("name", "least"), [(name, 4 if name == "null" else 9) for name in REAL])
def test_a_device_that_is_here(photographs: str, name: str, least: int) -> None:
    assert run(photographs, "tests.support.devices.plain", name, sys.executable, {}) >= least


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_a_simulated_device(photographs: str, device_type: str) -> None:
    assert run(photographs, "tests.support.devices.simulated", device_type, sys.executable, {}) == 14


@pytest.mark.parametrize("stub", ["cuda", "npu", "npu-blocking"])
def test_a_vendors_own_package_over_a_stub_driver(photographs: str, stub: str) -> None:
    python, variables = over(stub)
    assert run(photographs, "tests.support.stubs.plugin", stub.partition("-")[0], python, variables) == 15
