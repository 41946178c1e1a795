"""Entry point `anychip.simulation`: the functions that anychip calls for simulated devices, and their decoder.

Must not be imported where nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import torch
from torch import Tensor

from anychip_tools.behaviour import Simulation
from anychip_tools.null.backend import configure as configure_null
from anychip_tools.simulated import configure, configured
from anychip_tools.simulated.device import weigh
from backends.contract.backend import ImageDecoder
from backends.contract.errors import translated_errors

__all__ = ["configure", "configure_null", "image_decoder", "weigh"]

_ALWAYS = 1
"""Value of `decode_error` for a decoder that decodes no file; other numbers are a width."""


def image_decoder(device: str) -> ImageDecoder | None:
    """Return the JPEG decoder of a device; None if the simulation has none."""
    simulation, _ = configured()
    return _Decoder(device, simulation) if simulation.decode else None


class _Decoder(ImageDecoder):
    name = "a simulated decoder"

    def __init__(self, device: str, simulation: Simulation) -> None:
        super().__init__(device)
        self._simulation = simulation

    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        """Decode all files or, like nvJPEG, none where one is bad."""
        with translated_errors(str(self.device)):
            return [self._decoded(file) for file in files]

    def _decoded(self, file: Tensor) -> Tensor:
        stored = cv2.imdecode(file.numpy(), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
        if stored is None or self._simulation.decode_error in (_ALWAYS, stored.shape[1]):
            raise RuntimeError("Failed to decode batch: 10")
        pixels = torch.from_numpy(cv2.cvtColor(stored, cv2.COLOR_BGR2RGB)).to(torch.int16)
        differing = (pixels + self._simulation.decode_off).clamp_(0, 255).to(torch.uint8)
        return differing.permute(2, 0, 1).contiguous().to(self.device)
