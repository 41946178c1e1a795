"""Engines for accelerators, without one: graphs on a device made of the CPU, vendors' compilers replaced by fakes.

The fakes say what is passed to a compiler, not what it makes of it. Their calls are compared with the vendors' own
sources in tests/unit/test_vendor_sources.py. torch.cuda itself, over the stub driver, refuses to capture: see
tests/simulated/test_stub_drivers.py.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anychip_ascend.torchair import TorchairEngine
from backends import BACKENDS, EngineRefusedError, Executable, LoadedNetwork, OutOfDeviceMemoryError
from backends.contract.backend import CompileOptions
from backends.engines import compile_first, eager
from backends.engines.compiled import by_torch_compile, compiling, with_own_folder
from backends.engines.graph import GraphEngine
from backends.engines.migraphx import MIGraphXEngine
from backends.engines.onnxruntime import OnnxRuntimeEngine
from backends.engines.streamed import StreamedExecutable
from backends.engines.tensorrt import TensorRTEngine
from backends.vendors import table as vendors
from backends.vendors.table import Facts, PageLocks
from backends.vendors.torch_device import TorchBackend
from tests.support.rows import row
from tests.support.vendor_calls import engines_by_name

SIZES = (1, 2, 4)
DEVICE = "cpu:0"
VENDORS = [backend for backend in BACKENDS if isinstance(backend, TorchBackend)]


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
        MODULE.log.append("replay")
        for func, args, kwargs, result in self.recording.steps:
            again = func(*args, **kwargs)
            for old, new in zip(flat(result), flat(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def pool(self) -> str:
        return "pool of the first"


def flat(result: Any) -> list[Tensor]:
    return [each for each in (result if isinstance(result, list | tuple) else [result]) if isinstance(each, Tensor)]


class FakeStream:
    def __init__(self, name: str = "side") -> None:
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        MODULE.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: None)

    def wait_event(self, event: object) -> None:
        pass


class FakeEvent:
    def __init__(self, blocking: bool = False) -> None:
        MODULE.log.append("an event to sleep for" if blocking else "an event to spin for")

    def record(self, stream: FakeStream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeModule(SimpleNamespace):
    """What torch.cuda is to the engines, over the CPU; `log` holds what they did in order."""

    log: list[str]

    def clear(self, **names: Any) -> None:
        self.__dict__.clear()
        self.current = FakeStream("compute")
        self.log, self.Stream, self.CHIPGraph, self.graph = [], FakeStream, FakeGraph, self.capture
        self.current_stream, self.Event = lambda: self.current, FakeEvent
        self.graph_pool_handle = lambda: "pool"
        self.synchronize = lambda device=None: None
        self.__dict__.update(names)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def capture(self, graph: FakeGraph, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        self.log.append(f"capture into {pool}, {capture_error_mode}")
        with graph.recording:
            yield
        sizes = [args[0].shape[0] for _, args, _, _ in graph.recording.steps if isinstance(args[0], Tensor)]
        self.log.append(f"captured {sizes[0]}")


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


chip = partial(row, device_type="chip", channels_last=False)


def load(engine: Any, network: nn.Module | None = None, precision: str = "fp32", **options: Any) -> Executable:
    return loaded(engine, network, precision, **options).executable


def loaded(engine: Any, network: nn.Module | None = None, precision: str = "fp32", **options: Any) -> LoadedNetwork:
    made, served = engine(chip("fp16", "bf16", "fp32")), cast(Any, network or Network())
    return compile_first([made], served, DEVICE, (precision,), SIZES, options=CompileOptions(**options))


def refusal(engine: Any, network: nn.Module | None = None) -> str:
    with pytest.raises(EngineRefusedError) as caught:
        load(engine, network)
    return str(caught.value)


class TestGraph:
    def test_answers_as_the_network_at_every_size_and_with_two_batches_under_way(self) -> None:
        executable, report = loaded(GraphEngine)
        assert_answers(executable)
        assert (report.engine, report.precision) == ("graph", "fp32")

    @pytest.mark.parametrize("fused", [True, False])
    def test_fused_layers_are_timed_as_they_are_replayed(self, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """One by one, fewer kernels are always quicker to start."""
        timed: list[str] = []

        def batch_s(network: Any, size: int, device: str) -> float:
            timed.append(f"{type(network).__name__} of {size}")
            return 1.0

        monkeypatch.setattr("backends.engines.graph.batch_s", batch_s)
        monkeypatch.setattr("backends.engines.graph.fuse", lambda network, run_s, *_: run_s())
        load(lambda facts: GraphEngine(replace(facts, fused_layers=fused))).close()
        assert timed == (["_Replayed of 4"] if fused else [])

    def test_a_batch_is_one_replay_and_the_network_is_not_called(self) -> None:
        calls: list[int] = []

        class Watched(Network):
            def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
                calls.append(len(pixels))
                return super().forward(pixels)

        executable = load(GraphEngine, Watched())
        calls.clear()
        MODULE.log.clear()
        executable.run(images(4))
        assert (calls, [each for each in MODULE.log if "event" not in each]) == ([], ["replay"])

    def test_shares_the_first_graphs_pool_where_there_are_no_handles(self) -> None:
        del MODULE.graph_pool_handle
        load(GraphEngine)
        pools = [each for each in MODULE.log if each.startswith("capture into")]
        assert pools == ["capture into None, thread_local"] + ["capture into pool of the first, thread_local"] * 5

    def test_a_graph_without_modes_of_capture_gets_none(self) -> None:
        @contextmanager
        def capture(graph: FakeGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
            with graph.recording:
                yield

        cast(Any, MODULE).graph = capture  # As torch.xpu's.
        assert_answers(load(GraphEngine))

    def test_what_a_graph_does_not_hold_is_found_by_comparing(self) -> None:
        text = refusal(GraphEngine, OnTheHost())
        assert "the captured graph for 1 images answers otherwise than the network: 100% of its numbers differ" in text

    def test_refuses_where_the_device_has_no_graphs(self) -> None:
        del MODULE.CHIPGraph
        assert "torch.cpu has no captured graphs here (CHIPGraph)" in refusal(GraphEngine)

    def test_refuses_what_cannot_be_captured_and_passes_on_too_little_memory(self) -> None:
        def fails(text: str) -> Any:
            def make() -> None:
                raise RuntimeError(text)

            return make

        MODULE.CHIPGraph = fails("operation not permitted when stream is capturing")
        assert "the network cannot be captured: cpu:0 failed: operation not permitted" in refusal(GraphEngine)
        MODULE.CHIPGraph = fails("out of memory")
        with pytest.raises(OutOfDeviceMemoryError):
            load(GraphEngine)

    def test_closing_frees_the_graphs_and_the_weights(self) -> None:
        network = Network()
        weights = weakref.ref(network.core.weight)
        executable = load(GraphEngine, network)
        executable.close()
        del network
        gc.collect()
        assert weights() is None

    @pytest.mark.parametrize("facts", [vendors.NVIDIA, vendors.INTEL], ids=lambda facts: facts.name)
    def test_torch_has_what_it_calls(self, facts: Facts) -> None:
        device_type = facts.device_type
        module = importlib.import_module(f"torch.{device_type}")
        assert hasattr(module, facts.graph_class)
        assert hasattr(module, "graph_pool_handle")
        assert "pool" in inspect.signature(module.graph).parameters
        assert ("capture_error_mode" in inspect.signature(module.graph).parameters) == (device_type == "cuda")


class FakeTensorRT(ModuleType):
    """torch_tensorrt: runs what it is given as it is, inside a module named like TensorRT's."""

    def __init__(self, takes: str = "_run_on_acc_0") -> None:
        super().__init__("torch_tensorrt")
        self.calls: list[dict[str, Any]] = []
        self.takes = takes
        self.dynamo = SimpleNamespace(compile=self._compile)

    def _compile(self, exported: Any, **options: Any) -> nn.Module:
        print("TensorRT talks")
        self.calls.append({"program": exported, **options})
        compiled = nn.Sequential()
        compiled.add_module(self.takes, exported.module())
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

    def test_the_cache_needs_weights_that_may_change_and_is_bounded(
        self, tensorrt: FakeTensorRT, tmp_path: Path
    ) -> None:
        load(TensorRTEngine, cache_dir=tmp_path)
        timing = Path(tensorrt.calls[0]["timing_cache_path"])
        with timing.open("wb") as file:
            file.truncate(65 * 2**20)
        load(TensorRTEngine, cache_dir=tmp_path)
        assert not timing.exists()
        call = tensorrt.calls[-1]
        assert (call["immutable_weights"], call["cache_built_engines"], call["reuse_cached_engines"]) == (
            False,
            True,
            True,
        )
        assert Path(call["engine_cache_dir"]).parent.parent == timing.parent == tmp_path / "tensorrt"
        assert 0 < call["engine_cache_size"] <= 8 * 2**30

    def test_refuses_a_network_of_which_it_takes_nothing(self, tensorrt: FakeTensorRT) -> None:
        tensorrt.takes = "_run_on_gpu_0"
        assert "TensorRT takes no part of this network" in refusal(TensorRTEngine)

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

    def test_int8_needs_images_and_modelopt(self, tensorrt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
        made = TensorRTEngine(row("int8"))
        with pytest.raises(EngineRefusedError, match="--calibrate DIR"):
            made.compile(Network(), DEVICE, "int8", SIZES, CompileOptions())
        monkeypatch.setitem(sys.modules, "modelopt", None)
        options = CompileOptions(calibration=lambda: images(4))
        with pytest.raises(EngineRefusedError, match="modelopt"):
            made.compile(Network(), DEVICE, "int8", SIZES, options)

    def test_too_little_memory_is_no_refusal(self, tensorrt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(tensorrt.dynamo, "compile", fail)
        with pytest.raises(OutOfDeviceMemoryError):
            load(TensorRTEngine)


class TestCompilersThatKeepFilesThemselves:
    """torch_tensorrt and torchair know a kept network neither by its weights nor by their shapes."""

    def test_each_network_precision_and_machine_has_a_folder_of_its_own(self, tmp_path: Path) -> None:
        others = Network()
        others.core.weight.data += 1
        asked: list[tuple[Network, str, str, str]] = [
            (Network(), "", "fp32", "one"),
            (others, "", "fp32", "one"),
            (Network(), "a key", "fp32", "one"),
            (Network(), "another", "fp32", "one"),
            (Network(), "", "fp16", "one"),
            (Network(), "", "fp32", "two"),
        ]
        found = [
            with_own_folder(
                lambda own: own,
                "Compiler",
                CompileOptions(cache_dir=tmp_path, key=key),
                network=network,
                precision=precision,
                machine=machine,
            )
            for network, key, precision, machine in (*asked, *asked)
        ]
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


def test_torch_compile_compiles_every_size_at_load_in_one_piece() -> None:
    """By itself PyTorch gives up after eight sizes, and runs eagerly what it cannot trace."""
    torch._dynamo.reset()
    shapes: list[tuple[int, ...]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        shapes.extend(tuple(each.shape) for each in inputs if each.dtype == torch.uint8)
        return graph.forward

    class Breaking(Network):
        def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
            torch._dynamo.graph_break()
            return super().forward(pixels)

    try:
        calls = by_torch_compile(Network(), DEVICE, tuple(range(1, 12)), backend)
        with torch.inference_mode():
            calls[11](torch.from_numpy(images(11)))
        assert shapes == [(size, 8, 6, 3) for size in range(11, 0, -1)]
        with pytest.raises(EngineRefusedError, match="cannot compile this network"), compiling("Compiler", DEVICE):
            by_torch_compile(Breaking(), DEVICE, (1,), backend)
    finally:
        torch._dynamo.reset()


class TestOnnxRuntime:
    @pytest.mark.parametrize(
        "facts",
        [facts for facts in vendors.ACCELERATORS if "onnxruntime" in facts.by_name],
        ids=lambda facts: facts.name,
    )
    def test_a_build_without_the_vendors_provider_is_refused_with_the_package_that_has_it(
        self, facts: Facts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        present = ["CPUExecutionProvider"]
        runtime: Any = ModuleType("onnxruntime")
        runtime.get_available_providers = lambda: present
        runtime.disable_telemetry_events = lambda: None
        runtime.SessionOptions = lambda: pytest.fail("a provider was found")
        for package in ("onnx", "onnxscript"):
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
        with pytest.raises(EngineRefusedError, match=f"no provider for {facts.title} here.*{facts.onnx[0][1]} has one"):
            OnnxRuntimeEngine(facts).compile(Network(), "cuda:0", "fp32", (1,), CompileOptions())
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        with pytest.raises(EngineRefusedError, match=f"pip install {facts.onnx[0][1]} onnx onnxscript"):
            OnnxRuntimeEngine(facts).compile(Network(), "cuda:0", "fp32", (1,), CompileOptions())


@pytest.mark.parametrize("backend", VENDORS, ids=lambda backend: backend.name)
def test_every_engine_of_a_backend_can_be_made_and_eager_is_the_last(backend: TorchBackend) -> None:
    engines = [engines_by_name()[name](backend.facts) for name in backend.facts.engines]
    assert tuple(engine.name for engine in engines) == backend.facts.engines
    assert backend.facts.engines[-2:] == ("graph", "eager")
    assert all(engine.precisions for engine in engines)
    assert [engine.takes for engine in engines[-2:]] == ["seconds", "seconds"]
    assert backend.facts.graph_class.endswith("Graph")


@pytest.mark.parametrize(
    ("engine", "package"),
    [(TensorRTEngine, "torch_tensorrt"), (TorchairEngine, "torchair"), (MIGraphXEngine, "torch_migraphx")],
)
def test_a_staged_start_waits_for_no_compiler_that_is_not_there(
    engine: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [engine(row("fp32")), GraphEngine(chip("fp32"))]
    for module, staged in ((None, False), (ModuleType(package), True)):
        monkeypatch.setitem(sys.modules, package, module)
        options = CompileOptions(quick=True)
        _, report = compile_first(engines, Network(), DEVICE, ("fp32",), SIZES, options=options)
        assert (report.engine, report.staged) == ("graph", staged)
        assert ("not installed" in report.refusals[engines[0].name]) is not staged


def test_a_batch_is_waited_for_asleep_where_the_vendors_events_can() -> None:
    """A spinning wait costs a core on which images are decoded."""
    executable = load(GraphEngine)
    MODULE.log.clear()
    executable.run(images(1))
    assert "an event to sleep for" in MODULE.log

    class OlderEvent(FakeEvent):
        def __init__(self) -> None:
            super().__init__()

    cast(Any, MODULE).Event = OlderEvent
    executable.run(images(1))
    assert "an event to spin for" in MODULE.log


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
            return code

        def unlock(address: int) -> int:
            log.append((address, -1))
            return 0

        if locks and locks != OLDER:
            holder = SimpleNamespace(**{locks.lock: lock, locks.unlock: unlock})
            setattr(MODULE, locks.runtime, lambda: holder)
        return log

    @pytest.mark.parametrize("locks", [vendors.NVIDIA.page_locks, PageLocks("acmert", "pin", "unpin", 0x10000000)])
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
            pytest.param(vendors.NVIDIA.page_locks, 0, [1, -1], id="locked, and PyTorch does not know it"),
        ],
    )
    def test_are_brought_together_where_no_memory_can_be_locked_for_pytorch(
        self, locks: PageLocks | None, code: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = self.lock_by(locks, code, monkeypatch)
        self.assert_answers_to_rows(load(GraphEngine))
        assert [by for _, by in log] == steps


def test_a_graph_copies_its_answers_itself_where_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda *_: True)
    executable = load(GraphEngine)
    monkeypatch.setattr("backends.engines.graph.copy_out", None)
    assert_answers(executable)


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


@pytest.mark.parametrize("faster", [torch.channels_last, torch.contiguous_format], ids=str)
def test_where_the_layout_is_measured_the_faster_one_is_taken(
    faster: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[bool] = []

    def batch_s(network: Any, size: int, device: str) -> float:
        timed.append(network.core.weight.is_contiguous(memory_format=faster))
        assert (size, device) == (4, DEVICE)
        return 0.001 if timed[-1] else 0.002

    monkeypatch.setattr("backends.engines.eager.batch_s", batch_s)
    network = Network()
    executable = GraphEngine(chip("fp32", channels_last=None)).compile(network, DEVICE, "fp32", SIZES, CompileOptions())
    assert sorted(timed) == [False, True]
    assert network.core.weight.is_contiguous(memory_format=faster)
    assert_answers(executable)
