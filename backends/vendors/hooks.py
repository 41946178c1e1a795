"""Steps of a vendor that its row of facts cannot express.

Owns: the hooks, each with a default. Must not know a vendor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.contract.image_decoder import ImageDecoder

if TYPE_CHECKING:
    from backends.engines.engine import Engine


class DeviceHooks:
    """Steps beside the row of a vendor of a PyTorch device type: override those that your devices need.

    `engines`: those in the row that anychip itself does not have. anychip calls the methods in the process that owns
    the device. `module`: the device's module of torch, such as torch.npu, or its stand-in. Errors of the vendor's
    software are translated.
    """

    engines: tuple[type[Engine], ...] = ()

    def set_up(self, module: Any) -> None:
        """Make the calls that set the vendor's software up, after the row's switches; the device is chosen."""

    def has_bf16(self, module: Any) -> bool:
        """Return True if the chip has bf16. A vendor's older chips lack it: 910A, 310P, MLU370 and before."""
        knows_bf16 = getattr(module, "is_bf16_supported", None)
        return knows_bf16 is None or bool(knows_bf16())

    def empty_host_cache(self, module: Any) -> None:
        """Give back pinned memory of the host that is kept and not used. For `cuda` and `xpu`, PyTorch itself does."""

    def image_decoder(self, device: str) -> ImageDecoder | None:
        """Return the vendor's decoder of JPEG on a device, by PyTorch's name of it; None without one."""
        return None

    def tool_index(self, index: int, visible: int | None) -> int | None:
        """Return the number in the vendor's tool of the device that torch calls `index`; None if unknown.

        `visible`: the number in the visibility variable, which hides devices from torch and not from the tools.
        """
        return visible
