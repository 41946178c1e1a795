"""Place of Ascend's backend, and the calls that plain torch_npu is not asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anychip_ascend.backend import BY_PYACL, BY_TORCH_NPU, AscendBackend
from backends import BACKENDS, detect
from backends.vendors import table as vendors
from backends.vendors import torch_device


def test_it_stands_where_the_row_of_torch_npu_stood() -> None:
    assert [each.name for each in BACKENDS][:3] == ["cuda", "npu", "rocm"]
    assert isinstance(BACKENDS[1], AscendBackend)
    assert vendors.of_type("npu") == (BACKENDS[1].facts,)
    assert set(vendors.ASCEND.engines) < set(BY_TORCH_NPU.engines)


@pytest.mark.parametrize(
    ("installed", "row"),
    [
        ((), BY_TORCH_NPU),
        (("torch_npu",), BY_TORCH_NPU),
        (("torch_npu", "acl"), BY_TORCH_NPU),
        (("acl",), BY_PYACL),
    ],
)
def test_its_row_is_that_of_what_is_installed(
    installed: tuple[str, ...], row: vendors.Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "installed", lambda package: package in installed)
    assert AscendBackend().facts is row


def test_torch_npu_is_told_its_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "installed", lambda package: package == "torch_npu")
    told: dict[str, Any] = {}
    module = SimpleNamespace(
        set_compile_mode=lambda **mode: told.update(mode),
        config=SimpleNamespace(),
        conv=SimpleNamespace(allow_hf32=True),
        matmul=SimpleNamespace(),
    )
    backend = AscendBackend()
    torch_device._set_switches(module, backend.facts.switches)
    backend.hooks.set_up(module)
    assert told == {"jit_compile": False}
    assert module.config.allow_internal_format is False
    assert (module.conv.allow_hf32, module.matmul.allow_hf32) == (False, False)
