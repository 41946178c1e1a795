"""torch.cuda and those who answer to it: NVIDIA with its decoder, and the test that tells it from others.

nvJPEG's pixels are not libjpeg's: it repeats chroma where libjpeg interpolates it, 0.4 to 1.6 grey levels on average
and up to 87 (H100, torchvision 0.26). It may read files that libjpeg does not, and the other way round.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from backends import detect
from backends.contract.backend import ImageDecoder
from backends.contract.errors import first_line, translated_errors
from backends.telemetry import nvidia
from backends.vendors import table as vendors
from backends.vendors.torch_device import DeviceHooks, TorchBackend

log = logging.getLogger(__name__)


class CudaTypeBackend(TorchBackend):
    """Backend of a vendor that answers to torch.cuda."""

    def _mistaken(self, answer: detect.Found) -> str:
        vendor = detect.vendor_of_cuda(answer, detect.system_evidence())
        if not answer.devices or vendor == self.facts.vendor:
            return ""
        if vendor.startswith("shim:"):
            return f"torch.cuda is a disguise of {vendor[5:]} here: choose --device {vendor[5:]}."
        return f"torch.cuda answers here, but the device is not of {self.facts.title}: it is {vendor}'s."

    def _not_installed(self) -> str:
        reason = super()._not_installed()
        if reason or self.facts is not vendors.NVIDIA:
            return reason
        # Others build torch so that it looks like NVIDIA's; what is NVIDIA's alone must not be asked of their devices.
        built = detect.Found(torch=str(torch.__version__), cuda=torch.version.cuda)
        vendor = detect.vendor_of_cuda(built, detect.system_evidence())
        return "" if vendor == "nvidia" else f"This torch or the device here is of {vendor}: choose --device {vendor}."


class CudaHooks(DeviceHooks):
    """NVIDIA's decoder and numbers of devices."""

    def image_decoder(self, device: str) -> ImageDecoder | None:
        """Return nvJPEG's decoder, or None if torchvision is missing or too old.

        Only the first file that it decodes shows whether this build of torchvision has nvJPEG.
        """
        try:
            importlib.import_module("torchvision.io")
            has_operator = hasattr(torch.ops.image, "decode_jpegs_cuda")
        except Exception as error:  # A torchvision of another torch raises whatever it likes.
            log.info("nvJPEG cannot be used: %s", first_line(error))
            return None
        return NvjpegDecoder(device) if has_operator else None

    def tool_index(self, index: int, visible: int | None) -> int | None:
        """Return NVML's number of a device, by its UUID; `visible` if NVML does not know it.

        CUDA numbers devices otherwise if CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER is set.
        """
        try:
            import pynvml

            uuid = str(torch.cuda.get_device_properties(index).uuid)
            return {name.removeprefix("GPU-"): number for name, number in nvidia.uuids(pynvml).items()}[uuid]
        except Exception as error:  # pynvml raises its own exceptions, and an older torch has no UUID.
            log.debug("NVML does not know cuda:%d by its UUID: %s", index, error)
            return visible


class NvjpegDecoder(ImageDecoder):
    """nvJPEG by torchvision's operator; its Python wrapper warns at every call since 0.29 (app.images.decoding)."""

    name = "nvJPEG"

    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        """Decode a list, in a third of the time of its files one by one."""
        with translated_errors(str(self.device)):
            return list(torch.ops.image.decode_jpegs_cuda(list(files), _RGB, self.device))


_RGB = 3
"""Value of torchvision.io.ImageReadMode.RGB."""
