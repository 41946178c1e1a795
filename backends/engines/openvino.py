"""OpenVINO on CPUs: a batch runs as requests of one image each, on up to `threads` streams (docs/performance.md)."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from anychip_base.extras import how_to_install
from backends.contract.backend import (
    Array,
    CompileOptions,
    Executable,
    Network,
    Pixels,
    TensorNetwork,
    built,
    form_of,
)
from backends.contract.errors import (
    EngineRefusedError,
    NotConvertedError,
    first_line,
    not_converted,
    translated_errors,
)
from backends.engines.engine import (
    Engine,
    calibration_of,
    imported,
    is_batched,
    is_packed,
    kept_or_made,
    unpacking,
    version_of,
)

# int8: what is quantised says so in the network itself; the rest runs in bf16 where the CPU has it.
_HINTS = {"fp32": "f32", "bf16": "bf16", "int8": "bf16"}


class OpenVINOEngine(Engine):
    """OpenVINO. The compiled networks share the cores that it may use."""

    name = "openvino"
    offers = tuple(_HINTS)
    forms = ("pixels", "onnx", "program", "script", "openvino")
    only_reads = True
    keeps_int8 = True

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        openvino = imported("openvino", how_to_install("cpu"))
        for tensor in cast(TensorNetwork, network).inputs if is_packed(network) else ():
            if (tensor.dtype.itemsize == 8 or tensor.dtype == np.uint32) and tensor.limits is None:
                raise EngineRefusedError(f"it computes {tensor.dtype} in 32 bits: state the range of {tensor.name!r}")
        core = openvino.Core()
        able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if precision == "bf16" and "BF16" not in able:
            raise EngineRefusedError("OpenVINO has no bf16 kernels for this CPU")
        hint = _HINTS[precision] if "BF16" in able else "f32"
        parts = self.parts(network, precision, options)
        model = _model(core, network, options, parts, in_int8=precision == "int8")
        stream_counts = {size: min(size, self._threads) for size in batch_sizes}
        counts = sorted(set(stream_counts.values()))

        def compiled_for(streams: int) -> Any:
            hints = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": self._threads, "NUM_STREAMS": streams}
            if precision == "fp32":  # Else activations before weights of 4 or 8 bits get 8 bits.
                hints["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
            return core.compile_model(model, "CPU", hints)

        with translated_errors(device), ThreadPoolExecutor(len(counts)) as pool:  # Each keeps one core busy.
            compiled = dict(zip(counts, pool.map(compiled_for, counts), strict=True))
            by_size = {size: compiled[streams] for size, streams in stream_counts.items()}
            return _OpenVINOExecutable(device, network, by_size)

    def version(self, precision: str) -> str:
        import openvino

        return str(openvino.__version__)

    def parts(self, network: Network, precision: str, options: CompileOptions, *more: object) -> Mapping[str, object]:
        nncf = version_of("nncf", how_to_install("cpu")) if precision == "int8" else ""
        return super().parts(network, precision, options, nncf, *more)


class _OpenVINOExecutable(Executable):
    def __init__(
        self,
        device: str,
        network: Network,
        compiled: dict[int, Any],  # batch size -> compiled network, shared by sizes of as many streams
    ) -> None:
        from openvino import Tensor

        super().__init__(device, tuple(compiled), network.input_shape)
        self._inputs = [take for _, take in unpacking(network)]
        axes = int(is_batched(network))
        self._tensor = Tensor
        ports = compiled[self.batch_sizes[0]].outputs
        # Requests write side by side into these, so that no output is copied.
        self._outputs: tuple[Array, ...] = tuple(
            np.empty((self.batch_sizes[-1], *list(port.shape)[axes:]), port.element_type.to_dtype()) for port in ports
        )
        self._requests: dict[int, list[Any]] = {}
        shared: dict[int, list[Any]] = {}
        for size, compiled_for in compiled.items():
            requests = shared.setdefault(id(compiled_for), [])
            for row in range(len(requests), size):
                request = compiled_for.create_infer_request()
                for index, (output, port) in enumerate(zip(self._outputs, ports, strict=True)):
                    target = output[row : row + 1].reshape(list(port.shape))
                    request.set_output_tensor(index, Tensor(target, shared_memory=True))
                requests.append(request)
            self._requests[size] = requests[:size]

    def _execute(self, pixels: Pixels) -> tuple[Array, ...]:
        requests = self._requests[len(pixels)]
        started: list[Any] = []
        try:
            for row, request in enumerate(requests):
                for index, take in enumerate(self._inputs):
                    request.set_input_tensor(index, self._tensor(take(pixels[row : row + 1]), shared_memory=True))
                request.start_async()
                started.append(request)
        finally:
            _wait(started)
        return tuple(output[: len(pixels)] for output in self._outputs)

    def _release(self) -> None:
        self._requests = {}
        self._outputs = ()


def _wait(requests: list[Any]) -> None:
    """Wait for all, then raise the first failure: none may still read the pixels when `run` returns."""
    failure: RuntimeError | None = None
    for request in requests:
        try:
            request.wait()
        except RuntimeError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _model(core: Any, network: Network, options: CompileOptions, parts: Mapping[str, object], *, in_int8: bool) -> Any:
    import openvino

    calibration = calibration_of(options) if in_int8 else None
    if form_of(network) == "onnx":  # Read as fast as it would be from the cache, with whatever lies beside it.
        try:
            model = core.read_model(cast(TensorNetwork, network).file)
            model.reshape({name: list(array.shape) for name, array in _one_item(network)})
        except Exception as error:
            raise not_converted("OpenVINO cannot read the network", error) from error
        return _of_one_item(model, network)

    def make() -> Any:
        model = _converted(core, built(network))
        return model if calibration is None else _quantised(model, calibration())

    def save(model: Any, folder: Path) -> None:
        openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)

    return kept_or_made(options, parts, make, save, lambda folder: core.read_model(folder / "model.xml"))


def _quantised(model: Any, pixels: Pixels) -> Any:
    # Before the first import: NNCF reports its use to Google Analytics unless it thinks that it is being tested.
    os.environ.setdefault("NNCF_CI", "1")
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import nncf

            nncf.set_log_level(logging.ERROR)
            images = [pixels[row : row + 1] for row in range(len(pixels))]
            return nncf.quantize(
                model,
                nncf.Dataset(images),
                preset=nncf.QuantizationPreset.MIXED,  # SiLU's range is not symmetric.
                subset_size=len(images),
            )
    except Exception as error:
        raise EngineRefusedError(f"NNCF cannot quantise the network: {first_line(error)}") from error


def _converted(core: Any, network: Network) -> Any:
    inputs = tuple(torch.from_numpy(array) for _, array in _one_item(network))
    module: Any = cast(TensorNetwork, network).core if is_packed(network) else network
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch deprecates the tracer that OpenVINO uses.
            model = _around_file(core, module, inputs) if form_of(network) == "openvino" else _traced(module, inputs)
    except Exception as error:
        raise not_converted("OpenVINO cannot convert the network", error) from error
    return _of_one_item(model, network)


class _Part(nn.Module):
    """Part of a network, in a form that can be traced."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self._compute = (compute,)  # Not as itself: tracing would try to read it.

    def forward(self, *tensors: Tensor) -> Any:
        return self._compute[0](*tensors)


def _around_file(core: Any, module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    from openvino import Model

    runtime: Any = next(each for each in module.modules() if hasattr(each, "openvino_file"))
    computes = runtime.forward
    seen: list[tuple[Tensor, tuple[Tensor, ...]]] = []

    def with_runtime(forward: Callable[[Tensor], Any], tensors: Sequence[Tensor]) -> Any:
        runtime.forward = forward
        try:
            return module(*tensors)
        finally:
            runtime.forward = computes

    def once(tensor: Tensor) -> tuple[Tensor, ...]:
        seen.append((tensor, computes(tensor)))
        return seen[0][1]

    def before(*tensors: Tensor) -> Tensor:
        reached: list[Tensor] = []

        def note(tensor: Tensor) -> tuple[Tensor, ...]:
            reached.append(tensor)
            return outputs

        with_runtime(note, tensors)
        return reached[0]

    with_runtime(once, inputs)
    [(taken, outputs)] = seen
    first = _traced(_Part(before), inputs)
    last = _traced(_Part(lambda *given: with_runtime(lambda _: given, inputs)), outputs)
    model = core.read_model(runtime.openvino_file)
    [entry] = model.inputs
    model.reshape({entry: list(taken.shape)})
    _joined(first.outputs, model.inputs)
    _joined(model.outputs, last.inputs)
    return Model(last.get_results(), first.get_parameters(), "joined")


def _joined(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    from openvino import opset8

    for output, taken in zip(outputs, inputs, strict=True):
        source = output.get_node().input_value(0)
        if source.get_element_type() != taken.get_element_type():
            source = opset8.convert(source, taken.get_element_type().get_type_name()).output(0)
        taken.get_node().output(0).replace(source)


def _traced(module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """Convert a PyTorch module to an OpenVINO model of the inputs' shapes.

    This uses the frontend, not `openvino.convert_model`, which reports every use to Google Analytics unless a file in
    the home directory says no (openvino_telemetry).
    """
    from openvino import PartialShape, Type
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    # PyTorch never forgets what it has traced: to compare, it would trace and run the network again.
    once = {"check_trace": False}
    decoder = TorchScriptPythonDecoder(module, example_input=tuple(inputs), trace_kwargs=once)
    frontend = FrontEndManager().load_by_framework("pytorch")
    model = frontend.convert(frontend.load(decoder))
    for port, tensor in zip(model.inputs, inputs, strict=True):
        port.get_node().set_element_type(Type(tensor.numpy().dtype))
        port.get_node().set_partial_shape(PartialShape(list(tensor.shape)))
    model.validate_nodes_and_infer_types()
    return model


def _one_item(network: Network) -> list[tuple[str, Array]]:
    item = np.zeros((1, *network.input_shape), np.uint8)
    return [(name, np.asarray(take(item), order="C")) for name, take in unpacking(network)]


def _of_one_item(model: Any, network: Network) -> Any:
    if any(port.partial_shape.is_dynamic for port in model.outputs):
        raise NotConvertedError("how long its outputs are shows only when it has run")
    if is_batched(network) and any(list(port.shape)[:1] != [1] for port in model.outputs):
        raise NotConvertedError(f"it answers one item with {[list(port.shape) for port in model.outputs]}")
    return model
