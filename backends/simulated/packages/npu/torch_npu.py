"""Stands in for Huawei's torch_npu: a simulated Ascend NPU, where ANYCHIP_SIMULATE asks for it."""

from __future__ import annotations

import sys

from backends.simulated.device import install

npu = install("npu")
sys.modules["torch_npu.npu"] = npu
