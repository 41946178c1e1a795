"""AMD through the ROCm build of torch, which answers to torch.cuda.

Owns: AMD's switches. MIOpen's find mode is stated: its documentation names two defaults. Its databases are in
`--cache-dir`, to be put on a volume. Unverified on hardware.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from backends.backend import Facts
from backends.torch_device import CudaTypeBackend


class RocmBackend(CudaTypeBackend):
    """`rocm`: AMD GPUs. torch itself calls them cuda."""

    name = "rocm"
    facts = Facts(
        vendor="amd",
        device_type="cuda",
        engines=("migraphx", "graph", "eager"),
        precisions=("fp16", "bf16", "fp32"),
        visibility_variable="HIP_VISIBLE_DEVICES",
        # What MIOpen finds out and compiles for a shape is worth keeping: minutes on some cards.
        environment={
            "MIOPEN_FIND_MODE": "FAST",
            "MIOPEN_USER_DB_PATH": "{cache}/miopen",
            "MIOPEN_CUSTOM_CACHE_DIR": "{cache}/miopen",
        },
    )
    _title = "AMD"
    _vendor = "amd"
    _install = "pip install torch from PyTorch's index for ROCm"
    _nodes: ClassVar[tuple[str, ...]] = ("/dev/kfd",)

    def _not_installed(self) -> str:
        return "" if torch.version.hip else f"This torch is not built for {self._title}: {self._install}."
