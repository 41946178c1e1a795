"""Model whose placing of an image fails like a broken decoder library: by the width of the image."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from torch import Tensor

from models import Placement
from models.classifiers import Classifier
from tests.support import escapes

CRASHES, HANGS, SLOW, ESCAPES, FORGES = 13, 17, 19, 23, 29
SLOW_S = 0.05


@dataclass(frozen=True)
class FaultyGeometry(Classifier):
    """Classifier with faults: width 13 ends its decoder, 17 never ends, 19 takes 50 ms.

    At width 23 its decoder tries to get out, and fails if it succeeds; at 29 it forges a line of the log, and
    at 61 a thousand.
    """

    def preprocess(self, image: Tensor, out: Tensor, width: int, height: int) -> Placement:
        if width == CRASHES:
            signal.raise_signal(signal.SIGSEGV)
        while width == HANGS:
            pass
        if width == ESCAPES:
            found = escapes.tried("/proc/version", "/dev/shm/anychip-escape")
            if set(found.values()) != {"refused"}:
                raise RuntimeError(f"the decoder got out: {found}")
            if grown := escapes.grown():
                raise RuntimeError(f"the decoder made memory larger: {grown}")
        if width == FORGES:
            escapes.forge_lines()
        if width == SLOW:
            time.sleep(SLOW_S)
        return super().preprocess(image, out, width, height)
