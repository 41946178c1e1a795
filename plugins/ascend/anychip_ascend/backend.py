"""Huawei Ascend through torch_npu, which needs a CPU build of torch; without it through CANN's pyACL alone.

It replaces anychip's own `npu`, which has torch_npu alone. Unverified on hardware.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

from anychip_ascend.om import OmEngine
from anychip_ascend.torchair import TorchairEngine
from backends import detect
from backends.vendors import table as vendors
from backends.vendors.torch_device import DeviceHooks, TorchBackend

log = logging.getLogger(__name__)

_IN_CAPTURE = "cannot run aclop operators during npu graph capture"
_WRONG_INPUT = "the model was compiled for other inputs: remove it from the cache, or compile the file again"
BY_TORCH_NPU = replace(
    vendors.ASCEND,
    telemetry="anychip_ascend.smi",
    engines=("torchair", "graph", "eager"),
    by_name=("onnxruntime", "om"),  # The latter: CANN's own models, through pyACL.
    remedies={
        **vendors.ASCEND.remedies,
        # ACL's codes for a model's input (acl_base.h, ge_error_codes.h).
        **{f"error code is {code}": _WRONG_INPUT for code in (100017, 145006, 145011, 145012)},
        _IN_CAPTURE: f"{vendors.ASCEND.remedies[_IN_CAPTURE]} or torchair",
        "error code is 145013": "the model was compiled for other sizes of batches: compile it with --batch-sizes",
    },
)
# Cards that torch_npu supports in part or not at all, 310P and 310B: CANN alone.
BY_PYACL = replace(
    BY_TORCH_NPU,
    packages=("acl",),
    stand_in="anychip_ascend.acl:card",
    install="source CANN's set_env.sh, which makes pyACL importable; or install torch-npu beside a CPU build of torch",
    environment={},
    switches={},
    engines=("om",),
    by_name=(),
    precisions=("fp16", "fp32"),
    sample=None,
    machine=replace(vendors.ASCEND.machine, libraries=("libascend_hal.so", "libascendcl.so"), pairs=()),
)


class AscendHooks(DeviceHooks):
    """Steps of both rows."""

    engines = (OmEngine, TorchairEngine)

    def has_bf16(self, module: Any) -> bool:
        # torch_npu's answer for 310B follows from the order of an enum (IsBF16Supported in NpuVariables.cpp).
        return super().has_bf16(module) and not str(module.get_device_name()).startswith("Ascend310")


class TorchNpuHooks(AscendHooks):
    """Steps of torch_npu."""

    def set_up(self, module: Any) -> None:
        try:
            module.set_compile_mode(jit_compile=False)  # Else 310P and 910A compile operators for every new shape.
        except AttributeError as error:  # As with switches: a newer package may have renamed it.
            log.warning("operators may be compiled for every new shape: %s", error)
        # Our own choice; torch_npu warns at every tensor that it would have laid out otherwise.
        warnings.filterwarnings("ignore", message="Cannot create tensor with internal format")


class AscendBackend(TorchBackend):
    """Backend `npu`: Ascend NPUs."""

    def __init__(self) -> None:
        if detect.installed("acl") and not detect.installed("torch_npu"):
            super().__init__(BY_PYACL, AscendHooks())
        else:
            super().__init__(BY_TORCH_NPU, TorchNpuHooks())
