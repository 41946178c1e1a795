"""Networks without their values: only shapes, for reading a file or for a device that computes nothing.

Must not know an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WithoutValues(TorchFunctionMode):
    """Mode that builds networks with weights on the meta device: shapes without the seconds for initial values."""

    _RANDOM = (Tensor.normal_, Tensor.uniform_, Tensor.erfinv_)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Only `empty`, from which layers make their weights: RegNet computes its widths with tensors of its own.
        if func is torch.empty:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        if func in self._RANDOM:
            return args[0]
        return func(*args, **(kwargs or {}))
