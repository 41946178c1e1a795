"""Huawei Ascend through torch_npu, which wants a CPU build of torch; without it through CANN's pyACL alone.

Owns: which of the two, and the one switch that is a call (torch_npu 2.14.0, its name as in the wheel). Unverified on
hardware.
"""

from __future__ import annotations

import warnings
from typing import Any

from backends import detect
from backends.contract.backend import Device
from backends.contract.errors import translated_errors
from backends.contract.image_decoder import ImageDecoder
from backends.engines.acl import card
from backends.telemetry import ascend
from backends.telemetry.tool import Tool, ToolError
from backends.vendors import table as vendors
from backends.vendors.dvpp import DvppDecoder
from backends.vendors.torch_device import TorchBackend


class AscendBackend(TorchBackend):
    """`npu`: Ascend NPUs."""

    facts = vendors.ASCEND

    def __init__(self) -> None:
        """The row is that of what is installed."""
        alone = detect.installed(vendors.ASCEND.without_torch) and not any(
            map(detect.installed, vendors.ASCEND.packages)
        )
        super().__init__(vendors.ASCEND_WITHOUT_TORCH if alone else vendors.ASCEND)

    def _module(self) -> Any:
        if self.facts is vendors.ASCEND:
            return super()._module()
        with translated_errors(self.facts.device_type):
            return card()

    def release_cache(self, device: str) -> int:
        """Also pinned memory of the host, of which torch_npu keeps what it does not use."""
        returned = super().release_cache(device)
        module = self._module()
        if hasattr(module, "host_empty_cache"):
            with translated_errors(self._torch_id(device)):
                module.host_empty_cache()
        return returned

    def _vendors_decoder(self, target: str) -> ImageDecoder | None:
        """DVPP's, without torch_npu."""
        if self.facts is vendors.ASCEND:
            return None
        with translated_errors(target):
            own = card()
            own.set_device(target)
        return DvppDecoder(target, own)

    def _pci_address(self, device: Device) -> str:
        """As npu-smi says: torch_npu has no such property. A failure of the tool is no address."""
        try:
            return ascend.pci_address(Tool(), int(device.id.partition(":")[2]))
        except ToolError:
            return ""

    def _has_bf16(self, module: Any) -> bool:
        # torch_npu's answer for 310B follows from the order of an enum (IsBF16Supported in NpuVariables.cpp).
        return super()._has_bf16(module) and not str(module.get_device_name()).startswith("Ascend310")

    def _configure(self, module: Any) -> None:
        super()._configure(module)
        if self.facts is not vendors.ASCEND:
            return
        module.set_compile_mode(jit_compile=False)  # Else 310P and 910A compile operators for every new shape.
        # Our own choice, of which torch_npu warns at every tensor that it would have laid out otherwise.
        warnings.filterwarnings("ignore", message="Cannot create tensor with internal format")
