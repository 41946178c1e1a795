"""NVIDIA through torch.cuda.

Owns: NVIDIA's switches. TF32 is stated, and cuDNN's plan cache bounded: by default it keeps 10,000 plans a thread
(pytorch#104701).
"""

from __future__ import annotations

from typing import Any

import torch

from backends import detect
from backends.backend import Facts
from backends.torch_device import CudaTypeBackend


class CudaBackend(CudaTypeBackend):
    """`cuda`: NVIDIA GPUs."""

    name = "cuda"
    facts = Facts(
        vendor="nvidia",
        device_type="cuda",
        engines=("tensorrt", "graph", "eager"),
        by_name=("inductor", "onnxruntime", "torchscript"),
        precisions=("fp16", "bf16", "int8", "fp32"),
        visibility_variable="CUDA_VISIBLE_DEVICES",
        environment={"TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT": "256"},
    )
    _title = "NVIDIA"
    _vendor = "nvidia"
    _install = "pip install torch from PyTorch's index for CUDA"
    _nodes = ("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/nvmap", "/dev/dxg")  # nvmap: Jetson; dxg: WSL

    def _not_installed(self) -> str:
        if not torch.version.cuda:
            return f"This torch is not built for CUDA: {self._install}."
        # Others build torch so that it looks like NVIDIA's; what is NVIDIA's alone must not be asked of their devices.
        built = detect.Found(torch=str(torch.__version__), cuda=torch.version.cuda)
        vendor = detect.vendor_of_cuda(built, detect.signs())
        return "" if vendor == "nvidia" else f"This torch or the device here is of {vendor}, which has no backend yet."

    def _configure(self, module: Any) -> None:
        # fp32 means float32: precisions that round more are chosen by name.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
