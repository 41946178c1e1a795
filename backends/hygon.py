"""Hygon DCU through the vendor's build of torch (DTK, derived from ROCm), which answers to torch.cuda.

Owns: what differs from AMD. A container needs /opt/hyhal mounted: without it `import torch` fails. Unverified on
hardware.
"""

from __future__ import annotations

from dataclasses import replace

from backends.rocm import RocmBackend


class HygonBackend(RocmBackend):
    """`dcu`: Hygon DCUs. torch itself calls them cuda."""

    name = "dcu"
    facts = replace(RocmBackend.facts, vendor="hygon")
    _title = "Hygon"
    _vendor = "hygon"
    _install = "install the vendor's torch wheel for your DTK (developer.sourcefind.cn)"
    _nodes = ("/dev/mkfd", "/dev/kfd")
