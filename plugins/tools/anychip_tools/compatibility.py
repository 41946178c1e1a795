"""Pairs of versions that fit each other, as data: PyTorch, vendors' packages, their toolkits and drivers.

Must import nothing but the standard library and rows of facts: `anychip doctor` uses it also where torch
cannot be imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from anychip_tools.facts import facts_module

Verdict = Literal["PASS", "WARN", "FAIL"]

# Part of a failed import's message (lower case) -> what to do.
IMPORT_REMEDIES: Mapping[str, str] = {
    "galaxyhip": "Hygon's torch needs the driver's files: mount them, -v /opt/hyhal:/opt/hyhal:ro",
    "hyhal": "Hygon's torch needs the driver's files: mount them, -v /opt/hyhal:/opt/hyhal:ro",
    "libascend": "source CANN's set_env.sh first, and mount /usr/local/Ascend/driver into a container",
    "libgl": "install OpenCV without a desktop: pip install --force-reinstall opencv-python-headless",
    "numpy": "torch was built for another major version of numpy: install the one its vendor names",
    "nms": "install the torchvision that belongs to this torch",
}
# DTK -> the oldest driver. flagos-ai/build-infra, runtime/hygon-dtk26.04.md; second-hand for the older one.
DRIVER_OF_DTK: Mapping[str, str] = {"2604": "6.3.30", "2504": "6.3.8"}
# onnxruntime-cann -> CANN. onnxruntime.ai, CANN Execution Provider, for 1.20 to 1.22; PyPI's newer ones have no entry.
CANN_OF_ONNX_RUNTIME: Mapping[str, str] = {"1.20": "8.2", "1.21": "8.2", "1.22": "8.2"}
LEAKING = {"torch_npu": {"2.8.0": "leaks host memory (vllm-project/vllm-ascend#6299): use 2.8.0.post2"}}

_CALLED = {"cuda": "torch for CUDA"}


@dataclass(frozen=True)
class VersionFinding:
    """Verdict on one pair of versions. `remedy`: what to do if the two do not fit."""

    verdict: Verdict
    text: str
    remedy: str = ""


def findings(versions: Mapping[str, str], pairs: Iterable[Any]) -> list[VersionFinding]:
    """Compare these versions with each other, by the rules here and by the rows' Pairs (backends/vendors/table.py).

    `versions`: by name of packages and toolkits, cuda (of torch's build), and driver:nvidia and so on. A rule
    whose versions are missing is left out.
    """
    found = [*(rule(versions) for rule in _RULES), *(_paired(pair, versions) for pair in pairs)]
    return [each for each in found if each is not None]


def _paired(pair: Any, versions: Mapping[str, str]) -> VersionFinding | None:
    mine, other = versions.get(pair.software, ""), versions.get(pair.other, "")
    # torch_mlu names its torch behind a plus sign: 1.29.2+torch2.7.1.
    tagged = re.search(rf"\+{pair.other}([\d.]+)", mine)
    numbers = _parts(mine)
    needed = (need for begin, need in pair.versions.items() if numbers[: len(_parts(begin))] == _parts(begin))
    need = next(needed, "") if pair.versions else ".".join(map(str, _parts(tagged[1] if tagged else mine)[:2]))
    if not mine or not (other or (need and pair.needs)):
        return None
    software, its = _CALLED.get(pair.software, pair.software), pair.other.partition(":")[0]
    text = f"{software} {mine} and {its} {other or 'not installed'}"
    if mine in LEAKING.get(pair.software, {}):
        return VersionFinding("WARN", text, f"{software} {mine} {LEAKING[pair.software][mine]}")
    fits = _parts(other) >= _parts(need) if pair.at_least else _parts(other)[: len(_parts(need))] == _parts(need)
    more = f" or newer; or take an older {software}" if pair.at_least else ": install the two as a pair"
    return _judged(text, fits or not need, f"{software} {mine} wants {its} {need}{more}")


def _judged(text: str, fits: bool, remedy: str, wrong: Verdict = "FAIL") -> VersionFinding:
    return VersionFinding("PASS", text) if fits else VersionFinding(wrong, text, remedy)


def _torchvision(versions: Mapping[str, str]) -> VersionFinding | None:
    torch, vision = (_parts(versions.get(name, ""))[:2] for name in ("torch", "torchvision"))
    # pytorch/vision's README: 0.20 belongs to 2.5, and each to the next.
    if len(torch) < 2 or len(vision) < 2 or torch[0] != 2:
        return None
    text = f"torch {versions['torch']} and torchvision {versions['torchvision']}"
    return _judged(text, vision[1] == torch[1] + 15, f"torch 2.{torch[1]} wants torchvision 0.{torch[1] + 15}")


def _cann(versions: Mapping[str, str]) -> VersionFinding | None:
    npu, cann = versions.get("torch_npu", ""), versions.get("cann", "")
    if not npu:
        return None
    drivers = facts_module("drivers")
    wanted = drivers.cann_of(npu)
    text = f"torch_npu {npu} and CANN {cann or 'of unknown version'}"
    if not wanted:
        newest, its = next(iter(drivers.CANN_OF_TORCH_NPU.items()))
        return VersionFinding("WARN", text, f"it is not in Ascend's table of pairs; {newest} with CANN {its} is")
    if not cann:
        return VersionFinding("WARN", text, f"CANN {wanted} belongs to it: source its set_env.sh")
    return _judged(text, _parts(cann)[:2] == _parts(wanted)[:2], f"torch_npu {npu} was made for CANN {wanted}")


def _dtk(versions: Mapping[str, str]) -> VersionFinding | None:
    build, driver = re.search(r"dtk(\d{4})", versions.get("torch", "")), versions.get("driver:hygon", "")
    if not build or not driver:
        return None
    least = DRIVER_OF_DTK.get(build[1], "")
    text = f"torch for DTK {build[1][:2]}.{build[1][2:]} and driver {driver}"
    if not least:
        return VersionFinding("WARN", text, "this DTK is not in the table")
    return _judged(text, _parts(driver) >= _parts(least), f"this DTK wants driver {least} or newer")


def _rocm(versions: Mapping[str, str]) -> VersionFinding | None:
    build, installed = re.search(r"rocm(\d+)\.(\d+)", versions.get("torch", "")), versions.get("rocm", "")
    if not build or not installed:
        return None
    text = f"torch for ROCm {build[1]}.{build[2]} and ROCm {installed}"
    remedy = "the wheel brings its own ROCm: use one major version for both"
    return _judged(text, installed.partition(".")[0] == build[1], remedy, "WARN")


def _onnxruntime(versions: Mapping[str, str]) -> VersionFinding | None:
    here = [name for name in versions if name.partition("-")[0] == "onnxruntime"]
    text = " and ".join(f"{name} {versions[name]}" for name in here)
    remedy = "they share one folder: uninstall all of them, then install one"
    return _judged(text, len(here) == 1, remedy, "WARN") if here else None


def _onnxruntime_cann(versions: Mapping[str, str]) -> VersionFinding | None:
    runtime, cann = versions.get("onnxruntime-cann", ""), versions.get("cann", "")
    if not runtime or not cann:
        return None
    wanted = CANN_OF_ONNX_RUNTIME.get(".".join(map(str, _parts(runtime)[:2])), "")
    text = f"onnxruntime-cann {runtime} and CANN {cann}"
    known = f"it is for CANN {wanted}" if wanted else "for which CANN it is made is not known"
    fits = bool(wanted) and _parts(cann)[:2] == _parts(wanted)
    return _judged(text, fits, f"{known}: without it, npu has its other engines", "WARN")


def _parts(version: str) -> list[int]:
    """Return the numbers of a version up to its tags: 2.8.0.post2 is [2, 8, 0]."""
    head = re.match(r"\d+(?:\.\d+)*", version)
    return [int(part) for part in head[0].split(".")] if head else []


_RULES: tuple[Callable[[Mapping[str, str]], VersionFinding | None], ...] = (
    _torchvision,
    _cann,
    _dtk,
    _rocm,
    _onnxruntime,
    _onnxruntime_cann,
)
