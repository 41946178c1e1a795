"""Huawei Ascend through torch_npu, which wants a CPU build of torch.

Owns: Ascend's switches (torch_npu 2.14.0, names as in its wheel). Unverified on hardware.
"""

from __future__ import annotations

from typing import Any

from backends.backend import Facts
from backends.torch_device import TorchBackend


class AscendBackend(TorchBackend):
    """`npu`: Ascend NPUs."""

    name = "npu"
    facts = Facts(
        vendor="ascend",
        device_type="npu",
        engines=("torchair", "graph", "eager"),
        precisions=("fp16", "bf16", "fp32"),
        # Its numbers must ascend, else the driver sees no device.
        visibility_variable="ASCEND_RT_VISIBLE_DEVICES",
        environment={
            # Against fragmentation; needs HDK 23.0.0 (of 2023). For an older one, set the variable yourself.
            "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
            # Executors kept on the host, one for each operator and shape; the default is 10000.
            "ACLNN_CACHE_LIMIT": "2000",
            # Where operators are compiled after all (310P, 910A), they are kept.
            "ACL_OP_COMPILER_CACHE_MODE": "enable",
            "ACL_OP_COMPILER_CACHE_DIR": "{cache}/ascend",
        },
    )
    _title = "Ascend"
    _package = "torch_npu"
    _install = "pip install torch-npu of the version of torch (anychip[ascend]), beside a CPU build of torch and CANN"
    _nodes = ("/dev/davinci[0-9]*",)
    _static_shapes = True
    _channels_last = False  # torch_npu refuses contiguous(memory_format=channels_last).

    def _configure(self, module: Any) -> None:
        module.set_compile_mode(jit_compile=False)  # Else 310P and 910A compile operators for every new shape.
        module.config.allow_internal_format = False  # Private layouts pad tensors and change answers.
        module.conv.allow_hf32 = False  # fp32 means float32; torch_npu's default is True.
        module.matmul.allow_hf32 = False
