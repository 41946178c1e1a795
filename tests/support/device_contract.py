"""What every backend must do on its devices: one suite for real, simulated and stubbed ones.

Not collected with the others: test_device_contract.py starts it, once for each device under test, in a process of
its own. DEVICE_UNDER_TEST names the module that brings the device and its knobs, PHOTOGRAPHS a file with images.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

# First: it may have to be loaded before anything asks for a device.
DUT: Any = importlib.import_module(os.environ["DEVICE_UNDER_TEST"])

from backends import (  # noqa: E402
    BACKENDS,
    Backend,
    BackendError,
    BackendUnavailableError,
    DeviceLostError,
    OutOfDeviceMemoryError,
    choose,
    report,
)
from models import PixelModel, open_model, parse_spec  # noqa: E402

BACKEND: Backend = next(backend for backend in BACKENDS if backend.name == DUT.DEVICE_TYPE)
DEVICES = [device.id for device in BACKEND.devices()]
MB = 2**20
# The stubs' driver answers with a number: an unspecified launch failure; an abnormal AI core.
FAULT = {"cuda": 719, "npu": 507015}.get(DUT.DEVICE_TYPE, 1)
# The drivers' "operation not supported" and "the context is not there": no words that a lost device has.
UNKNOWN = {"cuda": 801, "npu": 107002}.get(DUT.DEVICE_TYPE)
STUB = DUT.__name__ == "tests.support.stubs.plugin"

# torch_npu says so of every tensor, as the adapter has told it to; a test's own filters hide the adapter's.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")
computes = pytest.mark.skipif(not BACKEND.facts.computes, reason="it computes nothing")
has_knobs = pytest.mark.skipif(DUT.kernels() is None, reason="a device without knobs")


@pytest.fixture(autouse=True)
def _sound_device() -> Iterator[None]:
    yield
    for knob, value in (("fail", 0), ("memory", DUT.MEMORY_BYTES), ("copy_us", 0)):
        DUT.set_knob(knob, value)


class Classifier(nn.Module):
    """Convolution, matrix product, reduction, softmax, arg max: each a device kernel. It wants `extra` bytes to run."""

    input_shape = (8, 6, 3)

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features, self.classes, self.extra = nn.Conv2d(3, 8, 3), nn.Linear(8, 5), extra

    def cast(self, dtype: torch.dtype) -> None:
        self.to(dtype)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        space = torch.empty(self.extra, dtype=torch.uint8, device=pixels.device)
        features = self.features(pixels.permute(0, 3, 1, 2).to(torch.float32)).relu().mean((2, 3))
        scores = self.classes(features).softmax(-1)
        del space
        return scores, scores.argmax(-1)


def images(count: int = 2, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (count, *Classifier.input_shape), dtype=np.uint8)


def on_cpu(network: Any, pixels: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    with torch.inference_mode():
        return [output.numpy() for output in network(torch.from_numpy(pixels))]


def same(ours: Any, theirs: Any) -> bool:
    """Bit by bit where the kernels are the CPU's; else to float32's rounding."""
    tolerance = 0 if DUT.kernels() is not None else 1e-5
    return len(ours) == len(theirs) and all(
        np.allclose(mine, other, rtol=tolerance, atol=tolerance) for mine, other in zip(ours, theirs, strict=True)
    )


def test_the_probe_and_the_devices() -> None:
    probe = BACKEND.probe()
    assert (probe.available, probe.reason) == (True, "")
    assert [f"{BACKEND.name}:{index}" for index in range(len(DEVICES))] == DEVICES
    assert len(DEVICES) == (DUT.COUNT or len(DEVICES))
    assert all(device.memory_bytes == (DUT.MEMORY_BYTES or device.memory_bytes) > 0 for device in BACKEND.devices())
    assert all(device.auto_precision in BACKEND.facts.precisions for device in BACKEND.devices())


def test_it_is_chosen_by_name_and_computes_in_the_report() -> None:
    choice = choose(BACKEND.name)
    assert (choice.backend, list(choice.devices)) == (BACKEND, DEVICES)
    assert choice.simulated == (DUT.__name__ == "tests.support.devices.simulated")
    if BACKEND.facts.automatic:
        rows = {row.device: row for row in report()}
        assert all(rows[name].ok for name in DEVICES), rows


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    for ask in (
        lambda: choose(f"{BACKEND.name}:99"),
        lambda: BACKEND.load(Classifier(), f"{BACKEND.name}:99", "auto", "fp32", (1,)),
    ):
        with pytest.raises(BackendUnavailableError, match=f"There is no device '{BACKEND.name}:99'"):
            ask()


@computes
@pytest.mark.parametrize("device", DEVICES)
def test_a_small_network_answers_as_on_the_cpu(device: str) -> None:
    before = DUT.kernels()
    executable, _ = BACKEND.load(Classifier(), device, "eager", "fp32", (1, 2))
    assert same(executable.run(images()), on_cpu(Classifier(), images()))
    assert before is None or DUT.kernels() > before
    executable.close()


@computes
@has_knobs
def test_auto_goes_through_the_engines_to_eager_and_says_why() -> None:
    """Neither simulated devices nor stubs have any other; those that fail must leave a device on which eager runs."""
    executable, report = BACKEND.load(Classifier(), DEVICES[0], "auto", "fp32", (1, 2))
    assert report.engine == "eager"
    assert tuple(report.refusals) == BACKEND.facts.engines[:-1]
    assert all(report.refusals.values())
    assert same(executable.run(images()), on_cpu(Classifier(), images()))
    executable.close()


@computes
@pytest.mark.parametrize("architecture", ["resnet50", "yolov8n"])
def test_sample_weights_answer_on_photographs_as_on_the_cpu(tmp_path: Path, architecture: str) -> None:
    model = open_model(parse_spec(f"{architecture}:sample"), tmp_path, allow_download=False)
    with np.load(os.environ["PHOTOGRAPHS"]) as file:
        photographs = [file[name] for name in sorted(file)]
    assert isinstance(model, PixelModel)
    pixels = torch.zeros((len(photographs), *model.input_shape), dtype=torch.uint8)
    for photograph, row in zip(photographs, pixels, strict=True):
        height, width, _ = photograph.shape
        model.preprocess(torch.from_numpy(photograph), row, width, height)
    before = DUT.kernels()
    executable, _ = BACKEND.load(model.network(), DEVICES[0], "eager", "fp32", (len(photographs),))
    ours = executable.run(pixels.numpy())
    executable.close()
    assert before is None or DUT.kernels() > before + 100
    # Not bit by bit: over channels_last tensors the CPU adds in another order.
    for mine, theirs in zip(ours, on_cpu(model.network(), pixels.numpy()), strict=True):
        if np.issubdtype(theirs.dtype, np.floating):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())
        else:
            assert (mine == theirs).mean() > 0.999


@computes
def test_two_batches_under_way_get_their_own_answers() -> None:
    """The next is copied while the one before computes: a missing wait shows as an answer to other images."""
    executable, _ = BACKEND.load(Classifier(), DEVICES[0], "eager", "fp32", (1, 2, 4))
    buffers = [executable.buffer(4) for _ in range(executable.depth)]
    DUT.set_knob("copy_us", 30_000)
    under_way: list[Any] = []
    answers, expected = [], []
    for number in range(10):
        size = (4, 2, 1)[number % 3]
        pixels = buffers[number % len(buffers)]
        pixels[:size] = images(size, number)
        expected.append(on_cpu(Classifier(), images(size, number)))
        under_way.append(executable.start(pixels[:size]))
        if len(under_way) == executable.depth:
            answers.append([output.copy() for output in under_way.pop(0).outputs()])
    answers += [[output.copy() for output in started.outputs()] for started in under_way]
    assert all(same(ours, theirs) for ours, theirs in zip(answers, expected, strict=True))
    assert not any(np.array_equal(one[0][0], other[0][0]) for one, other in pairwise(answers))
    executable.close()


@computes
@has_knobs
def test_out_of_memory_is_said_and_survived() -> None:
    executable, _ = BACKEND.load(Classifier(), DEVICES[0], "eager", "fp32", (2,))
    DUT.set_knob("memory", 40 * MB)
    with pytest.raises(OutOfDeviceMemoryError, match="too little memory"):
        BACKEND.load(Classifier(60 * MB), DEVICES[0], "eager", "fp32", (2,))
    DUT.set_knob("memory", 400 * MB)
    assert same(executable.run(images()), on_cpu(Classifier(), images()))
    large, _ = BACKEND.load(Classifier(60 * MB), DEVICES[0], "eager", "fp32", (2,))
    assert same(large.run(images()), on_cpu(Classifier(), images()))
    large.close()
    executable.close()


@computes
def test_memory_adds_up_and_what_is_released_is_counted_in_bytes() -> None:
    BACKEND.release_cache(DEVICES[0])
    executable, _ = BACKEND.load(Classifier(60 * MB), DEVICES[0], "eager", "fp32", (2,))
    before = BACKEND.memory(DEVICES[0])
    assert 0 <= before.allocated <= before.reserved <= before.total
    assert before.used <= before.total
    released = BACKEND.release_cache(DEVICES[0])
    after = BACKEND.memory(DEVICES[0])
    if BACKEND.facts.device_type != "cpu":
        assert before.reserved - before.allocated >= 60 * MB
        assert released >= 60 * MB
        assert before.reserved - after.reserved == released
        assert after.allocated == before.allocated
    if DUT.kernels() is not None:  # On a real device others take and give, too.
        assert before.used - after.used == released
    executable.close()


def test_telemetry_is_numbers_or_silence() -> None:
    said = BACKEND.telemetry(DEVICES[0])
    assert all(isinstance(value, float) for value in vars(said).values())
    assert isnan(said.utilization_ratio) or 0 <= said.utilization_ratio <= 1
    assert isnan(said.temperature_celsius) or -40 < said.temperature_celsius < 150
    assert isnan(said.power_watts) or said.power_watts >= 0


@computes
@has_knobs
def test_a_fault_means_that_the_device_is_lost() -> None:
    executable, _ = BACKEND.load(Classifier(), DEVICES[0], "eager", "fp32", (2,))
    DUT.set_knob("fail", FAULT)
    with pytest.raises(DeviceLostError):
        executable.run(images())
    if STUB:  # Only npu's empty_cache waits for the device, and only cuda's mem_get_info asks it.
        for ask, raises in ((BACKEND.release_cache, "npu"), (BACKEND.memory, "cuda")):
            if raises == DUT.DEVICE_TYPE:
                with pytest.raises(DeviceLostError):
                    ask(DEVICES[0])
            else:
                ask(DEVICES[0])
    DUT.set_knob("fail", 0)
    assert same(executable.run(images()), on_cpu(Classifier(), images()))
    executable.close()


@pytest.mark.skipif(not STUB, reason="only a stub's driver can say anything")
def test_an_error_that_lasts_means_that_the_device_is_lost_whatever_its_words() -> None:
    executable, _ = BACKEND.load(Classifier(), DEVICES[0], "eager", "fp32", (2,))
    DUT.set_knob("fail", UNKNOWN)
    with pytest.raises(DeviceLostError, match="nothing else computes there either"):
        executable.run(images())
    executable.close()


@computes
def test_an_error_of_one_batch_is_the_backends() -> None:
    network = Classifier()
    executable, _ = BACKEND.load(network, DEVICES[0], "eager", "fp32", (2,))
    network.classes = nn.Linear(7, 5).to(DEVICES[0].replace("rocm", "cuda").replace("dcu", "cuda"))
    with pytest.raises(BackendError) as caught:
        executable.run(images())
    assert type(caught.value) is BackendError
    executable.close()
