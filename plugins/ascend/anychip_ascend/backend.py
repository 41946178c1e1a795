"""Huawei Ascend through torch_npu, which needs a CPU build of torch; without it through CANN's pyACL alone.

Owns: the two rows and the choice between them, and the one switch that is a call (torch_npu 2.14.0, its name as in the
wheel). It replaces anychip's own `npu`, which has torch_npu alone. Unverified on hardware.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

from anychip_ascend.acl import card
from anychip_ascend.dvpp import DvppDecoder
from anychip_ascend.om import OmEngine
from anychip_ascend.torchair import TorchairEngine
from backends import detect
from backends.contract.errors import translated_errors
from backends.contract.image_decoder import ImageDecoder
from backends.vendors import table as vendors
from backends.vendors.torch_device import TorchBackend

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
    install="source CANN's set_env.sh, which makes pyACL importable; or install torch-npu beside a CPU build of torch",
    libraries=("libascend_hal.so", "libascendcl.so"),
    environment={},
    switches={},
    engines=("om",),
    by_name=(),
    precisions=("fp16", "fp32"),
    sample=None,
)


class AscendBackend(TorchBackend):
    """Backend `npu`: Ascend NPUs."""

    facts = BY_TORCH_NPU
    _engines = (OmEngine, TorchairEngine)

    def __init__(self) -> None:
        """Choose the row of the installed package."""
        alone = detect.installed("acl") and not detect.installed("torch_npu")
        super().__init__(BY_PYACL if alone else BY_TORCH_NPU)

    @property
    def _found(self) -> detect.Found:
        if self.facts is BY_TORCH_NPU:
            return super()._found
        return detect.found("anychip_ascend.acl:card", self.facts.device_type)

    def _module(self) -> Any:
        if self.facts is BY_TORCH_NPU:
            return super()._module()
        with translated_errors(self.facts.device_type):
            return card()

    def release_cache(self, device: str) -> int:
        """Release the cache, and pinned memory of the host that torch_npu keeps unused."""
        returned = super().release_cache(device)
        module = self._module()
        if hasattr(module, "host_empty_cache"):
            with translated_errors(self._torch_id(device)):
                module.host_empty_cache()
        return returned

    def _vendors_decoder(self, target: str) -> ImageDecoder | None:
        """Return DVPP's decoder if torch_npu is missing, else None."""
        if self.facts is BY_TORCH_NPU:
            return None
        with translated_errors(target):
            own = card()
            own.set_device(target)
        return DvppDecoder(target, own)

    def _has_bf16(self, module: Any) -> bool:
        # torch_npu's answer for 310B follows from the order of an enum (IsBF16Supported in NpuVariables.cpp).
        return super()._has_bf16(module) and not str(module.get_device_name()).startswith("Ascend310")

    def _configure(self, module: Any) -> None:
        super()._configure(module)
        if self.facts is not BY_TORCH_NPU:
            return
        try:
            module.set_compile_mode(jit_compile=False)  # Else 310P and 910A compile operators for every new shape.
        except AttributeError as error:  # As with switches: a newer package may have renamed it.
            log.warning("operators may be compiled for every new shape: %s", error)
        # Our own choice; torch_npu warns at every tensor that it would have laid out otherwise.
        warnings.filterwarnings("ignore", message="Cannot create tensor with internal format")
