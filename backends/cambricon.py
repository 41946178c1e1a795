"""Cambricon through torch_mlu.

Owns: what is different about Cambricon. Unverified on hardware.
"""

from __future__ import annotations

from backends.backend import Facts
from backends.torch_device import TorchBackend


class CambriconBackend(TorchBackend):
    """`mlu`: Cambricon devices."""

    name = "mlu"
    facts = Facts(
        vendor="cambricon",
        device_type="mlu",
        engines=("eager",),
        precisions=("fp16", "fp32"),
        visibility_variable="MLU_VISIBLE_DEVICES",
    )
    _title = "Cambricon"
    _package = "torch_mlu"
    _install = "install the vendor's wheel for your version of torch; it is on no public index"
    _nodes = ("/dev/cambricon_dev[0-9]*",)
    _static_shapes = True
