"""Cambricon through torch_mlu.

Owns: Cambricon's switches. Unverified on hardware.
"""

from __future__ import annotations

from typing import Any

import torch

from backends.vendors import table as vendors
from backends.vendors.torch_device import TorchBackend


class CambriconBackend(TorchBackend):
    """`mlu`: Cambricon MLUs."""

    facts = vendors.CAMBRICON

    def _configure(self, module: Any) -> None:
        backends: Any = torch.backends  # torch_mlu adds these (its backends/__init__.py).
        backends.cnnl.allow_tf32 = False  # fp32 means float32; its default is True.
        backends.mlu.matmul.allow_tf32 = False
