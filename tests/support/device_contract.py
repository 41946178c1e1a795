"""Contract of every backend on its devices: one suite for real, simulated and stubbed ones.

Not collected with the others: test_device_contract.py starts it, once for each device under test, in a child
process. DEVICE_UNDER_TEST names the module with the device and its knobs, PHOTOGRAPHS a file with images.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# First: it may have to be loaded before anything asks for a device.
DUT: Any = importlib.import_module(os.environ["DEVICE_UNDER_TEST"])

from anychip_tools.verify.contract import CHECKS, NEEDS_COMPUTATION, SmallNetwork, Subject, small_images  # noqa: E402
from anychip_tools.verify.contract import NEEDS_EAGER as EAGERLY  # noqa: E402
from app.precision.gate import on_cpu  # noqa: E402
from backends import (  # noqa: E402
    BACKENDS,
    Backend,
    DeviceLostError,
    OutOfDeviceMemoryError,
    choose,
    report,
)
from models import PixelModel, open_model, parse_spec  # noqa: E402
from tests.support.anchors import both_by_anchor  # noqa: E402

BACKEND: Backend = next(backend for backend in BACKENDS if backend.name == DUT.DEVICE_TYPE)
DEVICES = [device.id for device in BACKEND.devices()]
MB = 2**20
# The stubs' driver answers with a number: an unspecified launch failure; an abnormal AI core.
FAULT = {"cuda": 719, "npu": 507015}.get(DUT.DEVICE_TYPE, 1)
# The drivers' "operation not supported" and "the context is not there": no errors of a lost device.
UNKNOWN = {"cuda": 801, "npu": 107002}.get(DUT.DEVICE_TYPE)
STUB = DUT.__name__ == "tests.support.stubs.plugin"
EXACT = DUT.kernels() is not None
"""True if its kernels are the CPU's: equal bit by bit."""

# torch_npu warns so at every tensor, because of the adapter's setting; 2.12 writes "interal".
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with inter")
computes = pytest.mark.skipif(not BACKEND.facts.computes, reason="it computes nothing")
SUBJECT = Subject(BACKEND, DEVICES[0], exact=EXACT)
"""Device under test: it computes eagerly in float32, or by compiled files if only these run."""
is_eager = pytest.mark.skipif(not SUBJECT.is_eager, reason="only compiled files run on it")
has_knobs = pytest.mark.skipif(DUT.kernels() is None, reason="a device without knobs")


@pytest.fixture(autouse=True)
def _sound_device() -> Iterator[None]:
    yield
    for knob, value in (("fail", 0), ("memory", DUT.MEMORY_BYTES), ("copy_us", 0)):
        DUT.set_knob(knob, value)


def test_the_probe_and_the_devices() -> None:
    assert [f"{BACKEND.name}:{index}" for index in range(len(DEVICES))] == DEVICES
    assert len(DEVICES) == (DUT.COUNT or len(DEVICES))
    assert all(device.memory_bytes == (DUT.MEMORY_BYTES or device.memory_bytes) for device in BACKEND.devices())


def test_it_is_chosen_by_name_and_computes_in_the_report() -> None:
    choice = choose(BACKEND.name)
    assert (choice.backend, list(choice.devices)) == (BACKEND, DEVICES)
    assert choice.simulated == (DUT.__name__ == "tests.support.devices.simulated")
    if BACKEND.facts.computes:
        rows = {row.device: row for row in report()}
        assert all(rows[name].ok for name in DEVICES), rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(CHECKS.keys() - NEEDS_COMPUTATION))
def test_what_anychip_verify_checks(name: str, device: str) -> None:
    CHECKS[name](Subject(BACKEND, device, exact=EXACT))


@computes
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(NEEDS_COMPUTATION - (set() if SUBJECT.is_eager else EAGERLY.keys())))
def test_what_anychip_verify_checks_where_it_computes(name: str, device: str) -> None:
    """Run the checks with slow copies, so that a missing wait shows."""
    before = DUT.kernels()
    DUT.set_knob("copy_us", 30_000)
    CHECKS[name](Subject(BACKEND, device, exact=EXACT))
    assert before is None or DUT.kernels() > before


@computes
@has_knobs
@is_eager
def test_auto_goes_through_the_engines_to_eager_and_says_why() -> None:
    """Check eager: no other engine runs on simulated devices and stubs; their failures must leave the device usable."""
    executable, report = BACKEND.load(SmallNetwork(), DEVICES[0], "auto", "fp32", (1, 2))
    assert report.engine == "eager"
    assert tuple(report.refusals) == BACKEND.facts.engines[:-1]
    assert all(report.refusals.values())
    assert not STUB or report.refusals["graph"].startswith("the network cannot be captured: ")
    assert SUBJECT.same(executable.run(small_images()), on_cpu(SmallNetwork(), small_images()))
    executable.close()


@computes
@pytest.mark.parametrize("architecture", ["resnet50", "yolov8n"])
def test_sample_weights_answer_on_photographs_as_on_the_cpu(tmp_path: Path, architecture: str) -> None:
    model = open_model(parse_spec(f"{architecture}:sample"), tmp_path, allow_download=False)
    with np.load(os.environ["PHOTOGRAPHS"]) as file:
        photographs = [file[name] for name in sorted(file)[:2]]
    assert isinstance(model, PixelModel)
    pixels = torch.zeros((len(photographs), *model.input_shape), dtype=torch.uint8)
    for photograph, row in zip(photographs, pixels, strict=True):
        height, width, _ = photograph.shape
        model.preprocess(torch.from_numpy(photograph), row, width, height)
    before = DUT.kernels()
    executable, _ = BACKEND.load(model.network(), DEVICES[0], *SUBJECT.how, (len(photographs),))
    ours = executable.run(pixels.numpy())
    executable.close()
    assert before is None or DUT.kernels() > before + (100 if SUBJECT.is_eager else 0)
    least, share = (1e-3, 0.999) if SUBJECT.is_eager else (1e-2, 0.99)
    # Not bit by bit: over channels_last tensors the CPU adds in another order.
    right = on_cpu(model.network(), pixels.numpy())
    for mine, theirs in zip(*both_by_anchor(ours, right), strict=True):
        if np.issubdtype(theirs.dtype, np.floating):
            np.testing.assert_allclose(mine, theirs, rtol=least, atol=least * np.abs(theirs).max())
        else:
            assert (mine == theirs).mean() > share


@computes
@has_knobs
@is_eager
def test_out_of_memory_is_said_and_survived() -> None:
    executable, _ = BACKEND.load(SmallNetwork(), DEVICES[0], *SUBJECT.how, (2,))
    DUT.set_knob("memory", 40 * MB)
    with pytest.raises(OutOfDeviceMemoryError, match="too little memory"):
        BACKEND.load(SmallNetwork(60 * MB), DEVICES[0], *SUBJECT.how, (2,))
    DUT.set_knob("memory", 400 * MB)
    assert SUBJECT.same(executable.run(small_images()), on_cpu(SmallNetwork(), small_images()))
    large, _ = BACKEND.load(SmallNetwork(60 * MB), DEVICES[0], *SUBJECT.how, (2,))
    assert SUBJECT.same(large.run(small_images()), on_cpu(SmallNetwork(), small_images()))
    large.close()
    executable.close()


@computes
@has_knobs
def test_a_fault_means_that_the_device_is_lost() -> None:
    executable, _ = BACKEND.load(SmallNetwork(), DEVICES[0], *SUBJECT.how, (2,))
    DUT.set_knob("fail", FAULT)
    with pytest.raises(DeviceLostError):
        executable.run(small_images())
    if STUB:  # npu's empty_cache and cuda's empty_host_cache wait for the device; cuda's mem_get_info asks it.
        for ask, raises in ((BACKEND.release_cache, ("npu", "cuda")), (BACKEND.memory, ("cuda",))):
            if DUT.DEVICE_TYPE in raises:
                with pytest.raises(DeviceLostError):
                    ask(DEVICES[0])
            else:
                ask(DEVICES[0])
    DUT.set_knob("fail", 0)
    # A worker ends if its device is lost. torch_npu 2.10.0 does not wait for a kernel after a fault: seen under load.
    if not STUB:
        assert SUBJECT.same(executable.run(small_images()), on_cpu(SmallNetwork(), small_images()))
    executable.close()


@pytest.mark.skipif(not STUB, reason="only a stub's driver fails in the middle of a batch")
@pytest.mark.skipif(DUT.DEVICE_TYPE == "npu", reason="torch_npu waits without end where a launch failed")
def test_pinned_memory_of_a_lost_batch_is_never_freed() -> None:
    """Check that the memory is kept: freeing records an event, and if that fails, torch_npu ends the process."""
    executable: Any = BACKEND.load(SmallNetwork(), DEVICES[0], *SUBJECT.how, (2,))[0]
    pixels = executable.buffer(2)
    DUT.set_knob("copy_us", 20_000)
    batch = executable.start(pixels)
    DUT.set_knob("fail", FAULT)
    with pytest.raises(DeviceLostError):
        batch.outputs()
    hosts = inspect.getclosurevars(batch.outputs).nonlocals["hosts"]
    assert hosts
    memory = [weakref.ref(tensor) for tensor in (*hosts, *executable._pinned)]
    DUT.set_knob("fail", 0)
    executable.close()
    del executable, batch, pixels, hosts
    gc.collect()
    assert all(reference() is not None for reference in memory)


@pytest.mark.skipif(not STUB, reason="only a stub's driver can say anything")
def test_an_error_that_lasts_means_that_the_device_is_lost_whatever_its_words() -> None:
    executable, _ = BACKEND.load(SmallNetwork(), DEVICES[0], *SUBJECT.how, (2,))
    DUT.set_knob("fail", UNKNOWN)
    with pytest.raises(DeviceLostError, match="nothing else computes there either"):
        executable.run(small_images())
    executable.close()
