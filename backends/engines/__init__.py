"""How a network becomes an executable: one small file a compiler. Where it runs is the backend's business."""

from backends.engines.eager import EagerEngine
from backends.engines.engine import Engine, compile_first
from backends.engines.graph import GraphEngine
from backends.engines.migraphx import MIGraphXEngine
from backends.engines.openvino import OpenVINOEngine
from backends.engines.tensorrt import TensorRTEngine
from backends.engines.torchair import TorchairEngine

__all__ = [
    "EagerEngine",
    "Engine",
    "GraphEngine",
    "MIGraphXEngine",
    "OpenVINOEngine",
    "TensorRTEngine",
    "TorchairEngine",
    "compile_first",
]
