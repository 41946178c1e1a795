"""What each vendor's backend says and does, with fakes of the children's answers and of the vendors' modules."""

from __future__ import annotations

import math
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from anychip_ascend.backend import AscendBackend
from backends import (
    BACKENDS,
    BackendUnavailableError,
    Device,
    DeviceLostError,
    Telemetry,
    choose,
    detect,
    open_backend,
)
from backends.detect import Found, SystemEvidence, vendor_of_cuda
from backends.vendors import table as vendors
from backends.vendors import torch_device
from backends.vendors.cuda import CudaTypeBackend
from backends.vendors.table import Facts
from backends.vendors.torch_device import TorchBackend
from tests.support.rows import engines_by_name

ROOT = Path(__file__).parents[2]
VENDORS = [backend for backend in BACKENDS if isinstance(backend, TorchBackend)]
CHIP = {"name": "Chip", "memory_bytes": 2**36, "arch": "gfx942"}


def answers(monkeypatch: pytest.MonkeyPatch, said: Found) -> None:
    monkeypatch.setattr(detect, "found", lambda package, device_type: said)
    monkeypatch.setattr(detect, "installed", lambda package: package != "torch_xmlir")


@pytest.mark.parametrize("backend", VENDORS, ids=lambda backend: backend.name)
class TestEveryVendor:
    def test_refuses_in_one_plain_sentence(self, backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        answers(monkeypatch, Found(error="ImportError: libdriver.so: cannot open"))
        monkeypatch.setattr("backends.vendors.torch_device.glob.glob", lambda pattern: [])
        reason = backend.probe().reason
        assert reason.endswith(".")
        assert "\n" not in reason
        with pytest.raises(BackendUnavailableError) as caught:
            backend.devices()
        assert str(caught.value) == reason

    def test_probing_cannot_raise(self, backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> str:
            raise KeyError("broken")

        monkeypatch.setattr(backend, "_not_installed", broken)
        probe = backend.probe()
        assert not probe.available
        assert "could not be probed" in probe.reason


def test_an_amd_gpu_is_rocm_and_no_dcu(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, Found(torch="2.9.0+rocm7.1", hip="7.1", devices=(CHIP,)))
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(detect, "system_evidence", detect.SystemEvidence)
    monkeypatch.setattr("backends.vendors.torch_device.glob.glob", lambda pattern: [pattern])
    assert [device.id for device in CudaTypeBackend(vendors.AMD).devices()] == ["rocm:0"]
    dcu = next(backend for backend in VENDORS if backend.name == "dcu")
    assert "not of Hygon: it is amd's" in dcu.probe().reason


def test_memory_and_release_speak_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = [700]
    module = SimpleNamespace(
        mem_get_info=lambda device: (400, 1000),
        memory_allocated=lambda device: 100,
        memory_reserved=lambda device: reserved[0],
        empty_cache=lambda: reserved.__setitem__(0, 200),
    )
    backend: Any = AscendBackend()
    monkeypatch.setattr(backend, "_module", lambda: module)
    memory = backend.memory("npu:0")
    assert (memory.allocated, memory.reserved, memory.used, memory.total) == (100, 700, 600, 1000)
    assert backend.release_cache("npu:0") == 500

    def fault() -> None:
        raise RuntimeError("ERR00100 error code is 507015")

    module.empty_cache = fault
    with pytest.raises(DeviceLostError, match="npu:0 is lost"):
        backend.release_cache("npu:0")


@pytest.mark.parametrize("has", ["torch 2.14", "torch 2.10", "no allocator"])
@pytest.mark.parametrize(
    "row", [vendors.NVIDIA, vendors.AMD, vendors.ASCEND, vendors.CAMBRICON, vendors.INTEL], ids=lambda row: row.name
)
def test_a_release_empties_the_hosts_cache_of_pinned_memory_too(
    row: Facts, has: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch/accelerator/memory.py of 2.14 has a call; before it torch._C one for torch.cuda. torch_npu has its own."""
    emptied: list[str] = []

    def general() -> None:
        if has == "no allocator":
            raise RuntimeError("no host allocator is registered")
        emptied.append(has)

    module = SimpleNamespace(memory_reserved=lambda device: 100, empty_cache=lambda: None)
    if row is vendors.ASCEND:
        module.host_empty_cache = partial(emptied.append, has)
    if has == "torch 2.10":
        monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
        monkeypatch.setattr(torch._C, "_host_emptyCache", partial(emptied.append, has), raising=False)
    else:
        monkeypatch.setattr(torch.accelerator, "empty_host_cache", general, raising=False)
    backend: Any = TorchBackend(row)
    monkeypatch.setattr(backend, "_module", lambda: module)
    assert backend.release_cache(f"{row.name}:0") == 0
    known = {"torch 2.14": ("cuda", "xpu"), "torch 2.10": ("cuda",), "no allocator": ()}[has]
    assert emptied == ([has] if row.device_type in (*known, "npu") else [])


@pytest.mark.parametrize("row", [row for row in vendors.ACCELERATORS if row.device_type == "cuda"])
def test_fp32_means_float32_behind_torch_cuda(row: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's cudnn.allow_tf32 is True by itself; a ROCm torch hands it to MIOpen."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    torch_device._set_switches(None, row.switches)
    assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is False
    assert torch.backends.cudnn.benchmark == (row is vendors.NVIDIA), "shapes are fixed: kernels are measured"


def test_nvidia_numbers_its_cards_as_its_tools_do_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    variables = vendors.NVIDIA.variables({}, tmp_path)
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in vendors.NVIDIA.variables({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, tmp_path)


def test_a_switch_that_a_package_does_not_know_is_said(caplog: pytest.LogCaptureFixture) -> None:
    torch_device._set_switches(module := SimpleNamespace(known=False), {"known": True, "renamed": False})
    assert module.known
    assert [each.getMessage().split()[0] for each in caplog.records] == ["renamed"]


def test_a_switch_that_can_be_set_and_not_read_is_known(caplog: pytest.LogCaptureFixture) -> None:
    class Configuration:  # As torch_npu 2.12.0.post3 has it (npu/npu_config.py).
        @classmethod
        def __setattr__(cls, name: str, value: bool) -> None:
            given[name] = value

    given: dict[str, bool] = {}
    torch_device._set_switches(SimpleNamespace(config=Configuration()), {"config.allow_internal_format": False})
    assert (given, caplog.records) == ({"allow_internal_format": False}, [])


def test_a_card_that_is_asked_alone_is_named_in_the_variables_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(detect, "_ChildAnswers", lambda *given: asked.append(given[-2:]))
    monkeypatch.setenv("MACA_VISIBLE_DEVICES", "3,4")
    detect._alone("torch", "cuda", 1.0, 1)
    [(index, variables)] = asked
    assert (index, variables["MACA_VISIBLE_DEVICES"], variables["CUDA_VISIBLE_DEVICES"]) == (0, "4", "1")


@pytest.mark.parametrize(
    ("visible", "index", "asked"),
    [(None, 1, 1), ("", 1, 1), ("4, 7", 1, 7), ("4", 1, None), ("GPU-8932f937,GPU-d0b6", 0, None)],
)
def test_telemetry_is_that_of_the_device_behind_the_visibility_variable(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, asked: int | None
) -> None:
    backend = AscendBackend()
    if visible is None:
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    samples = {number: Telemetry(power_watts=100.0 + number) for number in range(8)}
    backend.__dict__["_sampler"] = SimpleNamespace(latest=samples.__getitem__)
    watts = backend.telemetry(f"npu:{index}").power_watts
    assert watts == 100.0 + asked if asked is not None else math.isnan(watts)


def test_a_device_found_by_another_process_is_opened_without_asking_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> Found:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(detect, "found", asked)
    npu = next(backend for backend in VENDORS if backend.name == "npu")
    monkeypatch.setattr(npu, "_taken", None, raising=False)
    given = Device("npu:3", "Ascend910B3", 2**36, "fp16")
    assert open_backend(given) is npu
    assert npu.devices() == [given]
    with pytest.raises(BackendUnavailableError, match="no backend for the device 'warp:0'"):
        open_backend(Device("warp:0", "Chip", 1, "fp32"))


def test_a_device_that_does_not_say_what_is_free_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intel's client GPUs (pytorch#159728)."""

    def unsupported(device: str) -> tuple[int, int]:
        raise RuntimeError("The device (Intel(R) Arc(TM) A770) doesn't support querying the available free memory.")

    module = SimpleNamespace(
        mem_get_info=unsupported,
        memory_allocated=lambda device: 100,
        memory_reserved=lambda device: 300,
        get_device_properties=lambda device: SimpleNamespace(total_memory=1000),
    )
    xpu: Any = next(backend for backend in VENDORS if backend.name == "xpu")
    monkeypatch.setattr(xpu, "_module", lambda: module)
    memory = xpu.memory("xpu:0")
    assert (memory.allocated, memory.reserved, memory.used, memory.total) == (100, 300, 300, 1000)


def test_one_sick_card_does_not_disable_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, Found(devices=(CHIP, {"error": "drvErr=87"}, CHIP)))
    backend = AscendBackend()
    assert [device.id for device in backend.devices()] == ["npu:0", "npu:2"]
    assert backend.probe().silent == {"npu:1": "drvErr=87"}
    monkeypatch.setattr("backends.registry.BACKENDS", (backend,))
    with pytest.raises(BackendUnavailableError, match="npu:1 does not answer: drvErr=87"):
        choose("npu:1")
    answers(monkeypatch, Found(devices=({"error": "drvErr=87"},)))
    assert "No device of Huawei Ascend answers: drvErr=87." in AscendBackend().probe().reason


def test_nvml_is_asked_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = {0: "aaaa", 1: "bbbb"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    monkeypatch.setattr("backends.telemetry.nvidia.uuids", lambda nvml: {"GPU-bbbb": 0, "GPU-aaaa": 1})
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    cuda: Any = next(backend for backend in VENDORS if backend.name == "cuda")
    assert (cuda.hooks.tool_index(0, 0), cuda.hooks.tool_index(1, 1)) == (1, 0)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cuda.hooks.tool_index(1, 5) == 5, "by the visibility variable"


# --- who is behind torch.cuda

NVIDIAS_CARD = SystemEvidence(pci=frozenset({"0x10de"}))


def said_by(torch: str, arch: str = "", hip: str | None = None, private_name: str = "privateuseone") -> Found:
    device = {"name": "Chip", "memory_bytes": 1, "arch": arch}
    return Found(torch=torch, cuda=None if hip else "12.9", hip=hip, private_name=private_name, devices=(device,))


@pytest.mark.parametrize(
    ("said", "here", "vendor"),
    [
        (said_by("2.9.0+cu130"), NVIDIAS_CARD, "nvidia"),
        (said_by("2.9.0+cu130"), SystemEvidence(), "nvidia"),
        (said_by("2.9.0+rocm7.1", "gfx942:sramecc+", "7.1"), SystemEvidence(), "amd"),
        (said_by("2.9.0+rocm7.1", "gfx906", "7.1"), SystemEvidence(pci=frozenset({"0x1002"})), "amd"),
        (said_by("2.9.0+das.opt1.dtk2604", "gfx906", "6.3"), SystemEvidence(), "hygon"),
        (said_by("2.9.0", "gfx906", "6.3"), SystemEvidence(pci=frozenset({"0x1d94"})), "hygon"),
        (said_by("2.9.0", "gfx906", "6.3"), SystemEvidence(hygon_software=True), "hygon"),
        (said_by("2.9.0", "gfx936:xnack-", "6.3"), SystemEvidence(), "hygon"),
        (said_by("2.8.0+metax3.7.2.0"), SystemEvidence(), "metax"),
        (said_by("2.8.0"), SystemEvidence(pci=frozenset({"0x9999"})), "metax"),
        (said_by("2.7.1+corex.4.4.0"), NVIDIAS_CARD, "iluvatar"),
        (said_by("2.9.0+cu129"), SystemEvidence(kunlun_software=True), "kunlun"),
        (said_by("2.12.0+cpu", private_name="supa"), NVIDIAS_CARD, "shim:supa"),
    ],
)
def test_vendors_behind_torch_cuda_are_told_apart(said: Found, here: SystemEvidence, vendor: str) -> None:
    assert vendor_of_cuda(said, here) == vendor


# --- The pages: names, engines, and what has run on hardware

OURS = {row.name for row in (*vendors.ACCELERATORS, vendors.CPU)}
ROWS = {each.name: each.facts for each in BACKENDS if each.name in OURS}


def table_of(page: str, heading: str) -> dict[str, list[str]]:
    """Read the first table of a page that begins with a row of `--device` and `heading`: its other cells by device."""
    text = (ROOT / page).read_text(encoding="utf-8")
    [start, *_] = [each.start() for each in re.finditer(r"^\| `--device` \|.*$", text, re.M) if heading in each[0]]
    lines = text[start:].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {name: rest for first, *rest in cells for name in re.findall(r"`(\w+)`", first)}


def engines_in(cell: str) -> tuple[str, ...]:
    return tuple(name for name in re.findall(r"`(\w+)`", cell) if name in engines_by_name())


@pytest.mark.parametrize(
    ("page", "heading", "by_name", "simulated"),
    [("README.md", "engines", "; by name ", "simulated"), ("README.zh-CN.md", "引擎", "\uff1b按名称指定 ", "模拟设备")],
)
def test_the_readme_has_every_vendors_engines(page: str, heading: str, by_name: str, simulated: str) -> None:
    found = table_of(page, heading)
    assert set(found) == {*ROWS, "null"}
    for name, row in ROWS.items():
        _, engines, verified = found[name]
        preferred, _, named = re.split("[;\uff1b] ?int8", engines)[0].partition(by_name)
        assert (engines_in(preferred), engines_in(named)) == (row.engines, row.by_name), name
        assert (simulated in verified) == (row.sample is not None), name


@pytest.mark.parametrize(("page", "nowhere"), [("README.md", "not on hardware"), ("README.zh-CN.md", "未经真机验证")])
def test_what_has_run_on_hardware_is_the_same_in_the_table_of_proofs_and_in_the_readme(page: str, nowhere: str) -> None:
    lines = re.findall(
        r"^\| `(\w+)`.*? \| (.*?) \|", (ROOT / "docs/hardware.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    real = {name for name, proof in lines if re.search(r"\d{4}-\d\d-\d\d", proof)}
    assert real >= {"cpu", "cuda"}
    readme = table_of(page, "`--device`")
    for name in ROWS:
        assert readme[name][2].startswith(nowhere) == (name not in real), name
    [measured] = re.findall(r"^Measured on (.*?)[;.]", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert ("H100" in measured, "x86-64" in measured) == ("cuda" in real, "cpu" in real)
