"""Compare the dashboard with Grafana's published schema, as far as its Foundation SDK has it.

    pip install --target sdk --no-deps 'grafana-foundation-sdk==1769699796!10.4.0'     # its versions are Grafana's
    PYTHONPATH=sdk python deploy/grafana/schema.py

The SDK is generated from Grafana's own definitions of dashboards, panels and queries. The dashboard is read into its
types and written again: an unknown field is then gone, and a field of another form has changed. Enumerated values are
not checked, nor is the drawing. Owns: that comparison. Needs the SDK, which is for development only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BOARD = Path(__file__).with_name("anychip.json")


SHARING = ("__inputs", "__elements", "__requires")
"""What an importer reads and takes out: it is no part of a dashboard."""


def differences(ours: object, theirs: object, path: str = "") -> Iterator[str]:
    """Yield each field of `ours` that `theirs` lacks or has otherwise; extra fields of `theirs` are defaults."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            if name in theirs:
                yield from differences(value, theirs[name], f"{path}.{name}")
            else:
                yield f"{path}.{name} is not in the schema"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif ours != theirs:
        yield f"{path} is {ours!r}, and to the schema {theirs!r}"


def unknown(board: dict[str, Any]) -> list[str]:
    """Return the parts of a dashboard that the installed SDK's schema does not know. Raises ImportError without it."""
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()  # Plugins define the options of panels and queries.
    board = {name: value for name, value in board.items() if name not in SHARING}
    return list(differences(board, json.loads(JSONEncoder().encode(Dashboard.from_json(board)))))


if __name__ == "__main__":
    found = unknown(json.loads(_BOARD.read_text(encoding="utf-8")))
    print("\n".join(found))
    sys.exit(1 if found else 0)
