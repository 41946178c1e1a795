"""The contract of backends, over every backend that answers here, each of its engines and each of its precisions.

Not over the null device, which computes nothing: tests/simulated/test_null.py.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import shutil
import sys
import weakref
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from anychip_base.extras import how_to_install
from backends import (
    BACKENDS,
    Backend,
    BackendError,
    BackendUnavailableError,
    CompileOptions,
    DeviceLostError,
    EngineRefusedError,
    Executable,
    OutOfDeviceMemoryError,
)
from backends.contract.backend import DEFAULTS
from backends.contract.errors import translated_errors
from backends.vendors.cpu import CpuBackend
from models.classifiers import ClassificationNetwork
from models.contract.networks import PixelNetwork
from models.yolo.model import YOLO
from tests.support.networks import Brightness, images
from tests.support.work import of_one_thread

LADDER = (1, 2, 3, 8)
DEVICE = "cpu:0"
_MEMBERS = ("name", "facts", "probe", "devices", "load", "memory", "release_cache", "telemetry")
_WITH_A_DEFAULT = ("beside", "image_decoder", "take")


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
COMPILED: dict[str, CompileOptions] = {}
COMPUTING = [backend for backend in BACKENDS if backend.facts.computes and backend.probe().available]
CASES = [
    Case(backend, backend.devices()[0].id, engine, precision)
    for backend in COMPUTING
    for engine in (*backend.facts.engines, *backend.facts.by_name)
    for precision in backend.facts.precisions
    if precision != "int8"  # It needs calibration, and rounds more than these tests allow: tests/unit/test_gate.py.
]


def _parameter(case: Case, left_out: str) -> Any:
    """In a process of pytest-xdist with the others of its engine: what has been compiled is kept there.

    A compiler that takes half a minute for each network and precision has one of both; `make nightly` has all.
    """
    name = "-".join((case.backend.name, case.engine, case.precision))
    marks = [pytest.mark.xdist_group(f"engine {case.engine}")]
    if (case.engine, case.precision) == ("inductor", left_out):
        marks.append(pytest.mark.nightly)
    return pytest.param(case, id=name, marks=marks)


@pytest.fixture(params=[_parameter(case, "bf16") for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    engine = chosen.engine
    if engine != "eager" and "STUB_DEVICE" in os.environ:
        pytest.skip("a stub driver has eager only: tests/simulated/test_stub_drivers.py sees the others refuse")
    _skip_without_packages(engine)
    if chosen[2:] == ("onnxruntime", "bf16"):
        pytest.skip("ONNX Runtime's CPU kernels have no bf16")
    if chosen[2:] == ("openvino", "bf16") and not openvino_has_bf16():
        pytest.skip("OpenVINO has no bf16 kernels for this processor")
    return chosen


def openvino_has_bf16() -> bool:
    """By its own account, which the engine goes by as well."""
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _skip_without_packages(engine: str) -> None:
    for package in PACKAGES.get(engine, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if engine == "inductor" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("there is no C++ compiler")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CompileOptions:
    """Share Inductor's cache among tests: a compilation takes seconds a batch size."""
    return CompileOptions(cache_dir=tmp_path_factory.mktemp("compiled"))


@pytest.fixture(autouse=True)
def _keep_compiled(compiled: CompileOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPILED, "inductor", compiled)


@pytest.fixture(autouse=True)
def _keep_thread_count() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture
def no_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)


class Unconvertible(Brightness):
    """Uses an operator that compilers do not know."""

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


def reference(network: nn.Module, pixels: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    with torch.inference_mode():
        return [output.numpy() for output in network(torch.from_numpy(pixels))]


def load(case: Case, network: Any, batch_sizes: tuple[int, ...] = LADDER) -> Executable:
    options = COMPILED.get(case.engine, DEFAULTS)
    return case.backend.load(network, case.device, case.engine, case.precision, batch_sizes, options=options).executable


def ladder(case: Case) -> tuple[int, ...]:
    """One size where every size of a large network takes a quarter of a minute."""
    return (3,) if case.engine == "inductor" else LADDER


def test_classification_agrees_with_float32_for_every_batch_size(case: Case) -> None:
    pixels = images(LADDER[-1], (96, 96, 3))
    (expected,) = reference(classifier(), pixels)
    executable = load(case, classifier(), ladder(case))
    for size in ladder(case):
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
    executable.close()


def by_anchor(outputs: Any) -> list[np.ndarray[Any, Any]]:
    """Sort a detector's outputs by the number of the anchor, not by the score."""
    *found, anchors = (np.array(each) for each in outputs)
    rows = np.arange(len(anchors))[:, None]
    return [each[rows, anchors.argsort(axis=1)] for each in found]


@pytest.mark.parametrize("case", [_parameter(case, "fp32") for case in CASES], indirect=True)
def test_detection_agrees_with_float32_for_every_batch_size(case: Case) -> None:
    pixels = images(LADDER[-1], (128, 96, 3))
    distances, scores, classes = by_anchor(reference(detector(), pixels))
    executable = load(case, detector(), ladder(case))
    tolerance = 1e-3 if case.precision == "fp32" else 0.02
    for size in ladder(case):
        outputs = executable.run(pixels[:size])
        assert [output.shape for output in outputs] == [(size, 252, 4), (size, 252), (size, 252), (size, 252)]
        assert [output.dtype for output in outputs] == [np.float32, np.float32, np.int32, np.int32]
        ours = by_anchor(outputs)
        confident = scores[:size] >= np.quantile(scores[:size], 0.8)
        np.testing.assert_allclose(ours[0][confident], distances[:size][confident], rtol=tolerance)
        np.testing.assert_allclose(ours[1][confident], scores[:size][confident], rtol=10 * tolerance)
        assert (ours[2] == classes[:size])[confident].mean() > 0.9
    executable.close()


def test_every_image_gets_its_own_answer(case: Case) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 6, 3), dtype=np.uint8)
    executable = load(case, Brightness())
    for size in LADDER:
        means, brightest = executable.run(pixels[:size])
        np.testing.assert_allclose(means, pixels[:size].mean(axis=(1, 2, 3)), rtol=1e-2)
        np.testing.assert_allclose(brightest, pixels[:size].max(axis=(1, 2, 3)), atol=1)
    executable.close()


def test_executable_says_what_it_became(case: Case) -> None:
    options = COMPILED.get(case.engine, DEFAULTS)
    executable, report = case.backend.load(
        Brightness(), case.device, case.engine, case.precision, (8, 1, 2, 2), options=options
    )
    assert (report.engine, report.precision) == (case.engine, case.precision)
    assert executable.batch_sizes == (1, 2, 8)
    assert (report.refusals, report.rejected) == ({}, ())
    executable.close()


def test_answers_outlive_the_pixels_until_the_next_run(case: Case) -> None:
    executable = load(case, Brightness())
    pixels = np.full((3, 8, 6, 3), 100, dtype=np.uint8)
    means, brightest = executable.run(pixels)
    pixels[:] = 0
    assert means.tolist() == [100.0] * 3
    assert brightest.tolist() == [100] * 3
    executable.close()


def test_read_only_pixels_do(case: Case) -> None:
    executable = load(case, Brightness())
    pixels = np.full((2, 8, 6, 3), 7, dtype=np.uint8)
    pixels.flags.writeable = False
    assert executable.run(pixels)[0].tolist() == [7.0, 7.0]
    executable.close()


def test_other_pixels_are_refused(case: Case) -> None:
    executable = load(case, Brightness())
    refused: list[tuple[Any, str]] = [
        (np.zeros((4, 8, 6, 3), np.uint8), r"batch of 4 .* \(1, 2, 3, 8\)"),
        (np.zeros((0, 8, 6, 3), np.uint8), "batch of 0"),
        (np.zeros((1, 6, 8, 3), np.uint8), "not \\(1, 6, 8, 3\\)"),
        (np.zeros((8, 6, 3), np.uint8), "not \\(8, 6, 3\\)"),
        (np.zeros((1, 8, 6, 3), np.float32), "float32"),
        (np.zeros((1, 8, 6, 6), np.uint8)[..., ::2], "C-contiguous"),
    ]
    for pixels, message in refused:
        with pytest.raises(ValueError, match=message):
            executable.run(pixels)
    executable.close()


def test_a_ladder_needs_positive_sizes() -> None:
    for batch_sizes in ((), (0, 1), (-2,)):
        with pytest.raises(ValueError, match="positive"):
            CpuBackend().load(Brightness(), DEVICE, "eager", "fp32", batch_sizes)


def test_closing_frees_the_weights_and_twice_is_once(case: Case) -> None:
    network = Brightness()
    weights = weakref.ref(network.scale)
    executable = load(case, network)
    executable.close()
    executable.close()
    del network
    gc.collect()
    assert weights() is None
    with pytest.raises(BackendError, match="closed"):
        executable.run(np.zeros((1, 8, 6, 3), np.uint8))


def test_two_executables_in_turn_keep_their_answers(case: Case) -> None:
    pixels = images(3, (96, 96, 3))
    first, second = load(case, classifier(), (3,)), load(case, Brightness(), (2,))
    (logits,) = (output.copy() for output in first.run(pixels))
    second.run(np.zeros((2, 8, 6, 3), np.uint8))
    np.testing.assert_allclose(first.run(pixels)[0], logits, rtol=1e-5)
    first.close()
    second.close()


@pytest.mark.parametrize("backend", COMPUTING, ids=lambda backend: backend.name)
class TestBackend:
    def test_it_has_the_members_of_the_contract_alone(self, backend: Backend) -> None:
        assert {name for name in dir(backend) if not name.startswith("_")} == {*_MEMBERS, *_WITH_A_DEFAULT}

    def test_auto_takes_the_first_engine_and_the_precision_of_the_device(self, backend: Backend) -> None:
        device = backend.devices()[0]
        assert device.auto_precision in backend.facts.precisions
        executable, report = backend.load(Brightness(), device.id, "auto", "auto", (1,))
        tried = [*report.refusals, report.engine]
        assert tried == list(backend.facts.engines[: len(tried)])
        assert report.precision == device.auto_precision
        executable.close()

    def test_memory_and_telemetry_are_plausible(self, backend: Backend) -> None:
        device = backend.devices()[0]
        executable, _ = backend.load(Brightness(), device.id, "eager", "fp32", (1,))
        memory = backend.memory(device.id)
        executable.close()
        assert 0 < memory.allocated <= memory.reserved <= memory.total == device.memory_bytes
        assert 0 < memory.used <= memory.total
        telemetry = backend.telemetry(device.id)
        # A vendor's tool may be missing, or not have answered yet; the host answers at once.
        silent = isnan(telemetry.utilization_ratio) and not backend.facts.host_memory
        assert silent or 0 <= telemetry.utilization_ratio <= 1
        assert isnan(telemetry.energy_joules) or telemetry.energy_joules >= 0
        assert isnan(telemetry.temperature_celsius) or 0 < telemetry.temperature_celsius < 150

    @pytest.mark.parametrize("precision", ["fp16", "int8", "fp99"])
    def test_precisions_that_no_engine_has_are_refused_by_each(self, backend: Backend, precision: str) -> None:
        if precision in backend.facts.precisions:
            pytest.skip(f"{backend.name} has {precision}")
        with pytest.raises(EngineRefusedError) as caught:
            backend.load(Brightness(), backend.devices()[0].id, "auto", precision, (1,))
        assert all(f"{name}: it offers" in str(caught.value) for name in backend.facts.engines)
        assert f"not {precision}" in str(caught.value)

    def test_unknown_engines_and_devices_are_refused_by_name(self, backend: Backend) -> None:
        with pytest.raises(EngineRefusedError, match=r"no engine 'warp'; it has .*eager"):
            backend.load(Brightness(), backend.devices()[0].id, "warp", "fp32", (1,))
        with pytest.raises(BackendUnavailableError, match="no device 'cpu:9'"):
            backend.load(Brightness(), "cpu:9", "eager", "fp32", (1,))


def test_openvino_without_bf16_kernels_gives_way_to_float32_and_auto_takes_the_next_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a processor without them, whatever this one has."""
    openvino = pytest.importorskip("openvino")
    truth = openvino.Core.get_property

    def get_property(core: Any, *asked: Any) -> Any:
        return ["FP32", "INT8"] if asked[-1] == "OPTIMIZATION_CAPABILITIES" else truth(core, *asked)

    monkeypatch.setattr(openvino.Core, "get_property", get_property)
    executable, report = CpuBackend().load(Brightness(), DEVICE, "openvino", "bf16", (1,))
    assert (report.engine, report.precision) == ("openvino", "fp32")
    assert "no bf16 kernels" in report.refusals["openvino"]
    executable.close()
    executable, report = CpuBackend().load(Brightness(), DEVICE, "auto", "bf16", (1,))
    assert (report.engine, report.precision) != ("openvino", "bf16")
    assert "no bf16 kernels" in report.refusals["openvino"]
    executable.close()


def test_eager_serves_where_openvino_is_not_installed(no_openvino: None) -> None:
    _, report = CpuBackend().load(Brightness(), DEVICE, "auto", "fp32", (1,))
    assert report.engine == "eager"
    assert how_to_install("cpu") in report.refusals["openvino"]


def test_a_network_that_openvino_cannot_convert_goes_to_eager() -> None:
    pytest.importorskip("openvino")
    _, report = CpuBackend().load(Unconvertible(), DEVICE, "auto", "fp32", (1,))
    assert report.engine == "eager"
    assert "cannot convert" in report.refusals["openvino"]
    assert report.refusals["onnxruntime"]


def test_openvino_frees_the_network_it_was_given() -> None:
    pytest.importorskip("openvino")
    network = classifier()
    weights = weakref.ref(network.core.get_parameter("fc.weight"))
    executable, _ = CpuBackend().load(network, DEVICE, "openvino", "fp32", (1,))
    del network
    gc.collect()
    assert weights() is None
    executable.close()


def test_openvino_reports_nothing_to_anybody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its converter, where it is asked for, leaves a client number in the home directory and sends events with it."""
    pytest.importorskip("openvino")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    CpuBackend().load(Brightness(), DEVICE, "openvino", "fp32", (1,)).executable.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(engine, marks=[pytest.mark.nightly] if engine == "inductor" else [])
        for engine in (*CpuBackend.facts.engines, *CpuBackend.facts.by_name)
    ],
)
def test_one_thread_means_one_thread(engine: str) -> None:
    _skip_without_packages(engine)
    executable, _ = CpuBackend(threads=1).load(classifier(), DEVICE, engine, "fp32", (8,))
    assert torch.get_num_threads() == 1
    pixels = images(8, (96, 96, 3))
    assert of_one_thread(lambda: [executable.run(pixels) for _ in range(10)]) > 0.75
    executable.close()


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


def test_mistakes_of_our_own_are_not_dressed_up() -> None:
    with pytest.raises(KeyError), translated_errors(DEVICE):
        raise KeyError("ours")


def test_a_network_that_fails_while_warming_up_is_refused_with_the_reason() -> None:
    with pytest.raises(EngineRefusedError, match="eager: cpu:0 failed: could not create a primitive"):
        CpuBackend().load(Brightness(RuntimeError("could not create a primitive")), DEVICE, "eager", "fp32", (1,))


def test_too_little_memory_while_warming_up_is_no_refusal() -> None:
    with pytest.raises(OutOfDeviceMemoryError, match="not enough memory"):
        CpuBackend().load(Brightness(RuntimeError("not enough memory")), DEVICE, "auto", "fp32", (1,))


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
