"""Keep what the chart repeats equal to where it comes from: rules, the dashboard, the names of settings.

    .venv/bin/python deploy/helm/sync.py            # copies
    .venv/bin/python deploy/helm/sync.py --check    # says what differs; exit 1 if anything does

A chart is packed and published by itself, so it must hold copies. Owns: which.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from app.config import Settings  # noqa: E402

CHART = ROOT / "deploy" / "helm" / "anychip"
# What the chart itself sets: other values of these would break its probes and its service.
_FIXED = ("host", "port", "cache_dir", "grace_s", "drain_s")


def copies() -> dict[Path, str]:
    """What the files in the chart should hold."""
    wanted = {}
    for name in ("alerts.yml", "recording.yml"):
        wanted[CHART / "files" / "rules" / name] = (ROOT / "deploy" / "prometheus" / name).read_text()
    for dashboard in (ROOT / "deploy" / "grafana").rglob("*.json"):
        wanted[CHART / "files" / "dashboards" / dashboard.name] = dashboard.read_text()
    path = CHART / "values.schema.json"
    schema = json.loads(path.read_text())
    names = [name for name in Settings.model_fields if name not in _FIXED]
    schema["properties"]["settings"]["propertyNames"]["enum"] = names
    wanted[path] = json.dumps(schema, indent=2) + "\n"
    return wanted


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Copy into the chart what it repeats.")
    parser.add_argument("--check", action="store_true", help="copy nothing; exit 1 where a file is not up to date")
    check = parser.parse_args().check
    stale = [path for path, text in copies().items() if not path.exists() or path.read_text() != text]
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"not up to date: {names}; run python deploy/helm/sync.py")
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(copies()[path])


if __name__ == "__main__":
    main()
