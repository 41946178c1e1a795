"""Older processor for the tests: `ANYCHIP_TEST_CPU=avx2 make test ARGS=tests/cpu`, or avx512, or bf16.

PyTorch and oneDNN obey variables. OpenVINO obeys none: a patch makes it report no bf16 kernels, like on
such a processor, and Linux's list of the processor's flags is read without the newer ones. Kernels of OpenVINO are
still the newest that this processor has: a test here proves only which engine refuses and which is chosen instead.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

# PyTorch's kernels, oneDNN's, and the beginnings of the flags that such a processor lacks.
LEVELS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "avx2": ("avx2", "AVX2", ("avx512", "avx_vnni", "amx")),
    "avx512": ("avx512", "AVX512_CORE", ("avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "amx")),
    "bf16": ("avx512", "AVX512_CORE_BF16", ("avx512_fp16", "amx")),
}


def set_variables(level: str) -> None:
    """Set the variables; call it before torch is imported."""
    os.environ["ATEN_CPU_CAPABILITY"], os.environ["ONEDNN_MAX_CPU_ISA"], _ = LEVELS[level]


def hide_kernels(level: str) -> None:
    """Hide the kernels from this process; its children have only the variables."""
    from backends import host

    lacking = LEVELS[level][2]
    all_flags = host.cpu_flags

    def cpu_flags(*root: Path) -> frozenset[str]:
        return all_flags(*root) if root else frozenset(each for each in all_flags() if not each.startswith(lacking))

    setattr(host, "cpu_flags", cpu_flags)  # noqa: B010 - Another signature than the type checker wants.
    if level != "bf16" and importlib.util.find_spec("openvino"):
        import openvino

        truth = openvino.Core.get_property

        def get_property(core: Any, *asked: Any) -> Any:
            found = truth(core, *asked)
            return [each for each in found if each != "BF16"] if asked[-1] == "OPTIMIZATION_CAPABILITIES" else found

        openvino.Core.get_property = get_property
