"""Memory that a process has mapped, and its own share of it."""

from __future__ import annotations

import re
from pathlib import Path


def libraries_of(pid: int) -> set[str]:
    """Return the files of torch, torchvision and their dependencies that a process has mapped."""
    found = re.findall(r"/site-packages/(.*\.so[.\d]*)$", Path(f"/proc/{pid}/maps").read_text(), re.M)
    return {each for each in found if re.match("torch|triton|nvidia", each)}


def own_mib(pid: int) -> float:
    """Return a process's share of all memory that it uses, in MiB."""
    kib = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    assert kib
    return int(kib[1]) / 1024
