"""Huawei Ascend through torch_npu, which wants a CPU build of torch.

Owns: the one switch that is a call (torch_npu 2.14.0, its name as in the wheel). Unverified on hardware.
"""

from __future__ import annotations

import warnings
from typing import Any

from backends.contract.backend import Device
from backends.telemetry import ascend
from backends.telemetry.tool import Tool, ToolError
from backends.vendors import table as vendors
from backends.vendors.torch_device import TorchBackend


class AscendBackend(TorchBackend):
    """`npu`: Ascend NPUs."""

    facts = vendors.ASCEND

    def pci_address(self, device: Device) -> str:
        """As npu-smi says: torch_npu has no such property. A failure of the tool is no address."""
        try:
            return ascend.pci_address(Tool(), int(device.id.partition(":")[2]))
        except ToolError:
            return ""

    def _configure(self, module: Any) -> None:
        super()._configure(module)
        module.set_compile_mode(jit_compile=False)  # Else 310P and 910A compile operators for every new shape.
        # Our own choice, of which torch_npu warns at every tensor that it would have laid out otherwise.
        warnings.filterwarnings("ignore", message="Cannot create tensor with internal format")
