"""Decoder of the simulated device: OpenCV's pixels, off by as much as the simulation says.

Owns: its error and its failures. A real decoder differs by its chroma; here it only matters that it is another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import torch
from torch import Tensor

from anychip_tools.simulated.behaviour import Simulation
from backends.contract.errors import translated_errors
from backends.contract.image_decoder import ImageDecoder

ALWAYS = 1
"""Value of `decode_error` for a decoder that decodes no file; other numbers are a width."""


class SimulatedDecoder(ImageDecoder):
    """Decoder of a device of this process."""

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
        if stored is None or self._simulation.decode_error in (ALWAYS, stored.shape[1]):
            raise RuntimeError("Failed to decode batch: 10")
        pixels = torch.from_numpy(cv2.cvtColor(stored, cv2.COLOR_BGR2RGB)).to(torch.int16)
        differing = (pixels + self._simulation.decode_off).clamp_(0, 255).to(torch.uint8)
        return differing.permute(2, 0, 1).contiguous().to(self.device)
