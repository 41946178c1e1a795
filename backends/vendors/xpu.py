"""Intel through torch.xpu.

Owns: Intel's switches. Unverified on hardware.
"""

from __future__ import annotations

from typing import Any

import torch

from backends.vendors import table as vendors
from backends.vendors.torch_device import TorchBackend


class XpuBackend(TorchBackend):
    """`xpu`: Intel GPUs."""

    facts = vendors.INTEL

    def _not_installed(self) -> str:
        built = getattr(torch.version, "xpu", None)
        return "" if built else f"This torch is not built for Intel GPUs: {self.facts.install}."

    def _configure(self, module: Any) -> None:
        onednn: Any = torch.backends.mkldnn
        if hasattr(onednn, "allow_tf32"):  # Newer than torch 2.5.
            onednn.allow_tf32 = False  # fp32 means float32.
