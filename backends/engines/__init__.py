"""How a network becomes an executable: one small file a compiler. Where it runs is the backend's business."""

from backends.engines.eager import EagerEngine
from backends.engines.engine import Engine, compile_first
from backends.engines.inductor import InductorEngine
from backends.engines.onnxruntime import OnnxRuntimeEngine
from backends.engines.openvino import OpenVINOEngine
from backends.engines.torchscript import TorchScriptEngine

__all__ = [
    "EagerEngine",
    "Engine",
    "InductorEngine",
    "OnnxRuntimeEngine",
    "OpenVINOEngine",
    "TorchScriptEngine",
    "compile_first",
]
