"""ONNX Runtime, on the CPU or through an accelerator's execution provider.

One session with a free batch dimension serves every batch size: a session a size would hold the weights as often.
"""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from anychip_base.extras import how_to_install
from backends.contract.backend import Array, CompileOptions, Executable, Network, Pixels, TensorNetwork, form_of
from backends.contract.errors import EngineRefusedError, first_line, not_converted
from backends.engines.engine import (
    DTYPES,
    Engine,
    imported,
    is_batched,
    kept_or_made,
    unpacking,
    version_of,
    without_prints,
)
from backends.vendors.table import Facts

# Operators that compute; the others move and shape.
_WORK = {
    "Conv",
    "ConvTranspose",
    "FusedConv",
    "QLinearConv",
    "Gemm",
    "FusedGemm",
    "MatMul",
    "FusedMatMul",
    "QLinearMatMul",
    "Einsum",
    "LSTM",
    "GRU",
    "Attention",
}
_PACKAGES = ("onnxruntime", "onnx", "onnxscript")
_BATCH: Mapping[int, str] = {0: "batch"}
_OPSET = 18  # The oldest that both exporters write without converting.


_EXACT = {
    "CUDAExecutionProvider": {"use_tf32": "0"},
    "CANNExecutionProvider": {"precision_mode": "must_keep_origin_dtype"},
}
"""Without these, providers compute float32 in TF32 or float16 (onnxruntime.ai). CANN's has not been seen on a card."""


class OnnxRuntimeEngine(Engine):
    """ONNX Runtime. fp16 only pays with an accelerator's provider: the CPU's has no half-precision convolutions."""

    name = "onnxruntime"
    forms = ("pixels", "onnx")

    def __init__(self, facts: Facts, threads: int = 1) -> None:
        self.offers = ("fp32",) if facts.device_type == "cpu" else ("fp32", "fp16")
        super().__init__(facts, threads)

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        runtime = _runtime(self._facts)
        provider = _provider(runtime, self._facts)
        packed = cast(TensorNetwork, network) if form_of(network) == "onnx" else None
        if packed is not None and precision != "fp32":
            raise EngineRefusedError("an ONNX file keeps its own types: choose fp32, which leaves them as they are")
        exported: str | bytes = packed.file if packed else self._file(network, precision, batch_sizes[-1], options)
        settings = runtime.SessionOptions()
        settings.intra_op_num_threads = self._threads
        settings.inter_op_num_threads = 1
        # Waiting threads would hold the cores on which images are decoded and answers written.
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        settings.log_severity_level = 3
        on_cpu = provider == "CPUExecutionProvider"
        given = {"device_id": str(torch.device(device).index or 0), **_EXACT.get(provider, {})}
        choice: Any = provider if on_cpu else (provider, given)
        session = _session(runtime, exported, settings, choice)
        if provider not in session.get_providers():
            raise EngineRefusedError(f"ONNX Runtime's {provider} does not start here; its log says why")
        if not on_cpu:
            _refuse_work_of_the_cpu(runtime, exported, settings, choice, batch_sizes[0])
        if packed is not None:
            return _OnnxRuntimeExecutable(device, batch_sizes, packed, session)
        if any(isinstance(output.shape[0], int) for output in session.get_outputs()):
            raise EngineRefusedError("the network is written for one batch size, and the export fixed it")
        return _OnnxRuntimeExecutable(device, batch_sizes, network, session)

    def _file(self, network: Network, precision: str, size: int, options: CompileOptions) -> bytes:

        def make() -> bytes:
            network.cast(DTYPES[precision])
            return _exported(network, size)

        def save(made: bytes, folder: Path) -> None:
            (folder / "network.onnx").write_bytes(made)

        parts = self.parts(network, precision, options)
        return kept_or_made(options, parts, make, save, lambda folder: (folder / "network.onnx").read_bytes())

    def version(self, precision: str) -> str:
        return str(_runtime(self._facts).__version__)

    def parts(self, network: Network, precision: str, options: CompileOptions, *more: object) -> Mapping[str, object]:
        exporters = [version_of(each, how_to_install("onnx")) for each in _PACKAGES[1:]]
        return super().parts(network, precision, options, torch.__version__, *exporters, precision, *more)


class _OnnxRuntimeExecutable(Executable):
    def __init__(self, device: str, batch_sizes: tuple[int, ...], network: Network, session: Any) -> None:
        super().__init__(device, batch_sizes, network.input_shape)
        self._session = session
        first = session.get_inputs()[0].name
        self._inputs = [(name or first, take) for name, take in unpacking(network)]
        self._batched = is_batched(network)

    def _execute(self, pixels: Pixels) -> tuple[Array, ...]:
        # The session wants what lies in one piece: of several inputs none does, when the batch is more than one.
        given = {name: np.asarray(take(pixels), order="C") for name, take in self._inputs}
        try:
            outputs = self._session.run(None, given)
        except Exception as error:
            # `translated_errors` reads this; the text says the kind.
            raise RuntimeError(str(error)) from error
        return tuple(outputs if self._batched else (np.asarray(output)[None] for output in outputs))

    def _release(self) -> None:
        self._session = None


def _runtime(facts: Facts) -> Any:
    package = _package(facts)
    # The extra has the plain package, which may not lie beside an accelerator's: they share one folder.
    remedy = how_to_install("onnx") if package == _PACKAGES[0] else f"pip install {package} {' '.join(_PACKAGES[1:])}"
    runtime, *_ = (imported(each, remedy) for each in _PACKAGES)
    runtime.disable_telemetry_events()  # Microsoft's builds for Windows report to Microsoft.
    return runtime


def _package(facts: Facts) -> str:
    return facts.onnx[-1][1] if facts.onnx else _PACKAGES[0]


def _provider(runtime: Any, facts: Facts) -> str:
    present = runtime.get_available_providers()
    for provider, _ in facts.onnx:
        if provider in present:
            return provider
    words = f"ONNX Runtime has no provider for {facts.title or facts.vendor} here: it has {', '.join(present)}"
    if not facts.onnx:
        raise EngineRefusedError(words)
    package = _package(facts)
    raise EngineRefusedError(
        f"{words}; {package} has one, in place of the package that is here: uninstall that, then pip install {package}"
    )


def _session(runtime: Any, exported: str | bytes, settings: Any, choice: Any) -> Any:
    try:
        return runtime.InferenceSession(exported, settings, providers=[choice])
    except Exception as error:  # Its own classes derive from nothing but Exception.
        raise EngineRefusedError(f"ONNX Runtime cannot load the network: {first_line(error)}") from error


def _refuse_work_of_the_cpu(runtime: Any, exported: str | bytes, settings: Any, choice: Any, size: int) -> None:
    """Refuse a network whose work the provider silently leaves to the CPU (onnxruntime#22229).

    Operators that compute shapes belong on the CPU. A batch of zeros is run under ONNX Runtime's profiler, which
    reports the place of each operator. Raises EngineRefusedError.
    """
    with tempfile.TemporaryDirectory(prefix="anychip-onnx-") as folder:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(Path(folder) / "profile")
        session = _session(runtime, exported, settings, choice)
        settings.enable_profiling = False
        types = {"tensor(float)": "float32", "tensor(double)": "float64"}
        given = {
            each.name: np.zeros(
                [part if isinstance(part, int) else size for part in each.shape],
                types.get(each.type, each.type.removeprefix("tensor(").removesuffix(")")),
            )
            for each in session.get_inputs()
        }
        try:
            session.run(None, given)
        except Exception as error:
            raise EngineRefusedError(f"ONNX Runtime cannot run the network: {first_line(error)}") from error
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    ran = [event["args"] for event in events if event.get("cat") == "Node" and "provider" in event.get("args", {})]
    on_cpu = sorted({each["op_name"] for each in ran if each["provider"] == "CPUExecutionProvider"} & _WORK)
    if on_cpu:
        share = sum(each["provider"] == "CPUExecutionProvider" for each in ran)
        raise EngineRefusedError(
            f"ONNX Runtime's {choice[0]} leaves {', '.join(on_cpu)} to the CPU ({share} of {len(ran)} operators)"
        )


def _exported(network: Network, size: int) -> bytes:
    # At least two: a size of one would be taken for a dimension that never changes.
    example = (torch.zeros((max(size, 2), *network.input_shape), dtype=torch.uint8),)
    module = cast(nn.Module, network)
    errors = []
    for export in (_by_export, exported_by_tracing):
        try:
            with torch.no_grad(), without_prints(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Both exporters warn of their own parts that PyTorch deprecates.
                return export(module, example)
        except Exception as error:
            errors.append(error)
    raise not_converted("PyTorch cannot export the network to ONNX", *errors) from errors[-1]


def _by_export(module: nn.Module, example: tuple[Any, ...]) -> bytes:
    batch = torch.export.Dim("batch", min=1)
    program = torch.onnx.export(
        module, example, dynamo=True, dynamic_shapes=({0: batch},), opset_version=_OPSET, verbose=False
    )
    if program is None:
        raise RuntimeError("the exporter gave no program")
    exported = bytes(program.model_proto.SerializeToString())
    # The exporter's own values live on after it (torch 2.14), and with them the weights.
    for value in program.model.graph.initializers.values():
        value.const_value = None
    return exported


def exported_by_tracing(
    module: nn.Module, example: tuple[Any, ...], name: str = "pixels", axes: Mapping[int, str] = _BATCH
) -> bytes:
    """Export an ONNX file of opset 17, the newest that CANN's atc reads; `axes`: those of the input that stay open."""
    file = io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The exporter warns of its own parts that PyTorch deprecates.
        # Else it prints the graph of a network that it cannot export: torch 2.14 passes over _jit_set_onnx_log_enabled.
        torch._C._jit_onnx_log = lambda *_: None
        torch.onnx.export(
            module,
            example,
            file,  # type: ignore[arg-type, unused-ignore]  # Older PyTorch says so, the newest only takes it.
            dynamo=False,
            input_names=[name],
            dynamic_axes={name: dict(axes)} if axes else None,
            opset_version=17,
        )
    return file.getvalue()
