"""Huawei Ascend through torch_npu, which wants a CPU build of torch.

Owns: Ascend's switches (torch_npu 2.14.0, names as in its wheel). Unverified on hardware.
"""

from __future__ import annotations

import warnings
from typing import Any

from backends.vendors import table as vendors
from backends.vendors.torch_device import TorchBackend


class AscendBackend(TorchBackend):
    """`npu`: Ascend NPUs."""

    facts = vendors.ASCEND

    def _configure(self, module: Any) -> None:
        module.set_compile_mode(jit_compile=False)  # Else 310P and 910A compile operators for every new shape.
        module.config.allow_internal_format = False  # Private layouts pad tensors and change answers.
        # Our own choice, of which torch_npu warns at every tensor that it would have laid out otherwise.
        warnings.filterwarnings("ignore", message="Cannot create tensor with internal format")
        module.conv.allow_hf32 = False  # fp32 means float32; torch_npu's default is True.
        module.matmul.allow_hf32 = False
