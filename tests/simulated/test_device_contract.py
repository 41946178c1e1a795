"""Starts the device contract for every device there is, can be simulated, or can be stubbed: a process each.

PyTorch has room for one accelerator a process. Over simulated and stubbed devices it proves what the host does:
detection, memory, copies, errors. No kernel of a vendor's runs there, and no time means anything.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from anychip_tools.simulated.behaviour import device_types
from backends import BACKENDS
from tests.support import cann_double
from tests.support.device_child import child, over, passed
from tests.support.photographs import PHOTOGRAPHS

# A forked process has imported plug-ins of pytest before pytest did.
FORKED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
SUITE = ("-m", "pytest", "-q", "-rp", *FORKED, "-p", "no:cacheprovider", "tests/support/device_contract.py")
FIRST, *OTHERS = device_types()
REAL = [backend.name for backend in BACKENDS if backend.name in ("cpu", "null") or backend.probe().available]

# What must have run, not skipped: on every device, where it computes, where it has knobs, where there is a driver.
EVERYWHERE = {"test_the_probe_and_the_devices", "test_a_device_that_is_not_there_is_refused_by_name"}
COMPUTES = EVERYWHERE | {
    "test_sample_weights_answer_on_photographs_as_on_the_cpu",
    "test_what_anychip_verify_checks_where_it_computes",
}
KNOBS = COMPUTES | {"test_out_of_memory_is_said_and_survived", "test_a_fault_means_that_the_device_is_lost"}
NAMES = KNOBS - {"test_sample_weights_answer_on_photographs_as_on_the_cpu"}
DRIVER = KNOBS | {"test_an_error_that_lasts_means_that_the_device_is_lost_whatever_its_words"}


@pytest.fixture
def photographs(tmp_path: Path) -> str:
    """Decode the photographs here, since the other environments have no packages for images."""
    path = tmp_path / "photographs.npz"
    np.savez(path, allow_pickle=False, **{name: read() for name, read in PHOTOGRAPHS.items()})
    return str(path)


def run(
    photographs: str, module: str, device_type: str, python: str | Path, variables: dict[str, str], *options: str
) -> set[str]:
    told = {"DEVICE_UNDER_TEST": module, "DEVICE_TYPE": device_type, "PHOTOGRAPHS": photographs}
    return passed(child(python, {**told, **variables}, *SUITE, *options))


@pytest.mark.parametrize("name", REAL)
def test_a_device_that_is_here(photographs: str, name: str) -> None:
    ran = run(photographs, "tests.support.devices.plain", name, sys.executable, {})
    assert ran >= (EVERYWHERE if name == "null" else COMPUTES)


def test_the_first_simulated_device(photographs: str) -> None:
    assert run(photographs, "tests.support.devices.simulated", FIRST, sys.executable, {}) >= KNOBS


@pytest.mark.parametrize("device_type", OTHERS)
def test_every_other_simulated_device_has_its_names(photographs: str, device_type: str) -> None:
    """They differ in names, not in how they compute."""
    chosen = ("-k", "probe or refused_by_name")
    assert run(photographs, "tests.support.devices.simulated", device_type, sys.executable, {}, *chosen) >= EVERYWHERE


@pytest.mark.nightly
@pytest.mark.parametrize("device_type", OTHERS)
def test_every_other_simulated_device(photographs: str, device_type: str) -> None:
    """All but the large networks, which compute as on the first."""
    chosen = ("-k", "not sample_weights")
    assert run(photographs, "tests.support.devices.simulated", device_type, sys.executable, {}, *chosen) >= NAMES


def test_ascend_without_torch_npu(photographs: str) -> None:
    """CANN's own models over doubles of pyACL and atc."""
    ran = run(photographs, "tests.support.devices.cann", "npu", sys.executable, cann_double.variables())
    assert ran >= KNOBS - {"test_out_of_memory_is_said_and_survived"}


@pytest.mark.parametrize("stub", ["cuda", "npu"])
def test_a_vendors_own_package_over_a_stub_driver(photographs: str, stub: str) -> None:
    python, variables = over(stub)
    assert run(photographs, "tests.support.stubs.plugin", stub, python, variables, "-k", "not resnet50") >= DRIVER


def test_torch_npu_that_waits_for_every_kernel(photographs: str) -> None:
    """Its errors come from other calls; its answers were compared without waiting."""
    python, variables = over("npu-blocking")
    chosen = ("-k", "memory or fault or error")
    assert run(photographs, "tests.support.stubs.plugin", "npu", python, variables, *chosen) >= DRIVER - COMPUTES
