"""Engines for accelerators, without one: graphs on a device made of the CPU, vendors' compilers replaced by fakes.

The fakes say what is passed to a compiler, not what it makes of it. tests/simulated/test_vendor_sources.py compares
their calls with the vendors' own sources.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anychip_tools.verify.contract import BrokenPromiseError, Subject, products_are_float32
from backends import EngineRefusedError, Executable, LoadedNetwork, OutOfDeviceMemoryError
from backends.contract.backend import CompileOptions
from backends.engines import compile_first, eager
from backends.engines.engine import with_own_folder
from backends.engines.graph import GraphEngine
from backends.engines.streamed import StreamedExecutable
from backends.engines.tensorrt import TensorRTEngine
from backends.vendors import table as vendors
from backends.vendors.cpu import CpuBackend
from backends.vendors.table import PageLocks
from tests.support.rows import row

SIZES = (1, 2, 4)
DEVICE = "cpu:0"


class Network(nn.Module):
    """A convolution and two reductions: float and integer answers that differ from image to image."""

    input_shape = (8, 6, 3)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.core = nn.Conv2d(3, 5, 3).requires_grad_(False)

    def cast(self, dtype: torch.dtype) -> Network:
        self.core.to(dtype)
        return self

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        x = (pixels.permute(0, 3, 1, 2).to(torch.float32) / 255).to(self.core.weight.dtype)
        features = self.core(x).float()
        return features.amax((2, 3)), features[:, 0].flatten(1).argmax(-1)


class OnTheHost(Network):
    """A part of its answer is computed where no graph sees it."""

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return (pixels.to(torch.float32).sum((1, 2, 3)) + float(pixels.numpy().sum()),)


def images(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (count, *Network.input_shape), dtype=np.uint8)


def on_cpu(pixels: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    with torch.inference_mode():
        return [output.numpy() for output in Network()(torch.from_numpy(pixels))]


def assert_answers(executable: Executable) -> None:
    """Each size, and two batches under way at once."""
    assert not np.allclose(on_cpu(images(2, 7))[0], on_cpu(images(2, 8))[0], rtol=1e-2)
    for size in SIZES:
        for ours, theirs in zip(executable.run(images(size, size)), on_cpu(images(size, size)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert executable.depth == 2
    first, second = executable.start(images(2, 7)), executable.start(images(2, 8))
    for started, seed in ((first, 7), (second, 8)):
        for ours, theirs in zip(started.outputs(), on_cpu(images(2, seed)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


class Recording(TorchDispatchMode):
    """Every operator that runs inside, with the tensors it ran on: what a graph of a device holds."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, result))
        return result


class FakeGraph:
    """Replays on the tensors of its capture: whoever forgets to copy in or out gets another batch's answer."""

    def __init__(self) -> None:
        self.recording = Recording()

    def replay(self) -> None:
        for func, args, kwargs, result in self.recording.steps:
            again = func(*args, **kwargs)
            for old, new in zip(flat(result), flat(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def flat(result: Any) -> list[Tensor]:
    return [each for each in (result if isinstance(result, list | tuple) else [result]) if isinstance(each, Tensor)]


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: None)

    def wait_event(self, event: object) -> None:
        pass


class FakeEvent:
    def __init__(self, blocking: bool = False) -> None:
        pass

    def record(self, stream: FakeStream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeModule(SimpleNamespace):
    """What torch.cuda is to the engines, over the CPU."""

    def clear(self) -> None:
        self.__dict__.clear()
        self.current = FakeStream()
        self.Stream, self.CHIPGraph, self.graph = FakeStream, FakeGraph, self.capture
        self.current_stream, self.Event = lambda: self.current, FakeEvent
        self.graph_pool_handle = lambda: "pool"
        self.synchronize = lambda device=None: None

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def capture(self, graph: FakeGraph, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        with graph.recording:
            yield


MODULE = FakeModule()


@pytest.fixture(autouse=True)
def _chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the CPU in the place of an accelerator that has streams and graphs."""
    MODULE.clear()
    real = torch.get_device_module

    @functools.wraps(real)  # PyTorch's own compiler unwraps it.
    def get_device_module(device: Any = None) -> Any:
        return MODULE if device == "cpu" else real(device)

    monkeypatch.setattr(torch, "get_device_module", get_device_module)


def load(engine: Any, network: nn.Module | None = None) -> Executable:
    return loaded(engine, network).executable


def loaded(engine: Any, network: nn.Module | None = None) -> LoadedNetwork:
    facts = row("fp32", device_type="chip", channels_last=False)
    return compile_first([engine(facts)], cast(Any, network or Network()), DEVICE, ("fp32",), SIZES)


def refusal(engine: Any, network: nn.Module | None = None) -> str:
    with pytest.raises(EngineRefusedError) as caught:
        load(engine, network)
    return str(caught.value)


class TestGraph:
    def test_answers_as_the_network_and_a_graph_without_modes_of_capture_gets_none(self) -> None:
        @contextmanager
        def capture(graph: FakeGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
            with graph.recording:
                yield

        assert_answers(load(GraphEngine))
        cast(Any, MODULE).graph = capture  # As torch.xpu's.
        assert_answers(load(GraphEngine))

    def test_refusals_and_too_little_memory(self) -> None:
        def fails(text: str) -> Any:
            def make() -> None:
                raise RuntimeError(text)

            return make

        text = refusal(GraphEngine, OnTheHost())
        assert "the captured graph for 1 images answers otherwise than the network: 100% of its numbers differ" in text
        MODULE.CHIPGraph = fails("operation not permitted when stream is capturing")
        assert "the network cannot be captured: cpu:0 failed: operation not permitted" in refusal(GraphEngine)
        MODULE.CHIPGraph = fails("out of memory")
        with pytest.raises(OutOfDeviceMemoryError):
            load(GraphEngine)
        del MODULE.CHIPGraph
        assert "torch.cpu has no captured graphs here (CHIPGraph)" in refusal(GraphEngine)

    def test_closing_frees_the_graphs_and_the_weights(self) -> None:
        network = Network()
        weights = weakref.ref(network.core.weight)
        executable = load(GraphEngine, network)
        executable.close()
        del network
        gc.collect()
        assert weights() is None


class FakeTensorRT(ModuleType):
    """torch_tensorrt: runs what it is given as it is, inside a module named like TensorRT's."""

    def __init__(self) -> None:
        super().__init__("torch_tensorrt")
        self.calls: list[dict[str, Any]] = []
        self.dynamo = SimpleNamespace(compile=self._compile)

    def _compile(self, exported: Any, **options: Any) -> nn.Module:
        print("TensorRT talks")
        self.calls.append({"program": exported, **options})
        compiled = nn.Sequential()
        compiled.add_module("_run_on_acc_0", exported.module())
        return compiled


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    fake = FakeTensorRT()
    monkeypatch.setitem(sys.modules, "torch_tensorrt", fake)
    return fake


class TestTensorRT:
    def test_compiles_each_size_from_floats_and_keeps_stdout_clean(
        self, tensorrt: FakeTensorRT, capsys: pytest.CaptureFixture[str]
    ) -> None:
        executable = load(TensorRTEngine)
        assert_answers(executable)
        assert [call["arg_inputs"][0].shape[0] for call in tensorrt.calls] == [4, 2, 1]
        for call in tensorrt.calls:
            assert isinstance(call["program"], torch.export.ExportedProgram)
            assert call["arg_inputs"][0].dtype == torch.float32
            assert (call["device"], call["disable_tf32"]) == (torch.device(DEVICE), True)
            assert set(call) == {"program", "arg_inputs", "device", "disable_tf32"}  # No cache without a directory.
        printed = capsys.readouterr()
        assert (printed.out, "TensorRT talks" in printed.err) == ("", True)

    def test_types_are_those_of_the_network_where_that_has_to_be_asked_for(self, tensorrt: FakeTensorRT) -> None:
        """2.8 and 2.9 take the parameter and mean False by it, 2.13 has it no more (read in their wheels)."""

        def older(exported: Any, *, use_explicit_typing: bool = False, **options: Any) -> nn.Module:
            return tensorrt._compile(exported, use_explicit_typing=use_explicit_typing, **options)

        tensorrt.dynamo.compile = older
        assert_answers(load(TensorRTEngine))
        assert {call["use_explicit_typing"] for call in tensorrt.calls} == {True}

    def test_int8_is_calibrated_and_exported_as_modelopt_wants_it(
        self, tensorrt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        log: list[str] = []

        def quantize(module: nn.Module, config: str, show: Any) -> None:
            log.append(f"quantize {config}")
            assert {value.dtype for value in module.parameters()} == {torch.float16}
            module.register_forward_pre_hook(lambda _, inputs: log.append(f"{len(inputs[0])} {inputs[0].dtype}"))
            show(module)
            module._forward_pre_hooks.clear()

        @contextmanager
        def export_torch_mode() -> Iterator[None]:
            log.append("export")
            yield
            log.append("exported")

        quantization = ModuleType("modelopt.torch.quantization")
        quantization.quantize, quantization.INT8_DEFAULT_CFG = quantize, "int8"  # type: ignore[attr-defined]
        utils = ModuleType("modelopt.torch.quantization.utils")
        utils.export_torch_mode = export_torch_mode  # type: ignore[attr-defined]
        for module in (ModuleType("modelopt"), ModuleType("modelopt.torch"), quantization, utils):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        made = TensorRTEngine(row("int8"))
        options = CompileOptions(calibration=lambda: np.concatenate([images(4)] * 3), cache_dir=tmp_path)
        made.compile(Network(), DEVICE, "int8", SIZES, options).close()
        assert log[:3] == ["quantize int8", "8 torch.float32", "4 torch.float32"]
        assert log[3:] == ["export", "exported"] * len(SIZES)
        assert "engine_cache_dir" not in tensorrt.calls[0]


class TestCompilersThatKeepFilesThemselves:
    """torch_tensorrt and torchair know a kept network neither by its weights nor by their shapes."""

    def test_each_network_precision_and_machine_has_a_folder_of_its_own(self, tmp_path: Path) -> None:
        def folder(core: int = 0, key: str = "", precision: str = "fp32", machine: str = "one") -> Path | None:
            network, options = Network(), CompileOptions(cache_dir=tmp_path, key=key)
            network.core.weight.data += core
            given: Any = {"network": network, "precision": precision, "machine": machine}
            return with_own_folder(lambda own: own, "Compiler", options, **given)

        asked: list[dict[str, Any]] = [{}, {"core": 1}, {"key": "a"}, {"precision": "fp16"}, {"machine": "two"}]
        found = [folder(**each) for each in (*asked, *asked)]
        assert found[: len(asked)] == found[len(asked) :]
        assert len(set(found)) == len(asked)

    def test_what_is_kept_and_cannot_be_used_is_made_anew_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        found_kept: list[bool] = []
        given: Any = {"network": Network(), "precision": "fp32", "machine": "one"}

        def made(fails: Callable[[bool], bool]) -> str:
            def build(own: Path | None) -> str:
                assert own is not None
                found_kept.append(any(own.iterdir()))
                (own / "engine").touch()
                if fails(found_kept[-1]):
                    raise AssertionError("Refitting failed")
                return "served"

            return with_own_folder(build, "Compiler", CompileOptions(cache_dir=tmp_path), **given)

        assert made(lambda kept: False) == "served"
        assert made(lambda kept: kept) == "served"
        assert "what Compiler has kept cannot be used and is built anew: Refitting failed" in caplog.text
        with pytest.raises(AssertionError, match="Refitting failed"):
            made(lambda kept: True)
        assert found_kept == [False, True, False, True, False]


class RoundingBackend(CpuBackend):
    """The CPU in the place of a device that rounds the weights of these layers to TF32, unasked."""

    facts = replace(vendors.CPU, engines=("graph",), by_name=("eager",))

    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__(1)
        self.kinds = kinds

    def load(self, network: Any, *arguments: Any, **options: Any) -> LoadedNetwork:
        for layer in network.modules():
            if isinstance(layer, self.kinds):
                weight = cast(nn.Parameter, layer.weight)
                weight.data = (weight.data.view(torch.int32) & ~0x1FFF).view(torch.float32)
        return super().load(network, *arguments, **options)


@pytest.mark.parametrize(("kind", "named"), [(nn.Conv2d, "a convolution"), (nn.Linear, "a matrix product")])
def test_verify_finds_a_device_that_rounds_products_unasked(kind: type[nn.Module], named: str) -> None:
    products_are_float32(Subject(RoundingBackend(), "cpu:0"))
    with pytest.raises(BrokenPromiseError, match=f"eager rounds more than float32 does: {named}"):
        products_are_float32(Subject(RoundingBackend(kind), "cpu:0"))


OLDER = PageLocks("older", "pin", "unpin")
"""Functions that the vendor's package does not have yet."""


class TestItemsThatLieApart:
    @staticmethod
    def assert_answers_to_rows(executable: Executable) -> None:
        """Two batches under way, of items in memory of their own and, in the second, on the device; one is padded."""
        first, second = images(4, 7), images(3, 8)
        items = (
            [each.copy() for each in first],
            [second[0].copy(), torch.from_numpy(second[1].copy()), second[2].copy()],
        )
        started = [executable.start_rows(each, 4) for each in items]
        padded = np.concatenate((second, np.zeros_like(second[:1])))
        for batch, pixels in zip(started, (first, padded), strict=True):
            for ours, theirs in zip(batch.outputs(), on_cpu(pixels), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("engine", [GraphEngine, eager.EagerEngine])
    @pytest.mark.parametrize("bytes_for_threads", [0, 1 << 30])
    def test_are_brought_together_where_their_memory_cannot_be_locked(
        self, engine: Any, bytes_for_threads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("backends.engines.streamed._BYTES_FOR_THREADS", bytes_for_threads)
        monkeypatch.setattr("backends.engines.eager._HostExecutable", StreamedExecutable)
        executable = load(engine)
        assert executable.takes_rows
        self.assert_answers_to_rows(executable)
        with pytest.raises(ValueError, match="A batch of 3 is not among"):
            executable.start_rows([*images(3)], 3)
        with pytest.raises(ValueError, match="Pixels must be"):
            executable.start_rows([images(1)], 1)

    @staticmethod
    def lock_by(locks: PageLocks | None, code: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """Lock memory under the names that the row of the device's vendor has; return what is locked and what was."""
        row = replace(vendors.NVIDIA, name="acme", device_type="cpu", page_locks=locks)
        monkeypatch.setattr(vendors, "_known", {"acme": row})
        log: list[tuple[int, int]] = []

        def lock(address: int, size: int, flags: int) -> int:
            assert locks is not None
            assert (size, flags) == (images(1).nbytes, locks.flags)
            log.append((address, 1))
            if code < 0:  # torch_npu's, where CANN lacks the function.
                raise RuntimeError("Failed to find function aclrtHostRegisterV2")
            return code

        def unlock(address: int) -> int:
            log.append((address, -1))
            return 0

        if locks and locks != OLDER:
            holder = SimpleNamespace(**{locks.lock: lock, locks.unlock: unlock})
            setattr(MODULE, locks.runtime, lambda: holder)
        return log

    @pytest.mark.parametrize("locks", [vendors.NVIDIA.page_locks, vendors.ASCEND.page_locks])
    @pytest.mark.parametrize("engine", [GraphEngine, eager.EagerEngine])
    def test_are_copied_from_where_they_lie_once_that_memory_is_locked(
        self, engine: Any, locks: PageLocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("backends.engines.eager._HostExecutable", StreamedExecutable)
        monkeypatch.setattr("backends.engines.streamed._gather", None)
        monkeypatch.setattr(Tensor, "is_pinned", lambda *_: True)
        log = self.lock_by(locks, 0, monkeypatch)
        executable = load(engine)
        items = [each.copy() for each in images(2, 3)]
        for _ in range(3):
            executable.start_rows(items, 2).outputs()
        assert log == [(each.ctypes.data, 1) for each in items], "each once"
        self.assert_answers_to_rows(executable)
        executable.close()
        assert sorted(address for address, by in log if by > 0) == sorted(address for address, by in log if by < 0)

    @pytest.mark.parametrize(
        ("locks", "code", "steps"),
        [
            pytest.param(None, 0, [], id="no function"),
            pytest.param(OLDER, 0, [], id="no function in an older package"),
            pytest.param(vendors.NVIDIA.page_locks, 1, [1], id="the driver refuses, and is not asked again"),
            pytest.param(vendors.ASCEND.page_locks, -1, [1], id="the driver lacks it"),
            pytest.param(vendors.NVIDIA.page_locks, 0, [1, -1], id="locked, and PyTorch does not know it"),
        ],
    )
    def test_are_brought_together_where_no_memory_can_be_locked_for_pytorch(
        self, locks: PageLocks | None, code: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = self.lock_by(locks, code, monkeypatch)
        self.assert_answers_to_rows(load(GraphEngine))
        assert [by for _, by in log] == steps


@pytest.mark.parametrize("how", ["refused", "left out"])
def test_where_no_copy_to_the_host_can_be_captured_graphs_copy_after_their_replay(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused with CUDA's error 900, whose words driver_types.h and libcudart have; or not recorded at all."""

    class WithoutCopies(Recording):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            to_the_host = func is torch.ops.aten.copy_.default and args[2:] == (True,)
            if to_the_host and how == "refused":
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            return args[0] if to_the_host else super().__torch_dispatch__(func, types, args, kwargs)

    def record(graph: FakeGraph) -> None:
        graph.recording = WithoutCopies()

    monkeypatch.setattr(Tensor, "is_pinned", lambda *_: True)
    monkeypatch.setattr(FakeGraph, "__init__", record)
    executable, report = loaded(GraphEngine)
    assert (report.engine, dict(report.refusals)) == ("graph", {})
    assert_answers(executable)
