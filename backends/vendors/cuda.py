"""NVIDIA through torch.cuda.

Owns: its decoder, its numbers of devices, and the test that tells its torch from others that look like it.
"""

from __future__ import annotations

import logging

import torch

from backends import detect
from backends.contract.image_decoder import ImageDecoder, nvjpeg_decoder
from backends.telemetry import nvidia
from backends.vendors import table as vendors
from backends.vendors.hooks import DeviceHooks
from backends.vendors.torch_device import CudaTypeBackend

log = logging.getLogger(__name__)


class CudaBackend(CudaTypeBackend):
    """Backend `cuda`: NVIDIA GPUs."""

    def __init__(self) -> None:
        super().__init__(vendors.NVIDIA, CudaHooks())

    def _not_installed(self) -> str:
        if reason := super()._not_installed():
            return reason
        # Others build torch so that it looks like NVIDIA's; what is NVIDIA's alone must not be asked of their devices.
        built = detect.Found(torch=str(torch.__version__), cuda=torch.version.cuda)
        vendor = detect.vendor_of_cuda(built, detect.system_evidence())
        return "" if vendor == "nvidia" else f"This torch or the device here is of {vendor}: choose --device {vendor}."


class CudaHooks(DeviceHooks):
    """NVIDIA's decoder and numbers of devices."""

    def image_decoder(self, device: str) -> ImageDecoder | None:
        return nvjpeg_decoder(device)

    def tool_index(self, index: int, visible: int | None) -> int | None:
        """Return NVML's number of a device, by its UUID: CUDA's differs if a variable hides or sorts devices."""
        try:
            import pynvml

            uuid = str(torch.cuda.get_device_properties(index).uuid)
            return {name.removeprefix("GPU-"): number for name, number in nvidia.uuids(pynvml).items()}[uuid]
        except Exception as error:  # NVML has its own kinds, and an older torch no UUID.
            log.debug("NVML does not know cuda:%d by its UUID: %s", index, error)
            return visible
