"""What was read of every torch_npu wheel that set-up may choose: complete, and the documentation says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torchair_networks import FILE, operators_of, table
from deploy.install import CANN_PAIRS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return read


def test_every_wheel_that_set_up_chooses_was_read(document: dict[str, Any]) -> None:
    assert {plugin for _, plugin in CANN_PAIRS.values()} <= set(document["wheels"])


def test_every_wheel_has_what_we_call(document: dict[str, Any]) -> None:
    """`host_empty_cache` came after 2.9.0; plugins/ascend asks whether it is there (anychip_ascend.backend)."""
    came_later = "torch_npu.npu.host_empty_cache: it is not there"
    lacking = {version: each["lacks_calls"] for version, each in document["wheels"].items() if each["lacks_calls"]}
    assert lacking == {version: [came_later] for version in ("2.5.1", "2.6.0", "2.7.1", "2.9.0")}
    assert 'hasattr(module, "host_empty_cache")' in (ROOT / "plugins/ascend/anychip_ascend/backend.py").read_text()


@pytest.mark.parametrize("architecture", ["resnet18", "swin_t", "densenet121"])
def test_networks_are_made_of_what_was_written_down(document: dict[str, Any], architecture: str) -> None:
    assert operators_of(architecture) == document["networks"][architecture]


def test_the_documentation_has_the_table(document: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    assert "\n".join(table(document)) in text, "python -m benchmarks.torchair_networks --table"
