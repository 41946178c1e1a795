"""Who is behind torch.cuda, and what children report of packages that fail, end the process or hang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from backends.detect import Found, SystemEvidence, vendor_of_cuda
from backends.detect_child import pci_address

NVIDIA = SystemEvidence(pci=frozenset({"0x10de"}))


def answer(torch: str, arch: str = "", hip: str | None = None, private_name: str = "privateuseone") -> Found:
    device = {"name": "Chip", "memory_bytes": 1, "arch": arch}
    return Found(torch=torch, cuda=None if hip else "12.9", hip=hip, private_name=private_name, devices=(device,))


@pytest.mark.parametrize(
    ("said", "here", "vendor"),
    [
        (answer("2.9.0+cu130"), NVIDIA, "nvidia"),
        (answer("2.9.0+cu130"), SystemEvidence(), "nvidia"),
        (answer("2.9.0+rocm7.1", "gfx942:sramecc+", "7.1"), SystemEvidence(), "amd"),
        (answer("2.9.0+rocm7.1", "gfx906", "7.1"), SystemEvidence(pci=frozenset({"0x1002"})), "amd"),
        (answer("2.9.0+das.opt1.dtk2604", "gfx906", "6.3"), SystemEvidence(), "hygon"),
        (answer("2.9.0", "gfx906", "6.3"), SystemEvidence(pci=frozenset({"0x1d94"})), "hygon"),
        (answer("2.9.0", "gfx906", "6.3"), SystemEvidence(hygon_software=True), "hygon"),
        (answer("2.9.0", "gfx936:xnack-", "6.3"), SystemEvidence(), "hygon"),
        (answer("2.8.0+metax3.7.2.0"), SystemEvidence(), "metax"),
        (answer("2.8.0"), SystemEvidence(pci=frozenset({"0x9999"})), "metax"),
        (answer("2.7.1+corex.4.4.0"), NVIDIA, "iluvatar"),
        (answer("2.9.0+cu129"), SystemEvidence(kunlun_software=True), "kunlun"),
        (answer("2.12.0+cpu", private_name="supa"), NVIDIA, "shim:supa"),
    ],
)
def test_vendors_behind_torch_cuda_are_told_apart(said: Found, here: SystemEvidence, vendor: str) -> None:
    assert vendor_of_cuda(said, here) == vendor


def test_the_address_on_the_pci_bus_is_as_lspci_writes_it() -> None:
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    assert pci_address(card) == "0000:17:00.0"
    assert pci_address(SimpleNamespace()) == ""
