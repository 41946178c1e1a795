"""Versions of vendors' drivers and toolkits, read from files: nothing of the vendor's is imported or asked.

Must import nothing but the standard library: set-up and `anychip doctor` read this file by its path, without torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# ROCm 7.12 and newer is in a folder below /opt/rocm: AMD's RFC on TheRock's packages, and its image of ROCm 10.0.0.
_TOOLKITS: Mapping[str, tuple[str, ...]] = {
    "rocm": ("/opt/rocm/.info/version", "/opt/rocm/core/.info/version"),
    "dtk": ("/opt/dtk/.info/version",),
}
CANN_FOLDERS = tuple(
    f"/usr/local/Ascend/{each}" for each in ("cann", "ascend-toolkit/latest", "nnae/latest", "nnrt/latest")
)
# Files in CANN's folder, as Huawei's pages read them: of the toolkit, and of installations for inference alone. There
# may be only version.cfg, which begins `# version: 1.0` and says `runtime_running_version=[7.6.0.1.220:8.0.0]`: the
# runtime's version, then CANN's.
_CANN_FILES = (
    ("*/ascend_toolkit_install.info", r"(?m)^version=(\S+)"),
    ("*/ascend_nnrt_install.info", r"(?m)^version=(\S+)"),
    ("ascend_nnae_install.info", r"(?m)^version=(\S+)"),
    ("version.cfg", r"(?m)^runtime_running_version=\[[^:\]]*:([^\]]+)\]"),
)
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
    return _found((root / name.lstrip("/"), pattern) for name, pattern in files)


def toolkit_version(toolkit: str, root: Path = Path("/")) -> str:
    """Return the version of `cann`, `rocm` or `dtk` from its file; "" without one."""
    if toolkit == "cann":
        return _found(_cann_files(root))
    return driver_version(((file, r"([\d.]+)") for file in _TOOLKITS[toolkit]), root)


def _found(files: Iterable[tuple[Path, str]]) -> str:
    for file, pattern in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if found := re.search(pattern, text):
            return found[1]
    return ""


def _cann_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of the CANN whose set_env.sh was sourced, else of those in the usual places."""
    home = os.environ.get("ASCEND_HOME_PATH")
    for folder in [Path(home)] if home else [root / name.lstrip("/") for name in CANN_FOLDERS]:
        for name, pattern in _CANN_FILES:
            for file in sorted(folder.glob(name)):
                yield file, pattern


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
