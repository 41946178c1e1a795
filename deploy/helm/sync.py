"""Keep the names of settings in the chart's schema equal to the service's.

    .venv/bin/python deploy/helm/sync.py            # writes them
    .venv/bin/python deploy/helm/sync.py --check    # exit 1 if they differ

Rules and the dashboard are links into deploy/prometheus and deploy/grafana: Helm packs the target of a link.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from app.config import Settings  # noqa: E402

SCHEMA = ROOT / "deploy" / "helm" / "anychip" / "values.schema.json"
# Settings of the chart itself: other values would break its probes and its service.
_FIXED = ("host", "port", "cache_dir", "grace_s", "drain_s")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write the names of settings into the chart's schema.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where they differ")
    check = parser.parse_args().check
    text = SCHEMA.read_text()
    schema = json.loads(text)
    schema["properties"]["settings"]["propertyNames"]["enum"] = [
        name for name in Settings.model_fields if name not in _FIXED
    ]
    wanted = json.dumps(schema, indent=2) + "\n"
    if check and wanted != text:
        sys.exit(f"not up to date: {SCHEMA.relative_to(ROOT)}; run python deploy/helm/sync.py")
    if wanted != text:
        SCHEMA.write_text(wanted)


if __name__ == "__main__":
    main()
