"""Keep the names of settings in the chart's schema, and what the chart says of itself, equal to the service's.

    .venv/bin/python deploy/helm/sync.py            # writes them
    .venv/bin/python deploy/helm/sync.py --check    # exit 1 if they differ

Licence and addresses are those of pyproject.toml, once the owner has decided them: Artifact Hub shows them. Rules and
the dashboard are links into deploy/prometheus and deploy/grafana: Helm packs the target of a link.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from app.config import Settings  # noqa: E402
from deploy.image.dockerfiles import published  # noqa: E402
from deploy.install import read_project  # noqa: E402

CHART = ROOT / "deploy" / "helm" / "anychip"
# Settings of the chart itself: other values would break its probes and its service.
_FIXED = ("host", "port", "cache_dir", "grace_s", "drain_s")


def schema() -> str:
    """Return the chart's schema with the names of today's settings."""
    document = json.loads((CHART / "values.schema.json").read_text())
    document["properties"]["settings"]["propertyNames"]["enum"] = [
        name for name in Settings.model_fields if name not in _FIXED
    ]
    return json.dumps(document, indent=2) + "\n"


def about(project: Mapping[str, Any]) -> str:
    """Return Chart.yaml with the licence and the addresses of a project."""
    fixed = (CHART / "Chart.yaml").read_text().partition("annotations:\n")[0]
    decided = published(project)
    found = {"artifacthub.io/category": "ai-machine-learning", "artifacthub.io/license": decided.get("licenses", "")}
    lines = ["annotations:", *(f"  {name}: {text}" for name, text in found.items() if text)]
    lines += [f"home: {decided['url']}"] if "url" in decided else []
    lines += [f"sources: [{decided['source']}]"] if "source" in decided else []
    return fixed + "\n".join(lines) + "\n"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write into the chart what it has of the service.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where they differ")
    check = parser.parse_args().check
    for path, wanted in ((CHART / "values.schema.json", schema()), (CHART / "Chart.yaml", about(read_project()))):
        if wanted == path.read_text():
            continue
        if check:
            sys.exit(f"not up to date: {path.relative_to(ROOT)}; run python deploy/helm/sync.py")
        path.write_text(wanted)


if __name__ == "__main__":
    main()
