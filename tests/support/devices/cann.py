"""Ascend's cards without torch_npu, over the double of pyACL: the device under test for device_contract.py.

Put tests/support/cann on PYTHONPATH, and its bin on PATH (tests.support.cann_double.variables).
"""

from __future__ import annotations

import acl  # type: ignore[import-not-found]

DEVICE_TYPE = "npu"
COUNT = 2
MEMORY_BYTES: int | None = 16 * 2**30


def kernels() -> int:
    return int(acl.counts["executions"])


def set_knob(name: str, value: int) -> None:
    """Set a knob, like tests.support.stubs.plugin. Copies are as late as can be, whatever `copy_us` says."""
    if name == "memory":
        acl.knobs["memory_mb"] = value >> 20
    elif name == "fail":
        acl.knobs["fail"] = {"*": value} if value else {}
