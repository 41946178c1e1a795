"""What a process has mapped, and how much of that is its own."""

from __future__ import annotations

import re
from pathlib import Path


def libraries_of(pid: int) -> set[str]:
    """Files of torch, torchvision and what comes with them that a process has mapped."""
    found = re.findall(r"/site-packages/(.*\.so[.\d]*)$", Path(f"/proc/{pid}/maps").read_text(), re.M)
    return {each for each in found if re.match("torch|triton|nvidia", each)}


def own_mib(pid: int) -> float:
    """Its share of all memory that it uses."""
    kib = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    assert kib
    return int(kib[1]) / 1024
