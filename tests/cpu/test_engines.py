"""The engines beside eager and OpenVINO: why they refuse, what they keep, and that what they compiled is what runs.

That their answers are right: tests/cpu/test_backends.py, over every engine.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import resource
import shutil
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn

from anychip_base.extras import how_to_install
from backends import CompileOptions, EngineRefusedError
from backends.engines import inductor as inductor_file
from backends.engines import onnxruntime as onnxruntime_file
from backends.engines.inductor import InductorEngine
from backends.engines.onnxruntime import OnnxRuntimeEngine
from backends.engines.openvino import OpenVINOEngine
from backends.vendors.cpu import CpuBackend
from backends.vendors.table import CPU, NVIDIA
from models import open_model, parse_spec
from tests.support.rows import row

DEVICE = "cpu:0"
with_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler")


class Slope(nn.Module):
    """A convolution over bytes: what must be float32 and what int32 in the answer, at any core precision."""

    input_shape = (8, 6, 3)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.core = nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.dtype = torch.float32

    def cast(self, dtype: torch.dtype) -> Slope:
        self.core.to(dtype)
        self.dtype = dtype
        return self

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        scores = self.core(pixels.permute(0, 3, 1, 2).to(self.dtype)).float().mean(dim=(2, 3))
        return scores, scores.argmax(dim=1).to(torch.int32)


class Mean(Slope):
    """No convolution and no matrix product."""

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return (pixels.to(torch.float32).mean(dim=(1, 2, 3)),)


class Doubling(Slope):
    """Its way depends on a value, which only tracing follows."""

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        levels = pixels.to(torch.float32)
        return ((2 * levels if levels.sum() >= 0 else levels).mean(dim=(1, 2, 3)),)


class OneSize(Slope):
    """Written for batches of exactly two."""

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return (pixels.to(torch.float32)[:2].reshape(2, -1).mean(dim=1),)


PIXELS = np.random.default_rng(0).integers(0, 256, (3, 8, 6, 3), dtype=np.uint8)


def answers() -> list[np.ndarray[Any, Any]]:
    with torch.inference_mode():
        return [answer.numpy() for answer in Slope().eval()(torch.from_numpy(PIXELS))]


def refusal(engine: str, network: Any = None, options: CompileOptions | None = None) -> str:
    with pytest.raises(EngineRefusedError) as caught:
        load(engine, network, options or CompileOptions())
    return str(caught.value)


def load(
    engine: str, network: Any = None, options: CompileOptions | None = None, sizes: tuple[int, ...] = (1, 3)
) -> Any:
    network = (network or Slope()).eval()
    return CpuBackend(1).load(network, DEVICE, engine, "fp32", (1, 3), options=options or CompileOptions()).executable


class Chain(Slope):
    """What int8 is for: convolutions in a row, one activation called twice, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)
        self.act = nn.ReLU()

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        x = self.act(self.core(pixels.permute(0, 3, 1, 2).to(self.dtype) / 255))
        return (self.act(self.second(x) + x).flatten(1),)


def test_openvino_serves_where_the_disk_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It raises RuntimeError then. A file that may not grow is a full disk to who writes it."""
    pytest.importorskip("openvino")
    options = CompileOptions(cache_dir=tmp_path, key="chain")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        executable = OpenVINOEngine(row("fp32")).compile(Chain().eval(), DEVICE, "fp32", (1, 3), options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with torch.inference_mode():
        [expected] = [output.numpy() for output in Chain().eval()(torch.from_numpy(PIXELS))]
    np.testing.assert_allclose(executable.run(PIXELS)[0], expected, rtol=1e-4, atol=1e-4)
    executable.close()
    assert list((tmp_path / "engines").iterdir()) == []
    assert len([line for line in caplog.messages if "cannot be kept" in line]) == 1


class TestInt8ByOnnxRuntime:
    def test_what_runs_is_the_network_in_int8_and_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pixels = np.random.default_rng(1).integers(0, 256, (16, 8, 6, 3), dtype=np.uint8)
        options = CompileOptions(calibration=lambda: pixels, cache_dir=tmp_path, key="chain")
        with torch.inference_mode():
            [expected] = [output.numpy() for output in Chain().eval()(torch.from_numpy(PIXELS))]
        for _ in range(2):
            executable = OnnxRuntimeEngine(CPU).compile(Chain().eval(), DEVICE, "int8", (1, 3), options)
            [given] = executable.run(PIXELS)
            error = np.abs(given - expected).max()
            assert 0 < error < 0.05 * np.abs(expected).max()  # Of float32 there would be none to speak of.
            np.testing.assert_array_equal(executable.run(PIXELS[:1])[0], given[:1])
            executable.close()
            monkeypatch.setattr(onnxruntime_file, "_quantised", _must_not_be_called)

    @pytest.mark.parametrize(
        ("flags", "overflow"),
        [("ssse3 avx2", True), ("ssse3 avx2 avx512f", True), ("ssse3 avx2 avx_vnni", False), ("asimd i8mm", False)],
    )
    def test_weights_have_a_bit_less_where_sums_would_overflow(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, overflow: bool
    ) -> None:
        """Each kind of processor keeps a file of its own, should they share a cache."""
        made: list[bool] = []
        quantised = onnxruntime_file._quantised

        def counted(*given: Any, reduced: bool) -> bytes:
            made.append(reduced)
            return quantised(*given, reduced=reduced)

        monkeypatch.setattr(onnxruntime_file, "_quantised", counted)
        pixels = np.random.default_rng(1).integers(0, 256, (16, 8, 6, 3), dtype=np.uint8)
        for known in (flags.split(), ["ssse3"], ["asimd"]):
            monkeypatch.setattr("backends.host.cpu_flags", lambda known=known: frozenset(known))
            options = CompileOptions(calibration=lambda: pixels, cache_dir=tmp_path, key="chain")
            OnnxRuntimeEngine(CPU).compile(Chain().eval(), DEVICE, "int8", (1, 3), options).close()
        assert made == [overflow, not overflow]

    def test_it_needs_images(self) -> None:
        with pytest.raises(EngineRefusedError, match="--calibrate DIR"):
            OnnxRuntimeEngine(CPU).compile(Chain().eval(), DEVICE, "int8", (1,), CompileOptions())


@with_compiler
class TestInt8ByInductor:
    @pytest.fixture
    def options(self, tmp_path: Path) -> CompileOptions:
        pixels = np.random.default_rng(1).integers(0, 256, (16, 8, 6, 3), dtype=np.uint8)
        return CompileOptions(calibration=lambda: pixels, cache_dir=tmp_path, key="chain")

    def test_what_is_compiled_is_the_network_in_int8_and_is_kept(
        self, options: CompileOptions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("torchao")
        with torch.inference_mode():
            [expected] = [output.numpy() for output in Chain().eval()(torch.from_numpy(PIXELS))]
        for _ in range(2):
            executable = InductorEngine(row("int8")).compile(Chain().eval(), DEVICE, "int8", (1, 3), options)
            [given] = executable.run(PIXELS)
            error = np.abs(given - expected).max()
            assert 0 < error < 0.05 * np.abs(expected).max()  # Of float32 there would be none to speak of.
            np.testing.assert_array_equal(executable.run(PIXELS[:1])[0], given[:1])
            executable.close()
            monkeypatch.setattr(inductor_file, "_compile", _must_not_be_called)

    def test_it_needs_images_and_torchao(self, options: CompileOptions, monkeypatch: pytest.MonkeyPatch) -> None:
        def refusal(options: CompileOptions) -> str:
            with pytest.raises(EngineRefusedError) as caught:
                InductorEngine(row("int8")).compile(Chain().eval(), DEVICE, "int8", (1,), options)
            return str(caught.value)

        assert "--calibrate DIR" in refusal(CompileOptions())

        def absent(name: str) -> str:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", absent)
        assert how_to_install("inductor") in refusal(options)


class TestInductor:
    @pytest.mark.parametrize("device", ["npu:0", "mlu:0", "meta"])
    def test_refuses_devices_it_generates_no_code_for(self, device: str) -> None:
        with pytest.raises(EngineRefusedError, match=f"not for {device.split(':', maxsplit=1)[0]}"):
            InductorEngine(row("fp32")).compile(Slope(), device, "fp32", (1,), CompileOptions())

    def test_refuses_without_a_compiler_and_says_what_to_install(self) -> None:
        with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
            assert "there is no C++ compiler: install g++" in refusal("inductor")

    def test_refuses_a_torch_without_packages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
        assert "PyTorch 2.5.1+cpu has no packages" in refusal("inductor")

    @with_compiler
    def test_a_network_that_cannot_be_exported_is_refused(self) -> None:
        class Branching(Slope):
            def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
                return super().forward(pixels) if pixels.sum().item() > 3 else super().forward(pixels + 1)

        assert "PyTorch cannot export the network" in refusal("inductor", Branching())

    @with_compiler
    def test_keeps_one_package_a_size_and_loads_it_at_the_next_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        options = CompileOptions(cache_dir=tmp_path)
        first = load("inductor", options=options)
        packages = sorted((tmp_path / "inductor").iterdir())
        assert [package.suffix for package in packages] == [".pt2", ".pt2"]
        for package in packages:  # Generated C++ and its library, not a graph that is interpreted.
            names = zipfile.ZipFile(package).namelist()
            assert any(name.endswith(".so") for name in names), names
            assert any(name.endswith(".cpp") for name in names), names
        expected = answers()
        for size in (1, 3):
            for ours, right in zip(first.run(PIXELS[:size]), expected, strict=True):
                assert ours.dtype == right.dtype
                np.testing.assert_allclose(ours, right[:size], rtol=1e-4)

        with monkeypatch.context() as patched:
            patched.setattr(inductor_file, "_compile", _must_not_be_called)
            again = load("inductor", options=options)
            np.testing.assert_allclose(again.run(PIXELS)[0], expected[0], rtol=1e-4)
            # Other weights are another network, whatever else is alike.
            other = Slope()
            assert other.core.bias is not None
            other.core.bias.data += 1
            assert "must not compile" in refusal("inductor", other, options=options)

        packages[0].write_bytes(b"torn")
        with caplog.at_level(logging.WARNING):
            mended = load("inductor", options=options)
        assert f"{packages[0]} cannot be used and is compiled again" in caplog.text
        for size in (1, 3):
            np.testing.assert_allclose(mended.run(PIXELS[:size])[0], expected[0][:size], rtol=1e-4)


def _must_not_be_called(*_: Any) -> None:
    raise RuntimeError("must not compile")


class TestOnnxRuntime:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        for package in ("onnxruntime", "onnx", "onnxscript"):
            pytest.importorskip(package)

    @pytest.mark.parametrize("package", ["onnxruntime", "onnx", "onnxscript"])
    def test_says_how_to_install_what_is_missing(self, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        assert how_to_install("onnx") in refusal("onnxruntime")

    def test_runs_on_the_cpus_provider_with_its_threads_and_keeps_types(self) -> None:
        executable = load("onnxruntime")
        session = executable._session
        assert session.get_providers()[-1] == "CPUExecutionProvider"
        assert session.get_session_options().intra_op_num_threads == 1
        for ours, right in zip(executable.run(PIXELS), answers(), strict=True):
            assert ours.dtype == right.dtype
            np.testing.assert_allclose(ours, right, rtol=1e-4)

    @pytest.mark.parametrize("exporter", ["_by_export", "exported_by_tracing"])
    def test_each_exporter_does(self, exporter: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime_file, "_by_export", getattr(onnxruntime_file, exporter))
        monkeypatch.setattr(onnxruntime_file, "exported_by_tracing", _must_not_be_called)
        np.testing.assert_allclose(load("onnxruntime").run(PIXELS)[0], answers()[0], rtol=1e-4)

    def test_a_network_that_the_newer_exporter_cannot_take_is_not_printed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert onnxruntime_file._exported(Doubling().eval(), 2)
        assert capsys.readouterr() == ("", "")

    def test_the_tracer_stands_in_for_the_newer_exporter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime_file, "_by_export", _must_not_be_called)
        np.testing.assert_allclose(load("onnxruntime").run(PIXELS)[0], answers()[0], rtol=1e-4)

    def test_a_network_for_one_batch_size_is_refused(self) -> None:
        assert "batch" in refusal("onnxruntime", OneSize())

    def test_an_accelerator_without_its_provider_is_refused(self) -> None:
        with pytest.raises(EngineRefusedError, match=r"no provider for NVIDIA here: it has .*CPU.*onnxruntime-gpu has"):
            OnnxRuntimeEngine(NVIDIA).compile(Slope(), "cuda:0", "fp16", (1,), CompileOptions())

    def test_a_provider_that_does_not_start_is_not_replaced_by_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Session:
            asked: ClassVar[list[Any]] = []

            def __init__(self, _: bytes, settings: Any, providers: list[Any]) -> None:
                self.asked.extend(providers)

            def get_providers(self) -> list[str]:
                return ["CPUExecutionProvider"]

        monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
        monkeypatch.setattr("onnxruntime.InferenceSession", Session)
        with pytest.raises(EngineRefusedError, match="CUDAExecutionProvider does not start here"):
            OnnxRuntimeEngine(NVIDIA).compile(Slope(), "cuda:1", "fp32", (1,), CompileOptions())
        assert Session.asked == [("CUDAExecutionProvider", {"device_id": "1", "use_tf32": "0"})]

    def test_what_a_provider_leaves_to_the_cpu_is_seen_and_refused(self) -> None:
        """The CPU's own provider stands for an accelerator's that takes nothing."""
        runtime = importlib.import_module("onnxruntime")
        exported = onnxruntime_file._exported(Chain().eval(), 2)
        settings = runtime.SessionOptions()
        choice: tuple[str, dict[str, str]] = ("CPUExecutionProvider", {})
        with pytest.raises(EngineRefusedError, match=r"leaves (Fused)?Conv.* to the CPU \(\d+ of \d+ operators\)"):
            onnxruntime_file._refuse_work_of_the_cpu(runtime, exported, settings, choice, 2)
        assert not settings.enable_profiling
        exported = onnxruntime_file._exported(Mean().eval(), 2)  # Nothing there is work.
        onnxruntime_file._refuse_work_of_the_cpu(runtime, exported, settings, choice, 2)


class TestTorchScript:
    def test_runs_a_traced_graph(self) -> None:
        executable = load("torchscript")
        assert all(isinstance(graph, torch.jit.ScriptModule) for graph in executable._by_size.values())
        for ours, right in zip(executable.run(PIXELS), answers(), strict=True):
            assert ours.dtype == right.dtype
            np.testing.assert_allclose(ours, right, rtol=1e-4)

    def test_refuses_a_torch_that_has_given_it_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch.jit, "trace")
        assert "has no TorchScript any more" in refusal("torchscript")

    def test_a_network_for_one_batch_size_is_refused(self) -> None:
        assert "torchscript: " in refusal("torchscript", OneSize())


@pytest.mark.parametrize(("flags", "warned"), [(frozenset({"avx2"}), True), (frozenset({"avx512_bf16"}), False)])
def test_bf16_on_a_cpu_without_units_for_it_says_that_it_is_slow(
    flags: frozenset[str], warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("backends.host.cpu_flags", lambda: flags)
    CpuBackend(1).load(Slope().eval(), DEVICE, "eager", "bf16", (1,)).executable.close()
    assert ("no units for bf16" in caplog.text) is warned


class _Heap(ctypes.Structure):
    """What glibc's mallinfo2 returns: of its ten figures the fifth is mapped, the eighth in use."""

    _fields_: ClassVar = [("figures", ctypes.c_size_t * 10)]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc")
def test_converting_a_network_for_openvino_again_leaves_little_memory_behind():
    """As where models come and go and cannot be kept. What PyTorch has traced it keeps once, and not three times."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Heap

    def left_bytes():
        executable = OpenVINOEngine(row("fp32"), 2).compile(
            open_model(parse_spec("googlenet:random"), Path("nowhere")).network(),
            *("cpu:0", "fp32", (1,)),
            CompileOptions(),
        )
        executable.close()
        del executable
        gc.collect()
        found = libc.mallinfo2().figures
        return found[4] + found[7]

    first = [left_bytes() for _ in range(2)][-1]  # What is made once stays.
    assert [left_bytes() for _ in range(3)][-1] - first < 3 * (24 << 20)
