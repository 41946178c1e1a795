"""Versions of vendors' drivers and toolkits, read from files: nothing of the vendor's is imported or asked.

Must import nothing but the standard library: set-up and `anychip doctor` read this file by its path, without torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backends.vendors.table import Machine

CANN_OF_TORCH_NPU: Mapping[str, str] = {
    "2.12.0.post3": "9.1",
    "2.12.0.post2": "9.1",
    "2.12.0": "9.1",
    "2.11.0.post2": "9.1",
    "2.11.0": "9.1",
    "2.10.0.post6": "9.1",
    "2.10.0.post4": "9.1",
    "2.9.0.post8": "9.1",
    "2.9.0.post6": "9.1",
    "2.7.1.post10": "9.1",
    "2.7.1.post8": "9.1",
    "2.10.0": "9.0",
    "2.9.0.post2": "9.0",
    "2.8.0.post4": "9.0",
    "2.7.1.post4": "9.0",
    "2.9.0": "8.5",
    "2.8.0.post2": "8.5",
    "2.7.1.post2": "8.5",
    "2.6.0.post5": "8.5",
    "2.8.0": "8.3",
    "2.7.1": "8.3",
    "2.6.0.post3": "8.3",
    "2.6.0": "8.2",
    "2.5.1.post1": "8.2",
    "2.5.1": "8.1",
    "2.4.0.post4": "8.1",
}
"""Table torch_npu -> CANN, of each CANN the newest first: COMPATIBILITY.en.md of TorchNPU 26.1.1, and PyPI."""


def driver_version(files: Iterable[tuple[str, str]], root: Path = Path("/")) -> str:
    """Return the version of a driver from the first of these files that has it, by its pattern; "" without one."""
    for name, pattern in files:
        try:
            text = (root / name.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if found := re.search(pattern, text):
            return found[1]
    return ""


def toolkit_version(machine: Machine, root: Path = Path("/")) -> str:
    """Return the version of a vendor's toolkit in the folders of the environment, else in the usual ones; or ""."""
    named = [os.environ.get(each[1:], "") for each in machine.toolkit_folders if each.startswith("$")]
    usual = [root / each.lstrip("/") for each in machine.toolkit_folders if not each.startswith("$")]
    return version_in([*map(Path, filter(None, named)), *usual], machine)


def version_in(folders: Iterable[Path], machine: Machine) -> str:
    """Return the version of a vendor's toolkit from the first of these folders that tells it; "" without one."""
    return driver_version(
        (str(file.absolute()), pattern)
        for folder in folders
        for name, pattern in machine.toolkit_files
        for file in sorted(folder.glob(name))
    )


def cann_of(torch_npu: str) -> str:
    """Return the CANN that Huawei pairs with a torch_npu; for an unknown `.postN` its predecessor's, or ''."""
    if torch_npu in CANN_OF_TORCH_NPU:
        return CANN_OF_TORCH_NPU[torch_npu]
    base, post = _post(torch_npu)
    older = [known for known in CANN_OF_TORCH_NPU if _post(known)[0] == base and _post(known)[1] < post]
    return CANN_OF_TORCH_NPU[max(older, key=_post)] if older else ""


def _post(version: str) -> tuple[str, int]:
    base, _, number = version.partition(".post")
    return base, int(number) if number.isdigit() else 0
