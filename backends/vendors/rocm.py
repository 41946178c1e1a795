"""AMD through the ROCm build of torch, and Hygon through the vendor's build derived from it; both answer to torch.cuda.

Owns: how such a build is known. A container for Hygon needs /opt/hyhal mounted: without it `import torch` fails.
Unverified on hardware.
"""

from __future__ import annotations

import torch

from backends.vendors import table as vendors
from backends.vendors.torch_device import CudaTypeBackend


class RocmBackend(CudaTypeBackend):
    """`rocm`: AMD GPUs."""

    facts = vendors.AMD

    def _not_installed(self) -> str:
        return "" if torch.version.hip else f"This torch is not built for {self.facts.title}: {self.facts.install}."
