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
from backends.vendors.torch_device import CudaTypeBackend

log = logging.getLogger(__name__)


class CudaBackend(CudaTypeBackend):
    """Backend `cuda`: NVIDIA GPUs."""

    facts = vendors.NVIDIA

    def _not_installed(self) -> str:
        if reason := super()._not_installed():
            return reason
        # Others build torch so that it looks like NVIDIA's; what is NVIDIA's alone must not be asked of their devices.
        built = detect.Found(torch=str(torch.__version__), cuda=torch.version.cuda)
        vendor = detect.vendor_of_cuda(built, detect.system_evidence())
        return "" if vendor == "nvidia" else f"This torch or the device here is of {vendor}: choose --device {vendor}."

    def _vendors_decoder(self, target: str) -> ImageDecoder | None:
        return nvjpeg_decoder(target)

    def _tool_index(self, index: int) -> int | None:
        """Return NVML's number of a device, by its UUID: CUDA's differs if a variable hides or sorts devices."""
        try:
            import pynvml

            uuid = str(torch.cuda.get_device_properties(index).uuid)
            return {name.removeprefix("GPU-"): number for name, number in nvidia.uuids(pynvml).items()}[uuid]
        except Exception as error:  # NVML has its own kinds, and an older torch no UUID.
            log.debug("NVML does not know cuda:%d by its UUID: %s", index, error)
            return super()._tool_index(index)
