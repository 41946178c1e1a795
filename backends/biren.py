"""Biren through torch_supa (BR2xx) or torch_br (BR1xx).

Owns: what is different about Biren. Unverified on hardware.
"""

from __future__ import annotations

from backends import detect
from backends.backend import Facts
from backends.torch_device import TorchBackend


class BirenBackend(TorchBackend):
    """`supa`: Biren devices."""

    name = "supa"
    facts = Facts(
        vendor="biren",
        device_type="supa",
        engines=("graph", "eager"),
        precisions=("bf16", "fp16", "fp32"),
        visibility_variable="SUPA_VISIBLE_DEVICES",
    )
    _title = "Biren"
    _auto_precision = "bf16"
    # torch_br for BR1xx, torch_supa for BR2xx: the device type is the same. Neither is imported here.
    _package = "torch_br" if detect.installed("torch_br") else "torch_supa"
    _install = "install the vendor's wheel: torch_supa for BR2xx, torch_br for BR1xx"
    _nodes = ("/dev/biren/card_[0-9]*",)
    _static_shapes = True
