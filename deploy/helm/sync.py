"""Keep the names of settings in the chart's schema, and what chart and plugins say of themselves, equal to ours.

    .venv/bin/python deploy/helm/sync.py            # writes them
    .venv/bin/python deploy/helm/sync.py --check    # exit 1 if they differ

Licence, authors and addresses are those of pyproject.toml, once the owner has decided them: Artifact Hub shows them,
and the pyproject.toml of each plugin repeats them, as no build backend reads them from another file. Rules and the
dashboard are links into deploy/prometheus and deploy/grafana: Helm packs the target of a link.
"""

from __future__ import annotations

import argparse
import json
import re
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


_DECIDED = re.compile(r"^(?:license|authors) = .*\n|^\[project\.urls\]\n(?:.+\n)*\n?", re.MULTILINE)


def plugin(text: str, project: str) -> str:
    """Return a plugin's pyproject.toml with the licence, authors and addresses of the project's pyproject.toml.

    Each of the first two is written on one line, the addresses in a table of their own.
    """
    fields = [each for each in _DECIDED.findall(project) if not each.startswith("[")]
    tables = [f"{each.rstrip()}\n\n" for each in _DECIDED.findall(project) if each.startswith("[")]
    text = _DECIDED.sub("", text)
    text = text.replace("classifiers = [", "".join(fields) + "classifiers = [", 1)
    return text.replace("[tool.", "".join(tables) + "[tool.", 1)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write into the chart and the plugins what they have of the service.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where they differ")
    check = parser.parse_args().check
    project = (ROOT / "pyproject.toml").read_text()
    files = {CHART / "values.schema.json": schema(), CHART / "Chart.yaml": about(read_project())}
    files |= {path: plugin(path.read_text(), project) for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))}
    for path, wanted in files.items():
        if wanted == path.read_text():
            continue
        if check:
            sys.exit(f"not up to date: {path.relative_to(ROOT)}; run python deploy/helm/sync.py")
        path.write_text(wanted)


if __name__ == "__main__":
    main()
