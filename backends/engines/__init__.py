"""How a network is made ready: one small file a compiler."""

from backends.engines.eager import EagerEngine
from backends.engines.engine import Engine
from backends.engines.openvino import OpenVINOEngine

__all__ = ["EagerEngine", "Engine", "OpenVINOEngine"]
