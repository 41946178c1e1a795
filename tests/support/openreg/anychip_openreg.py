"""A vendor's package for torch_openreg, PyTorch's own example of a device type outside torch (docs/new-backend.md)."""

from __future__ import annotations

from backends.vendors.table import Facts
from backends.vendors.torch_device import TorchBackend

OPENREG = Facts(
    name="openreg",
    vendor="openreg",
    title="OpenReg",
    device_type="openreg",
    packages=("openreg_properties",),  # It imports torch_openreg, which knows neither a name nor a size.
    install="install torch_openreg from PyTorch's sources",
    engines=("eager",),
    precisions=("fp32",),
    out_of_memory=("failed to allocate",),  # A plain RuntimeError there, torch.OutOfMemoryError elsewhere.
)

BACKEND = TorchBackend(OPENREG)
