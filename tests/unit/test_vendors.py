"""What each vendor's backend says and does, with fakes of the children's answers and of the vendors' modules.

No accelerator: nothing here proves that a card works.
"""

from __future__ import annotations

import ast
import ctypes
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
    Backend,
    BackendError,
    BackendUnavailableError,
    Device,
    DeviceLostError,
    Telemetry,
    choose,
    detect,
    open_backend,
)
from backends.contract.errors import translated_errors
from backends.detect import Found, SystemEvidence, vendor_of_cuda
from backends.detect_child import pci_address
from backends.vendors import table as vendors
from backends.vendors import torch_device
from backends.vendors.general import complete
from backends.vendors.hooks import DeviceHooks
from backends.vendors.table import Facts
from backends.vendors.torch_device import CudaTypeBackend, TorchBackend

ROOT = Path(__file__).parents[2]
MEMBERS = {"name", "facts", "probe", "devices", "load", "memory", "release_cache", "telemetry"}
DEFAULTS = {"beside", "image_decoder", "take"}
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


def test_a_backend_has_eight_members_and_three_with_a_default() -> None:
    assert {*Backend.__abstractmethods__, *Backend.__annotations__} == MEMBERS
    assert {name for name in dir(Backend) if not name.startswith("_")} == (MEMBERS | DEFAULTS) - {"name", "facts"}


def test_nothing_that_a_backend_keeps_to_itself_is_used_by_others() -> None:
    kept = {
        name for kind in (TorchBackend, CudaTypeBackend, DeviceHooks) for name in dir(kind) if re.match("_[a-z]", name)
    }
    kept -= {"_found", "_module"}  # Names that other classes have, too.
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.attr}"
        for folder in ("app", "backends", "models", "plugins", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
        if "vendors" not in file.parts and "tests" not in file.parts
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in kept and ast.unparse(node.value) not in ("self", "cls")
    ]
    assert found == []


def test_a_package_without_its_driver_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, Found(error="ImportError: libhccl.so: cannot open shared object file"))
    monkeypatch.setattr("backends.vendors.torch_device.glob.glob", lambda pattern: [])
    reason = AscendBackend().probe().reason
    assert "torch_npu is installed and cannot be used: ImportError: libhccl.so" in reason
    assert "/dev/davinci[0-9]0" not in reason
    assert "/dev/davinci0 is missing" in reason


def test_a_package_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "installed", lambda package: False)
    assert "ANYCHIP_TORCH=ascend make install" in AscendBackend().probe().reason


def test_the_surroundings_win_over_what_a_backend_wants(tmp_path: Path) -> None:
    facts = AscendBackend().facts
    alone = facts.variables({"PATH": "/bin"}, tmp_path)
    assert alone["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    assert alone["ACL_OP_COMPILER_CACHE_DIR"] == f"{tmp_path}/ascend"
    chosen = facts.variables({"ACLNN_CACHE_LIMIT": "10"}, tmp_path)
    assert chosen == {name: text for name, text in alone.items() if name != "ACLNN_CACHE_LIMIT"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"])
def test_torch_npu_never_gets_two_allocator_settings(name: str, tmp_path: Path) -> None:
    variables = AscendBackend().facts.variables({name: "max_split_size_mb:64"}, tmp_path)
    assert not any(each.endswith("_ALLOC_CONF") for each in variables)
    assert "ACLNN_CACHE_LIMIT" in variables


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
    "row", [vendors.NVIDIA, vendors.AMD, vendors.CAMBRICON, vendors.INTEL], ids=lambda row: row.name
)
def test_a_release_empties_the_hosts_cache_of_pinned_memory_too(
    row: Facts, has: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch/accelerator/memory.py of 2.14; before it torch._C has a call for what answers to torch.cuda."""
    emptied: list[str] = []

    def general() -> None:
        if has == "no allocator":
            raise RuntimeError("no host allocator is registered")
        emptied.append(has)

    module = SimpleNamespace(memory_reserved=lambda device: 100, empty_cache=lambda: None)
    if has == "torch 2.10":
        monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
        monkeypatch.setattr(torch._C, "_host_emptyCache", partial(emptied.append, has), raising=False)
    else:
        monkeypatch.setattr(torch.accelerator, "empty_host_cache", general, raising=False)
    backend: Any = TorchBackend(row)
    monkeypatch.setattr(backend, "_module", lambda: module)
    assert backend.release_cache(f"{row.name}:0") == 0
    known = {"torch 2.14": ("cuda", "xpu"), "torch 2.10": ("cuda",), "no allocator": ()}[has]
    assert emptied == ([has] if row.device_type in known else [])


def test_a_module_gets_what_torch_has_for_every_accelerator_and_keeps_its_own() -> None:
    def empty_cache() -> None:
        pass

    module: Any = ModuleType("torch.acme")
    module.empty_cache = empty_cache
    assert complete(module, "acme") is module
    assert module.empty_cache is empty_cache
    assert module.mem_get_info is torch.accelerator.get_memory_info
    assert module.Event.func is torch.Event
    with module.stream(None):
        pass
    substitute = SimpleNamespace()
    assert complete(substitute, "acme") is substitute
    assert not vars(substitute)


def test_a_vendor_that_names_no_device_files_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, Found())
    row = Facts(vendor="acme", device_type="acme", engines=("eager",), precisions=("fp32",), title="Acme")
    assert TorchBackend(row).probe().reason == (
        "Acme has no device that this process may use; check the driver with the vendor's tool."
    )


def test_nvidia_is_told_its_switches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    cuda: Any = next(backend for backend in VENDORS if backend.name == "cuda")
    torch_device._set_switches(None, cuda.facts.switches)
    assert torch.backends.cudnn.benchmark, "shapes are fixed: kernels are measured"
    assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is False, "fp32 means float32"
    variables = vendors.NVIDIA.variables({}, tmp_path)
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "as NVIDIA's tools count"
    assert "CUDA_DEVICE_ORDER" not in vendors.NVIDIA.variables({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, tmp_path)


@pytest.mark.parametrize(
    ("row", "has"),
    # A torch_mlu that has `cnnl` no more: those after 2.4 are not public. A torch_npu without `conv`.
    [(vendors.CAMBRICON, ()), (vendors.ASCEND, ("config", "matmul"))],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_switch_that_a_newer_package_lacks_is_named_and_the_others_are_set(
    row: Facts, has: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    module = SimpleNamespace(**{name: SimpleNamespace() for name in has})
    torch_device._set_switches(module, row.switches)
    missing = [path for path in row.switches if path.removeprefix("torch.").split(".")[0] not in has]
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == missing
    assert all(vars(getattr(module, name)) for name in has)


def test_cudas_errors_that_end_a_process_mean_that_the_device_is_lost() -> None:
    """Which those are says the header that comes with torch; what they are called says the runtime beside it."""
    folder = Path(torch.__file__).parent.parent / "nvidia" / "cu13"
    header, library = folder / "include" / "driver_types.h", folder / "lib" / "libcudart.so.13"
    if not header.exists():
        pytest.skip("this torch is not a CUDA 13 build")
    text_of = ctypes.CDLL(str(library)).cudaGetErrorString
    text_of.restype = ctypes.c_char_p
    entries = re.findall(r"/\*\*((?:(?!\*/).)*)\*/\s*(cudaError\w+)\s*=\s*(\d+)", header.read_text(), re.DOTALL)
    fatal = {int(number) for said, _, number in entries if "must be terminated" in " ".join(said.split())}
    assert {700, 710, 719} < fatal
    assert 2 not in fatal
    for number in sorted(fatal):
        with pytest.raises(DeviceLostError), translated_errors("cuda:0"):
            raise torch.AcceleratorError(f"CUDA error: {text_of(number).decode()}")


def test_a_torch_of_another_vendor_is_not_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.0")
    monkeypatch.setattr(torch, "__version__", "2.8.0+metax3.7.2.0")
    cuda = next(backend for backend in VENDORS if backend.name == "cuda")
    assert "is of metax: choose --device metax" in cuda.probe().reason


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


def test_no_two_rows_answer_to_one_name() -> None:
    names = [name for row in vendors.known() for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))
    assert all(row.title and row.install and row.device_files for row in vendors.ACCELERATORS)


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


@pytest.mark.parametrize(
    ("device", "said", "remedy"),
    [
        ("npu:0", "AclSetCompileopt, error code is 500001", "pip install 'numpy<2'"),
        ("cuda:0", "CUDA error: CUDA-capable device(s) is/are busy or unavailable", "another process has the card"),
        ("npu:0", "Cannot run aclop operators during NPU graph capture.", "--engine eager or torchair"),
    ],
)
def test_a_known_fault_brings_its_remedy(device: str, said: str, remedy: str) -> None:
    with pytest.raises(BackendError, match=re.escape(remedy)), translated_errors(device):
        raise RuntimeError(said)


@pytest.mark.parametrize("said", ["CUDA error: unknown error", "CUDA error: driver shutting down"])
def test_a_driver_that_was_reset_ends_the_worker_that_had_it(said: str) -> None:
    with pytest.raises(DeviceLostError, match="is lost"), translated_errors("cuda:0"):
        raise RuntimeError(said)


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


def test_the_address_on_the_pci_bus_is_as_lspci_writes_it() -> None:
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    assert pci_address(card) == "0000:17:00.0"
    assert pci_address(SimpleNamespace()) == ""
