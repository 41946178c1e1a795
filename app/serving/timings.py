"""How long a request took, stage by stage.

Owns: the sum over its images, and the Server-Timing header. Must not measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Timings:
    """Seconds of each stage; of several images, those of the slowest."""

    decode: float = 0.0
    queue: float = 0.0
    infer: float = 0.0
    postprocess: float = 0.0

    def header(self) -> str:
        """As the Server-Timing header: milliseconds of each stage."""
        return (
            f"decode;dur={self.decode * 1e3:.3f}, queue;dur={self.queue * 1e3:.3f}, "
            f"infer;dur={self.infer * 1e3:.3f}, post;dur={self.postprocess * 1e3:.3f}"
        )

    def include(self, seconds: Mapping[str, float]) -> None:
        """Take in another image's stages."""
        for stage, taken in seconds.items():
            setattr(self, stage, max(getattr(self, stage), taken))
