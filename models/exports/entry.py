"""Form of an exported network's input: number and place of channels, and levels or floats.

Owns: this form, reading it from a shape, and bringing normalised pixels into it. Must not know files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CHANNELS = (3, 1)


@dataclass(frozen=True)
class Entry:
    """Form of an input. `channels`: 3, or 1 for grey images; `last`: [n, height, width, channels], as in TensorFlow;
    `levels`: numbers of 0 to 255 that the network itself normalises; `of_bytes`: as uint8, and not as floats; `bgr`:
    blue before green and red.
    """

    channels: int = 3
    last: bool = False
    levels: bool = False
    of_bytes: bool = False
    bgr: bool = False

    @property
    def said(self) -> str:
        """Deviations from the usual form, for a log; "" if there is none."""
        found = [
            "takes one channel, and images are made grey" if self.channels == 1 else "",
            "has its channels last" if self.last else "",
            "takes blue before green and red" if self.bgr else "",
            "is of levels (uint8), and mean and deviation are left to it" if self.levels else "",
        ]
        return f"its input {', '.join(filter(None, found))}" if any(found) else ""


USUAL = Entry()


def entry_of(shape: Sequence[int | str | None], is_bytes: bool) -> tuple[Entry, int | None, int | None] | None:
    """Return the form of an input of four axes, and its height and width, None if open; None if not of images.

    `is_bytes`: whether its type is uint8.
    """
    _, first, second, third = (each if isinstance(each, int) else None for each in shape)
    if first in _CHANNELS or (first is None and third not in _CHANNELS):
        return Entry(first or 3, levels=is_bytes), second, third
    return (Entry(third, last=True, levels=is_bytes), first, second) if third in _CHANNELS else None


def entered(entry: Entry, normalised: Tensor) -> Tensor:
    """Convert normalised pixels [n, 3, height, width], whose channels are equal in grey images, to the network's input.

    One image alone is [3, height, width], as for torchvision's detectors.
    """
    found = normalised[..., : entry.channels, :, :] if entry.channels < normalised.shape[-3] else normalised
    if entry.bgr:
        found = found.flip(-3)
    if entry.levels:
        found = found.round()
    if entry.last:
        found = found.permute(0, 2, 3, 1).contiguous()
    return found.clamp(0, 255).to(torch.uint8) if entry.of_bytes else found
