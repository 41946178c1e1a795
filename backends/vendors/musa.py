"""Moore Threads through torch_musa.

Owns: Moore Threads' switches. Unverified on hardware.
"""

from __future__ import annotations

from typing import Any

import torch

from backends.vendors import table as vendors
from backends.vendors.torch_device import TorchBackend


class MusaBackend(TorchBackend):
    """`musa`: Moore Threads GPUs."""

    facts = vendors.MOORE_THREADS

    def _configure(self, module: Any) -> None:
        backends: Any = torch.backends  # torch_musa adds this one (its __init__.py).
        backends.mudnn.allow_tf32 = False  # fp32 means float32.
