"""Cambricon through torch_mlu.

Owns: what is different about Cambricon. Unverified on hardware.
"""

from __future__ import annotations

from typing import Any

import torch

from backends.backend import Facts
from backends.torch_device import TorchBackend


class CambriconBackend(TorchBackend):
    """`mlu`: Cambricon devices."""

    name = "mlu"
    facts = Facts(
        vendor="cambricon",
        device_type="mlu",
        engines=("graph", "eager"),
        precisions=("fp16", "bf16", "fp32"),
        visibility_variable="MLU_VISIBLE_DEVICES",
        environment={"PYTORCH_MLU_ALLOC_CONF": "expandable_segments:True"},  # The vendor's usual value.
    )
    _title = "Cambricon"
    _package = "torch_mlu"
    _install = "install the vendor's wheel for your version of torch; it is on no public index"
    _nodes = ("/dev/cambricon_dev[0-9]*",)
    _static_shapes = True

    def _configure(self, module: Any) -> None:
        backends: Any = torch.backends  # torch_mlu adds these (its backends/__init__.py).
        backends.cnnl.allow_tf32 = False  # fp32 means float32; its default is True.
        backends.mlu.matmul.allow_tf32 = False
