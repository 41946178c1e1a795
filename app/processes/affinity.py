"""Which cores and which memory are near a card, and how a process is bound to them.

Owns: what Linux says of a card's place (/sys), and the calls that bind. Must not import torch: app.cards does not.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # The system call's number: set_mempolicy(2), asm/unistd.h
_MPOL_PREFERRED = 1  # linux/mempolicy.h
_NODE_WORDS = 16


def near(pci: str, root: Path = Path("/")) -> tuple[tuple[tuple[int, ...], ...], int | None]:
    """The cores near a card that this process may use, by range, and their node of memory, None where it has none.

    `pci`: the card's address, in `lspci -D`'s form. Nothing where the system has no such card.
    """
    device = root / "sys/bus/pci/devices" / pci.lower()
    allowed = os.sched_getaffinity(0)
    ranges = []
    for part in filter(None, _text(device / "local_cpulist").split(",")):  # As in "0-15,128-143": Linux' cpulist
        first, _, last = part.partition("-")
        ranges.append(tuple(core for core in range(int(first), int(last or first) + 1) if core in allowed))
    node = _text(device / "numa_node")
    return tuple(filter(None, ranges)), int(node) if node.isdigit() else None


def settle(cores: Sequence[int], node: int | None) -> None:
    """Have this process, and all that it starts, run on these cores, and take its memory from a node while it has some.

    It ends with the process that started it. Nothing is done where `cores` is empty, or the system cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if cores:
        os.sched_setaffinity(0, cores)
    number = _SET_MEMPOLICY.get(platform.machine())
    if cores and node is not None and number is not None:
        mask = (ctypes.c_ulong * _NODE_WORDS)()
        mask[node // 64] = 1 << node % 64
        libc.syscall(number, _MPOL_PREFERRED, mask, 64 * _NODE_WORDS)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
