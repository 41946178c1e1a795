"""The contract of backends, over every backend that answers here, each of its engines and each of its precisions."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from app.precision.gate import on_cpu
from backends import (
    BACKENDS,
    Backend,
    BackendError,
    BackendUnavailableError,
    DeviceLostError,
    EngineRefusedError,
    Executable,
    OutOfDeviceMemoryError,
)
from backends.vendors.cpu import CpuBackend
from models.classifiers import ClassificationNetwork
from models.contract.networks import PixelNetwork
from models.yolo.model import YOLO
from tests.support.anchors import by_anchor
from tests.support.networks import Brightness, images

LADDER = (1, 2, 3, 8)
DEVICE = "cpu:0"


class Case(NamedTuple):
    backend: Backend
    device: str
    engine: str
    precision: str


PACKAGES = {
    "tensorrt": ("torch_tensorrt",),
    "migraphx": ("torch_migraphx",),
    "openvino": ("openvino",),
    "onnxruntime": ("onnxruntime", "onnx", "onnxscript"),
}
COMPUTING = [backend for backend in BACKENDS if backend.facts.computes and backend.probe().available]
CASES = [
    Case(backend, backend.devices()[0].id, engine, precision)
    for backend in COMPUTING
    for engine in (*backend.facts.engines, *backend.facts.by_name)
    for precision in backend.facts.precisions
    if precision != "int8"  # It needs calibration, and rounds more than these tests allow: tests/unit/test_gate.py.
]


def _parameter(case: Case) -> Any:
    """In a process of pytest-xdist with the others of its engine."""
    name = "-".join((case.backend.name, case.engine, case.precision))
    return pytest.param(case, id=name, marks=[pytest.mark.xdist_group(f"engine {case.engine}")])


@pytest.fixture(params=[_parameter(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    engine = chosen.engine
    if engine != "eager" and "STUB_DEVICE" in os.environ:
        pytest.skip("a stub driver has eager only: tests/support/device_contract.py sees the others refuse")
    for package in PACKAGES.get(engine, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if chosen[2:] == ("onnxruntime", "bf16"):
        pytest.skip("ONNX Runtime's CPU kernels have no bf16")
    if chosen[2:] == ("openvino", "bf16"):
        import openvino

        if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):  # as the engine asks it
            pytest.skip("OpenVINO has no bf16 kernels for this processor")
    return chosen


@pytest.fixture(autouse=True)
def _keep_thread_count() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


class Unconvertible(Brightness):
    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return (torch.linalg.svdvals(pixels[..., 0].to(torch.float32)),)


def classifier() -> ClassificationNetwork:
    """Untrained, with BatchNorm measured on images, so that different images get different classes."""
    torch.manual_seed(3)
    core = resnet18(num_classes=50).requires_grad_(False)
    for module in core.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    network = ClassificationNetwork(core, (96, 96, 3), mean, std)
    network.train()(torch.from_numpy(images(16, network.input_shape)))
    return network.eval()


def detector() -> PixelNetwork:
    return YOLO.of("detector", "yolov8n", tuple("abcdefghij"), "random", None, size=(128, 96)).network()


def load(case: Case, network: Any, batch_sizes: tuple[int, ...] = LADDER) -> Executable:
    return case.backend.load(network, case.device, case.engine, case.precision, batch_sizes).executable


def test_classification_agrees_with_float32_for_every_batch_size(case: Case) -> None:
    pixels = images(LADDER[-1], (96, 96, 3))
    (expected,) = on_cpu(classifier(), pixels)
    executable = load(case, classifier())
    for size in LADDER:
        (logits,) = executable.run(pixels[:size])
        assert logits.shape == (size, 50)
        assert logits.dtype == np.float32
        if case.precision == "fp32":
            np.testing.assert_allclose(logits, expected[:size], rtol=1e-3, atol=1e-4 * np.abs(expected).max())
        for ours, theirs in zip(logits, expected, strict=False):
            assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.999
            best, second = np.sort(theirs)[[-1, -2]]
            if best - second > 0.02 * np.abs(theirs).max():
                assert ours.argmax() == theirs.argmax()
    other, before = load(case, Brightness(), (2,)), executable.run(pixels[:3])[0].copy()
    other.run(np.zeros((2, 8, 6, 3), np.uint8))
    np.testing.assert_allclose(executable.run(pixels[:3])[0], before, rtol=1e-5)
    other.close()
    executable.close()


@pytest.mark.parametrize("case", [_parameter(case) for case in CASES], indirect=True)
def test_detection_agrees_with_float32_for_every_batch_size(case: Case) -> None:
    pixels = images(LADDER[-1], (128, 96, 3))
    distances, scores, classes, _ = (each.numpy() for each in by_anchor(on_cpu(detector(), pixels)))
    executable = load(case, detector())
    tolerance = 1e-3 if case.precision == "fp32" else 0.02
    for size in LADDER:
        outputs = executable.run(pixels[:size])
        assert [output.shape for output in outputs] == [(size, 252, 4), (size, 252), (size, 252), (size, 252)]
        assert [output.dtype for output in outputs] == [np.float32, np.float32, np.int32, np.int32]
        ours = [each.numpy() for each in by_anchor(outputs)]
        confident = scores[:size] >= np.quantile(scores[:size], 0.8)
        np.testing.assert_allclose(ours[0][confident], distances[:size][confident], rtol=tolerance)
        np.testing.assert_allclose(ours[1][confident], scores[:size][confident], rtol=10 * tolerance)
        assert (ours[2] == classes[:size])[confident].mean() > 0.9
    executable.close()


def test_what_every_executable_keeps_to(case: Case) -> None:
    """Each image has its own answer, which outlives the pixels; others are refused; what is closed is freed."""
    sizes = (8, 1, 3, 2, 2)
    network = Brightness()
    weights = weakref.ref(network.scale)
    executable, report = case.backend.load(network, case.device, case.engine, case.precision, sizes)
    assert (report.engine, report.precision, executable.batch_sizes) == (case.engine, case.precision, LADDER)
    assert (report.refusals, report.rejected) == ({}, ())

    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 6, 3), dtype=np.uint8)
    for size in LADDER:
        means, brightest = executable.run(pixels[:size])
        np.testing.assert_allclose(means, pixels[:size].mean(axis=(1, 2, 3)), rtol=1e-2)
        np.testing.assert_allclose(brightest, pixels[:size].max(axis=(1, 2, 3)), atol=1)
    pixels = np.full((3, 8, 6, 3), 100, dtype=np.uint8)
    means, brightest = executable.run(pixels)
    pixels[:] = 7
    assert (means.tolist(), brightest.tolist()) == ([100.0] * 3, [100] * 3)
    pixels.flags.writeable = False
    assert executable.run(pixels)[0].tolist() == [7.0] * 3

    refused: list[tuple[Any, str]] = [
        (np.zeros((4, 8, 6, 3), np.uint8), r"batch of 4 .* \(1, 2, 3, 8\)"),
        (np.zeros((0, 8, 6, 3), np.uint8), "batch of 0"),
        (np.zeros((1, 6, 8, 3), np.uint8), "not \\(1, 6, 8, 3\\)"),
        (np.zeros((8, 6, 3), np.uint8), "not \\(8, 6, 3\\)"),
        (np.zeros((1, 8, 6, 3), np.float32), "float32"),
        (np.zeros((1, 8, 6, 6), np.uint8)[..., ::2], "C-contiguous"),
    ]
    for wrong, message in refused:
        with pytest.raises(ValueError, match=message):
            executable.run(wrong)

    executable.close()
    executable.close()
    del network
    gc.collect()
    assert weights() is None
    with pytest.raises(BackendError, match="closed"):
        executable.run(np.zeros((1, 8, 6, 3), np.uint8))


@pytest.mark.parametrize("backend", COMPUTING, ids=lambda backend: backend.name)
def test_auto_takes_the_first_engine_and_the_precision_of_the_device(backend: Backend) -> None:
    device = backend.devices()[0]
    executable, report = backend.load(Brightness(), device.id, "auto", "auto", (1,))
    tried = [*report.refusals, report.engine]
    assert tried == list(backend.facts.engines[: len(tried)])
    assert report.precision == device.auto_precision
    executable.close()


@pytest.mark.parametrize("backend", COMPUTING, ids=lambda backend: backend.name)
def test_what_it_has_not_is_refused_by_name(backend: Backend) -> None:
    device = backend.devices()[0].id
    for precision in {"fp16", "int8", "fp99"} - set(backend.facts.precisions):
        with pytest.raises(EngineRefusedError, match=f"not {precision}") as caught:
            backend.load(Brightness(), device, "auto", precision, (1,))
        assert all(f"{name}: it offers" in str(caught.value) for name in backend.facts.engines)
    with pytest.raises(EngineRefusedError, match=r"no engine 'warp'; it has .*eager"):
        backend.load(Brightness(), device, "warp", "fp32", (1,))
    with pytest.raises(BackendUnavailableError, match="no device 'cpu:9'"):
        backend.load(Brightness(), "cpu:9", "eager", "fp32", (1,))
    for batch_sizes in ((), (0, 1), (-2,)):
        with pytest.raises(ValueError, match="positive"):
            backend.load(Brightness(), device, "eager", "fp32", batch_sizes)


def test_a_network_that_openvino_cannot_convert_goes_to_eager() -> None:
    pytest.importorskip("openvino")
    _, report = CpuBackend().load(Unconvertible(), DEVICE, "auto", "fp32", (1,))
    assert report.engine == "eager"
    assert "cannot convert" in report.refusals["openvino"]
    assert report.refusals["onnxruntime"]


def test_openvino_reports_nothing_to_anybody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its converter, where it is asked for, leaves a client number in the home directory and sends events with it."""
    pytest.importorskip("openvino")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    CpuBackend().load(Brightness(), DEVICE, "openvino", "fp32", (1,)).executable.close()
    assert list(tmp_path.iterdir()) == []


FAULTS = [
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory"), OutOfDeviceMemoryError),
    (RuntimeError("std::bad_alloc"), OutOfDeviceMemoryError),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), OutOfDeviceMemoryError),
    (MemoryError(), OutOfDeviceMemoryError),
    (RuntimeError("\n could not create a primitive \n more"), BackendError),
    (DeviceLostError("gone"), DeviceLostError),
]


@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_what_a_runtime_raises_is_translated(fault: Exception, expected: type[Exception]) -> None:
    executable, _ = CpuBackend().load(Brightness(fault, sound_calls=1), DEVICE, "eager", "fp32", (1,))
    with pytest.raises(expected) as caught:
        executable.run(np.zeros((1, 8, 6, 3), np.uint8))
    assert type(caught.value) is expected
    assert "\n" not in str(caught.value)
    assert caught.value is fault or caught.value.__cause__ is fault


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc can give memory back")
def test_releasing_the_cache_returns_what_was_freed() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    backend, size = CpuBackend(), 64 << 10  # below glibc's threshold for memory of its own
    backend.release_cache(DEVICE)
    blocks = [libc.malloc(size) for _ in range(800)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:  # The last one keeps the heap from shrinking by itself.
        libc.free(block)
    assert backend.release_cache(DEVICE) > 25 << 20
    libc.free(blocks[-1])
