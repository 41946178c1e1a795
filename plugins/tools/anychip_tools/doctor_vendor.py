"""Checks of `anychip doctor` on vendors' software: versions, variables, libraries, cards. None needs a working torch.

Must not import torch or a vendor's package: a child process tries what may not load.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from anychip_base.extras import version_of
from anychip_base.interpreter import python_command
from anychip_tools.compatibility import findings
from anychip_tools.facts import every_row, facts_module

Status = Literal["PASS", "WARN", "FAIL", "SKIP"]

_TIME_LIMIT_S = 20.0


@dataclass(frozen=True)
class Check:
    """Result of one check. `remedy`: what to do about a result that is not PASS."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def concerned(device: str) -> list[Any]:
    """Return the vendor that `device` names, else all that have a device file, package or build of torch here."""
    name = device.split(",", maxsplit=1)[0].partition(":")[0]
    every = every_row()
    named = [row for row in every.values() if name == row.name or name in row.aliases]
    if named:
        return named
    torch = versions().get("torch", "")
    return [
        row
        for row in every.values()
        if any(glob.glob(pattern) for pattern in row.device_files)
        or any(version_of(package) for package in row.packages)
        or any(tag in torch for tag in row.build_tags)
    ]


@cache
def versions() -> dict[str, str]:
    """Return the versions of packages, toolkits and drivers; leave out what is not here."""
    rows = every_row().values()
    paired = {name for row in rows for pair in row.machine.pairs for name in (pair.software, pair.other) if "_" in name}
    found = {package: version_of(package) for package in sorted({*facts_module("table").software(rows), *paired})}
    drivers = facts_module("drivers")
    found |= {f"driver:{row.vendor}": drivers.driver_version(row.machine.driver) for row in rows}
    found |= {row.machine.toolkit: drivers.toolkit_version(row.machine) for row in rows}
    build = re.search(r"\+cu(\d+)(\d)$", found["torch"])
    folder = importlib.util.find_spec("torch")
    if build:
        found["cuda"] = f"{build[1]}.{build[2]}"
    elif folder is not None and folder.origin:  # PyPI's builds have no tag; the file says it without an import.
        file = Path(folder.origin).parent / "version.py"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        match = re.search(r"^cuda[^=\n]*= '([\d.]+)'", text, re.MULTILINE)
        found["cuda"] = match[1] if match else ""
    return {name: version for name, version in found.items() if version}


def compatibility(device: str) -> Check:
    """Check that the versions here fit each other, and that a package of each vendor concerned is installed."""
    for row in concerned(device):
        # A toolkit may bring a package without saying its version, as CANN's acl.
        if row.packages and not any(version_of(each) or importlib.util.find_spec(each) for each in row.packages):
            missing = f"{' or '.join(row.packages)} is not installed, which {row.title} needs"
            return Check("compatibility", "FAIL", missing, row.install)
    found = findings(versions(), [pair for row in every_row().values() for pair in row.machine.pairs])
    verdicts: tuple[Status, ...] = ("FAIL", "WARN")
    for verdict in verdicts:
        if wrong := [each for each in found if each.verdict == verdict]:
            texts, remedies = ("; ".join(each) for each in zip(*((one.text, one.remedy) for one in wrong), strict=True))
            return Check("compatibility", verdict, texts, remedies)
    return Check("compatibility", "PASS", "; ".join(each.text for each in found) or "nothing that has to fit")


def variables(device: str, environment: Mapping[str, str]) -> Check:
    """Check for environment variables that contradict each other or name missing files."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = list(_contradictions(environment, cores))
    for row in concerned(device):
        name = row.visibility_variable
        if name and name in environment and not environment[name].strip():
            found.append((f"{name} is empty, which hides every device", f"unset {name}, or name devices in it"))
    status: Status = "FAIL" if found else "WARN"
    if not (found := found or list(_without_version(environment))):
        return Check("variables", "PASS", "none contradicts another")
    return Check("variables", status, "; ".join(text for text, _ in found), "; ".join(remedy for _, remedy in found))


def _without_version(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each variable of a folder in which no toolkit is known by its version, with the remedy."""
    machines = [row.machine for row in every_row().values() if row.machine.toolkit_files]
    for variable in sorted({each for machine in machines for each in machine.toolkit_folders if each.startswith("$")}):
        folder = environment.get(name := variable[1:], "")
        named = [machine for machine in machines if variable in machine.toolkit_folders]
        if folder and not any(facts_module("drivers").version_in([Path(folder)], machine) for machine in named):
            what = " or ".join(machine.toolkit for machine in named)
            yield f"{name}={folder} is a folder without a version of {what}", f"name the folder of {what} in {name}"


def _contradictions(environment: Mapping[str, str], cores: int) -> Iterator[tuple[str, str]]:
    """Yield each contradiction with its remedy. Sources: docs/hardware.md and the packages named there."""
    names = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    if all(environment.get(name) for name in names):
        yield "both PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are set: torch_npu ends the process", "unset one"
    options = environment.get("PYTORCH_NPU_ALLOC_CONF", "")
    if "expandable_segments:True" in options and re.search(r"max_split_size_mb|garbage_collection_threshold", options):
        yield "PYTORCH_NPU_ALLOC_CONF mixes expandable_segments with options it excludes", "keep one of them"
    if "pin_memory_expandable_segments:True" in options:
        yield "PYTORCH_NPU_ALLOC_CONF has pin_memory_expandable_segments: torch_npu captures no graphs", "remove it"
    if environment.get("TASK_QUEUE_ENABLE") == "2":
        yield "TASK_QUEUE_ENABLE=2: torch_npu captures no graphs", "unset it, or set it to 1"
    numbers = [part.strip() for part in environment.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if all(part.isdigit() for part in numbers) and list(map(int, numbers)) != sorted(set(map(int, numbers))):
        yield "ASCEND_RT_VISIBLE_DEVICES is not ascending: torch_npu then sees no device", "sort it"
    hip, cuda = (environment.get(name) for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
    if hip is not None and cuda is not None and hip != cuda and glob.glob("/dev/kfd*"):
        yield f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} differ: ROCm obeys both", "set one"
    folders = {each for row in every_row().values() for each in row.machine.toolkit_folders}
    for name in sorted(each[1:] for each in folders if each.startswith("$")):
        if environment.get(name) and not Path(environment[name]).is_dir():
            yield f"{name}={environment[name]} is no folder", f"unset {name}, or source the vendor's set_env.sh"
    if environment.get("ASCEND_HOME_PATH") and not environment.get("ASCEND_OPP_PATH"):
        yield "ASCEND_HOME_PATH is set and ASCEND_OPP_PATH is not: import torch_npu fails", "source CANN's set_env.sh"
    for path in re.split(r"[:\s]+", environment.get("LD_PRELOAD", "")):
        if path.startswith("/") and not Path(path).is_file():
            yield f"LD_PRELOAD names {path}, which is not there", "unset LD_PRELOAD, or correct it"
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > cores:
        yield f"OMP_NUM_THREADS={threads} is more than the {cores} cores of this process", "unset OMP_NUM_THREADS"
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "1":
        yield (
            "TORCH_DEVICE_BACKEND_AUTOLOAD=1: `import torch` fails wherever a vendor's package does",
            "unset it: anychip imports vendors' packages itself",
        )


def libraries(device: str) -> Check:
    """Check that the shared libraries of the vendors from `concerned` load."""
    loaded: list[str] = []
    failed: list[str] = []
    for row in concerned(device):
        for name in row.machine.libraries:
            reason = _load_error(name)
            reported = reason if reason.startswith(name) else f"{name}: {reason}"
            (failed if reason else loaded).append(reported if reason else name)
    if failed:
        remedy = (
            "install the driver or toolkit that brings it, and mount it into the container; LD_LIBRARY_PATH finds it"
        )
        return Check("libraries", "FAIL", "; ".join(failed), remedy)
    detail = f"{', '.join(loaded)}: they load" if loaded else "no vendor's library is wanted here"
    return Check("libraries", "PASS", detail)


def _load_error(name: str) -> str:
    """Return why a library does not load, or "". Load it in a child: a driver may end the process that loads it."""
    code = f"import ctypes; ctypes.CDLL({name!r})"
    try:
        done = subprocess.run(
            python_command("-c", code), capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it does not load within {_TIME_LIMIT_S:g} s"
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"it ends the process that loads it (signal {-done.returncode})"
    return lines[-1].partition(": ")[2][:200] if done.returncode and lines else ""


def cards(device: str) -> Check:
    """Check the cards' health, and for other processes on them, with the vendors' tools."""
    passed: list[str] = []
    for row in concerned(device):
        health, others = row.machine.health, row.machine.users
        if health is None or shutil.which(health.command[0]) is None:
            continue
        tool = health.command[0]
        if ill := trouble(health, _answer(health.command)):
            remedy = "reset or replace the card; the driver's log says more"
            return Check("cards", "FAIL", f"{tool} says: {'; '.join(ill)}", remedy)
        if others is not None and (users := trouble(others, _answer(others.command))):
            detail = f"other processes use the cards: {'; '.join(users)}"
            return Check("cards", "WARN", detail, f"end them, or leave their cards out with {row.visibility_variable}")
        passed.append(f"{tool}: healthy, and no other process uses its cards")
    return Check("cards", "PASS", "; ".join(passed) or "there is no tool to ask (nvidia-smi, npu-smi)")


def trouble(question: Any, answer: str) -> list[str]:
    """Return the lines of a tool's answer that mean trouble by its Question (backends/vendors/table.py)."""
    pattern = re.compile(question.trouble, re.MULTILINE)
    return [" ".join(found[0].replace("|", " ").split()) for found in pattern.finditer(answer)]


def _answer(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
