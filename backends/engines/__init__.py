"""How a network becomes an executable: one small file a compiler. Where it runs is the backend's business."""

from backends.engines.eager import EagerEngine
from backends.engines.engine import Engine, compile_first
from backends.engines.openvino import OpenVINOEngine

__all__ = ["EagerEngine", "Engine", "OpenVINOEngine", "compile_first"]
