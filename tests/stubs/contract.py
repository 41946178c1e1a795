"""What our adapters must do over a stub driver: tests for a child that tests/test_stub_drivers.py starts.

Not collected with the others: it needs the variables of tests/stub_drivers.py and `-p tests.stubs.plugin`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backends import (
    Backend,
    DeviceLostError,
    OutOfDeviceMemoryError,
    choose,
    report,
)
from backends.ascend import AscendBackend
from backends.cuda import CudaBackend
from models.catalog import open_model, parse_spec
from tests.stubs import plugin

BACKEND: Backend = {"cuda": CudaBackend, "npu": AscendBackend}[plugin.DEVICE_TYPE]()
DEVICES = tuple(f"{plugin.DEVICE_TYPE}:{index}" for index in range(2))
MB = 2**20
MEMORY = 16 * 2**30  # The stub's own value.
# An unspecified launch failure; an abnormal AI core.
FAULT = {"cuda": 719, "npu": 507015}[plugin.DEVICE_TYPE]


@pytest.fixture(autouse=True)
def _sound_device() -> Iterator[None]:
    yield
    plugin.set_knob("fail", 0)
    plugin.set_knob("memory", MEMORY)


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


def pictures(shape: tuple[int, int, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)


def on_cpu(network: Any, pixels: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    with torch.inference_mode():
        return [output.numpy() for output in network(torch.from_numpy(pixels))]


def same(ours: Any, theirs: Any) -> bool:
    return len(ours) == len(theirs) and all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_probe_and_the_devices() -> None:
    probe = BACKEND.probe()
    assert (probe.available, probe.reason) == (True, "")
    assert [(one.id, one.memory_bytes) for one in BACKEND.devices()] == [(name, MEMORY) for name in DEVICES]


def test_it_is_chosen_and_computes_in_the_report() -> None:
    assert choose("auto").backend.name == BACKEND.name
    assert choose("auto").devices == DEVICES
    rows = {row.device: row for row in report()}
    assert all(rows[name].ok for name in DEVICES), rows


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_network_answers_as_on_the_cpu(device: str) -> None:
    pixels = pictures(Classifier.input_shape)
    before = plugin.kernels()
    executable = BACKEND.load(Classifier(), device, "eager", "fp32", (1, 2))
    assert same(executable.run(pixels), on_cpu(Classifier(), pixels))
    assert plugin.kernels() > before
    executable.close()


@pytest.mark.parametrize("architecture", ["resnet50", "yolov8n"])
def test_the_sample_weights_answer_as_on_the_cpu(tmp_path: Any, architecture: str) -> None:
    model = open_model(parse_spec(f"{architecture}:sample"), tmp_path, allow_download=False)
    pixels = pictures(model.network().input_shape)
    before = plugin.kernels()
    executable = BACKEND.load(model.network(), DEVICES[0], "eager", "fp32", (2,))
    ours = executable.run(pixels)
    executable.close()
    assert plugin.kernels() > before + 100
    # Not bit by bit: over channels_last tensors the CPU adds in another order.
    for mine, theirs in zip(ours, on_cpu(model.network(), pixels), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())


def test_out_of_memory_is_said_and_survived() -> None:
    BACKEND.release_cache(DEVICES[0])  # Collects too: what earlier tests left would count against the limit.
    pixels = pictures(Classifier.input_shape)
    executable = BACKEND.load(Classifier(), DEVICES[0], "eager", "fp32", (2,))
    plugin.set_knob("memory", 40 * MB)
    with pytest.raises(OutOfDeviceMemoryError, match="too little memory"):
        BACKEND.load(Classifier(60 * MB), DEVICES[0], "eager", "fp32", (2,))
    assert same(executable.run(pixels), on_cpu(Classifier(), pixels))
    plugin.set_knob("memory", 400 * MB)
    large = BACKEND.load(Classifier(60 * MB), DEVICES[0], "eager", "fp32", (2,))
    assert same(large.run(pixels), on_cpu(Classifier(), pixels))
    large.close()
    executable.close()


def test_released_caches_are_counted_in_bytes() -> None:
    BACKEND.release_cache(DEVICES[0])
    executable = BACKEND.load(Classifier(60 * MB), DEVICES[0], "eager", "fp32", (2,))
    before = BACKEND.memory(DEVICES[0])
    assert before.reserved - before.allocated >= 60 * MB
    released = BACKEND.release_cache(DEVICES[0])
    after = BACKEND.memory(DEVICES[0])
    assert released >= 60 * MB
    assert (before.reserved - after.reserved, before.used - after.used) == (released, released)
    assert after.allocated == before.allocated
    executable.close()


def test_a_fault_means_that_the_device_is_lost() -> None:
    pixels = pictures(Classifier.input_shape)
    executable = BACKEND.load(Classifier(), DEVICES[0], "eager", "fp32", (2,))
    # So that no copy is under way: tests/stubs/fault.py has what comes of that.
    BACKEND.release_cache(DEVICES[0])
    plugin.set_knob("fail", FAULT)
    with pytest.raises(DeviceLostError):
        executable.run(pixels)
    # Only npu's empty_cache waits for the device, and only cuda's mem_get_info asks it.
    for ask, raises in ((BACKEND.release_cache, "npu"), (BACKEND.memory, "cuda")):
        if raises == plugin.DEVICE_TYPE:
            with pytest.raises(DeviceLostError):
                ask(DEVICES[0])
        else:
            ask(DEVICES[0])
    plugin.set_knob("fail", 0)
    assert same(executable.run(pixels), on_cpu(Classifier(), pixels))
    executable.close()
