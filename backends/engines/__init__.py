"""Engines, which make a network an executable: one file for each compiler. Backends choose the device."""

from collections.abc import Mapping, Sequence

from backends.contract.backend import Network, form_of
from backends.contract.errors import EngineRefusedError
from backends.engines.eager import EagerEngine as EagerEngine
from backends.engines.engine import Engine as Engine
from backends.engines.engine import compile_first as compile_first
from backends.engines.graph import GraphEngine
from backends.engines.migraphx import MIGraphXEngine
from backends.engines.onnxruntime import OnnxRuntimeEngine
from backends.engines.openvino import OpenVINOEngine
from backends.engines.tensorrt import TensorRTEngine
from backends.vendors.table import Facts

_KINDS: tuple[type[Engine], ...] = (
    EagerEngine,
    GraphEngine,
    MIGraphXEngine,
    OnnxRuntimeEngine,
    OpenVINOEngine,
    TensorRTEngine,
)
ENGINES: Mapping[str, type[Engine]] = {kind.name: kind for kind in _KINDS}
"""Engines of anychip by name, as in a vendor's row; a backend of another package may bring its own."""


def engines_of(
    facts: Facts, engine: str, network: Network, threads: int, own: Sequence[type[Engine]] = ()
) -> list[Engine]:
    """Return the engines for `--engine`, the best first; `own`: the backend's. Raises EngineRefusedError."""
    kinds = {**ENGINES, **{kind.name: kind for kind in own}}
    offered = (*facts.engines, *facts.by_name)
    if engine not in ("auto", *offered):
        raise EngineRefusedError(
            f"{facts.title or facts.vendor} has no engine {engine!r}; it has {' and '.join(offered)}."
        )
    # Few engines read ONNX files: for those `auto` means every one that does.
    others = tuple(name for name in facts.by_name if form_of(network) == "onnx" and "onnx" in kinds[name].forms)
    names = (*facts.engines, *others) if engine == "auto" else (engine,)
    return [kinds[name](facts, threads) for name in names]
