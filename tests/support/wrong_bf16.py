"""Plugin for workers (`--plugins`): convolutions in bfloat16 are wrong by a fifth, as if a device's kernels were wrong
in that type. The precision gate must refuse it.
"""

from __future__ import annotations

import torch

_forward = torch.nn.Conv2d.forward


def _wrong(self: torch.nn.Conv2d, input: torch.Tensor) -> torch.Tensor:
    found = _forward(self, input)
    return found * 1.2 if input.dtype is torch.bfloat16 else found


torch.nn.Conv2d.forward = _wrong  # type: ignore[method-assign]
