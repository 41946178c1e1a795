"""Moore Threads through torch_musa.

Owns: what is different about Moore Threads. Unverified on hardware.
"""

from __future__ import annotations

from typing import Any

import torch

from backends.backend import Facts
from backends.torch_device import TorchBackend


class MusaBackend(TorchBackend):
    """`musa`: Moore Threads devices."""

    name = "musa"
    facts = Facts(
        vendor="moorethreads",
        device_type="musa",
        engines=("graph", "eager"),
        precisions=("fp16", "fp32"),
        visibility_variable="MUSA_VISIBLE_DEVICES",
    )
    _title = "Moore Threads"
    _package = "torch_musa"
    _install = "install the vendor's wheel for your version of torch"
    _nodes = ("/dev/mtgpu.[0-9]*",)
    _static_shapes = True

    def _configure(self, module: Any) -> None:
        backends: Any = torch.backends  # torch_musa adds this one (its __init__.py).
        backends.mudnn.allow_tf32 = False  # fp32 means float32.
