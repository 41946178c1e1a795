"""Intel through torch.xpu.

Owns: what is different about Intel. Unverified on hardware.
"""

from __future__ import annotations

from typing import Any

import torch

from backends.backend import Facts
from backends.torch_device import TorchBackend


class XpuBackend(TorchBackend):
    """`xpu`: Intel devices."""

    name = "xpu"
    facts = Facts(
        vendor="intel",
        device_type="xpu",
        engines=("graph", "eager"),
        precisions=("fp16", "bf16", "fp32"),
        visibility_variable="ZE_AFFINITY_MASK",
    )
    _title = "Intel"
    _install = "pip install torch from PyTorch's index for XPU"
    _nodes = ("/dev/dri/renderD*",)

    def _not_installed(self) -> str:
        return (
            "" if getattr(torch.version, "xpu", None) else f"This torch is not built for Intel GPUs: {self._install}."
        )

    def _configure(self, module: Any) -> None:
        onednn: Any = torch.backends.mkldnn
        if hasattr(onednn, "allow_tf32"):  # Newer than torch 2.5.
            onednn.allow_tf32 = False  # fp32 means float32.
