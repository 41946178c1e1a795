"""Recorded error messages of vendors' software, which simulated devices repeat.

Owns: the messages, each with its source, and the functions of a device's module that raise them. Must not know
who calls these.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

RECORDED = {
    # vllm-ascend#2210: CANN 8.2 beside numpy 2.
    "set_device": (
        "SetPrecisionMode:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:155 NPU function error: "
        "at_npu::native::AclSetCompileopt(aclCompileOpt::ACL_PRECISION_MODE, precision_mode), error code is 500001\n"
        "[ERROR] ERR00100 PTA call acl api failed"
    ),
    # vllm-ascend#3960; the words are in torch_npu 2.12.0's library.
    "graph": (
        "Cannot run aclop operators during NPU graph capture. Current working aclop is Fill. If you need this call to "
        "be captured, please try to set torch.npu.config.allow_internal_format = False."
    ),
    # pytorch#159728, on Intel's client GPUs.
    "mem_get_info": (
        "The device (Intel(R) Graphics [0x64a0]) doesn't support querying the available free memory. You can file an "
        "issue at https://github.com/pytorch/pytorch/issues to help us prioritize its implementation."
    ),
}
"""Messages, by the function of the device's module that raises them as a RuntimeError."""


def fail(made: Any, name: str) -> None:
    """Let the module's function of this name, one of RECORDED, fail as recorded; do nothing if the module lacks it."""

    def failing(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(RECORDED[name])

    if hasattr(made, name):
        setattr(made, name, failing)


def make_sick(made: Any, sick: int, variable: str | None) -> None:
    """Let one device answer nothing; the words are ours.

    The other devices do not tell their properties either if the first that `variable` leaves visible is the sick one:
    torch_npu opens that first (NpuSysCtrl::Initialize).
    """
    properties, set_device = made.get_device_properties, made.set_device
    visible = [name.strip() for name in os.environ.get(variable or "", "").split(",") if name.strip()]

    def check(index: str) -> None:
        if (visible[int(index)] if int(index) < len(visible) else index) == str(sick):
            raise RuntimeError("the device does not answer: it is simulated as sick")

    def get_device_properties(device: Any = None) -> Any:
        check("0")
        check(str(device).rpartition(":")[2])
        return properties(device)

    def checked_set_device(device: Any) -> None:
        check(str(device).rpartition(":")[2])
        set_device(device)

    made.get_device_properties, made.set_device = get_device_properties, checked_set_device
