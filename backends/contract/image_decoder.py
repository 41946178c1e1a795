"""Decoding JPEG files on a device, where its vendor's libraries do that.

Owns: the contract, and NVIDIA's nvJPEG. Must not know the use of the pixels. The caller has looked at the files'
headers: app.images.passing chooses the kinds of JPEG for this module.

A device decodes at full size, turns nothing, and its pixels are not libjpeg's: nvJPEG repeats chroma where libjpeg
interpolates it, 0.4 to 1.6 grey levels on average and up to 87 (H100, torchvision 0.26). It may read files that libjpeg
does not, and the other way round; the host decodes files that it cannot read.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from backends.contract.errors import first_line, translated_errors

log = logging.getLogger(__name__)


class ImageDecoder(ABC):
    """Decoder of JPEG files on one device. Owned by the device's thread. `name`: for people."""

    name: str

    def __init__(self, device: str) -> None:
        """Use a device, by PyTorch's name of it."""
        self.device = torch.device(device)

    @abstractmethod
    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        """Decode JPEG files, uint8 [bytes] each on the host -> pixels as stored, uint8 [3, h, w] each on the device.

        All or none: raises BackendError if any of them cannot be decoded, and can still decode later ones;
        OutOfDeviceMemoryError, DeviceLostError.
        """


class NvjpegDecoder(ImageDecoder):
    """nvJPEG by torchvision's operator; its Python wrapper warns at every call since 0.29 (app.images.decoding)."""

    name = "nvJPEG"

    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        """Decode a list, in a third of the time of its files one by one."""
        with translated_errors(str(self.device)):
            return list(torch.ops.image.decode_jpegs_cuda(list(files), _RGB, self.device))


_RGB = 3
"""Value of torchvision.io.ImageReadMode.RGB."""


def nvjpeg_decoder(device: str) -> NvjpegDecoder | None:
    """Return the decoder, or None if torchvision is missing or too old; its first file shows if it has nvJPEG."""
    try:
        importlib.import_module("torchvision.io")
        has_operator = hasattr(torch.ops.image, "decode_jpegs_cuda")
    except Exception as error:  # A torchvision of another torch raises whatever it likes.
        log.info("nvJPEG is not to be had: %s", first_line(error))
        return None
    return NvjpegDecoder(device) if has_operator else None
