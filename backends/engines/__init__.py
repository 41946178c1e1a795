"""How a network becomes an executable: one file for each compiler. Where it runs is the backend's business."""

from backends.engines.eager import EagerEngine
from backends.engines.engine import Engine, compile_first
from backends.engines.graph import GraphEngine
from backends.engines.inductor import InductorEngine
from backends.engines.migraphx import MIGraphXEngine
from backends.engines.onnxruntime import OnnxRuntimeEngine
from backends.engines.openvino import OpenVINOEngine
from backends.engines.tensorrt import TensorRTEngine
from backends.engines.torchair import TorchairEngine
from backends.engines.torchscript import TorchScriptEngine

__all__ = [
    "EagerEngine",
    "Engine",
    "GraphEngine",
    "InductorEngine",
    "MIGraphXEngine",
    "OnnxRuntimeEngine",
    "OpenVINOEngine",
    "TensorRTEngine",
    "TorchScriptEngine",
    "TorchairEngine",
    "compile_first",
]
