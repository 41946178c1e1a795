"""Decoder of JPEG on NVIDIA's cards by nvImageCodec: offered to nobody until a card has decoded by it.

Owns: this decoder, for the kit's question. Must not know what becomes of the pixels.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from backends.contract.backend import ImageDecoder
from backends.contract.errors import BackendError, translated_errors


class NvimgcodecDecoder(ImageDecoder):
    """Decoder by nvImageCodec 0.9, which uses the cards' JPEG engines and interpolates chroma like libjpeg.

    On the CPU, for tests, it is libjpeg-turbo. Raises ImportError if it is not installed.
    """

    name = "nvImageCodec"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._codec = codec = importlib.import_module("nvidia.nvimgcodec")
        on_host = self.device.type == "cpu"
        number = codec.NVIMGCODEC_DEVICE_CPU_ONLY if on_host else self.device.index or 0
        backends = [codec.Backend(codec.BackendKind.CPU_ONLY)] if on_host else None
        self._decoder = codec.Decoder(device_id=number, backends=backends, options=":fancy_upsampling=1")
        self._as_stored = codec.DecodeParams(
            apply_exif_orientation=False, color_spec=codec.ColorSpec.SRGB, sample_format=codec.SampleFormat.P_RGB
        )

    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        """Decode the files; a file that cannot be decoded raises BackendError for all."""
        on_host = self.device.type == "cpu"
        stream = 0 if on_host else torch.cuda.current_stream(self.device).cuda_stream
        with translated_errors(str(self.device)):
            streams = [self._codec.CodeStream(file.numpy()) for file in files]
            images = self._decoder.decode(streams, params=self._as_stored, cuda_stream=stream)
            if any(image is None for image in images):
                raise BackendError(f"nvImageCodec cannot decode {sum(image is None for image in images)} files")
            return [
                torch.from_numpy(np.asarray(image)) if on_host else torch.utils.dlpack.from_dlpack(image)
                for image in images
            ]
