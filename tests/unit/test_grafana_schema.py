"""The dashboard against Grafana's published schema, as its Foundation SDK has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana import schema

pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")

BOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "deploy" / "grafana" / "anychip.json").read_text(encoding="utf-8")
)


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    assert schema.unknown(BOARD) == []


def test_a_field_that_grafana_does_not_know_is_named() -> None:
    panel = next(panel for panel in BOARD["panels"] if panel["type"] == "stat")
    wrong = {**panel, "colour": "red", "options": {**panel["options"], "colourMode": "value"}}
    assert schema.unknown({**BOARD, "panels": [wrong]}) == [
        ".panels[0].options.colourMode is not in the schema",
        ".panels[0].colour is not in the schema",
    ]
