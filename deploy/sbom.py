"""Write the contents of an environment as a CycloneDX 1.6 document, for scanners and for reports of running software.

    .venv/bin/python deploy/sbom.py sbom.cdx.json      # `make sbom`; in every image: /opt/anychip/sbom.cdx.json

Owns: this document, of the environment whose Python runs it, with packages of a base image that it sees. It needs
nothing but Python, as it also runs in image builds without a network. Packages of the system are not in it.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import uuid
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

_REQUIREMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def document(distributions: Iterable[metadata.Distribution], now: datetime.datetime) -> dict[str, Any]:
    """Return the document as plain JSON values: a component for each distribution, and the dependencies of each."""
    components: dict[str, dict[str, Any]] = {}
    needs: dict[str, set[str]] = {}
    for distribution in distributions:
        name = _normalised(distribution.metadata["Name"])
        if name in components:
            continue  # Python imports the first one found.
        components[name] = _component(name, distribution)
        required = (_REQUIREMENT_NAME.match(line) for line in distribution.requires or ())
        needs[name] = {_normalised(found[0]) for found in required if found}
    refs = {name: component["bom-ref"] for name, component in components.items()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, ' '.join(sorted(refs.values())))}",
        "version": 1,
        "metadata": {
            "timestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {"type": "application", "name": "anychip", "bom-ref": "anychip"},
        },
        "components": [components[name] for name in sorted(components)],
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[each] for each in needs[name] & refs.keys())}
            for name in sorted(refs)
        ],
    }


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _component(name: str, distribution: metadata.Distribution) -> dict[str, Any]:
    version = distribution.version
    purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    component: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    expressions = distribution.metadata.get_all("License-Expression") or []
    texts = [text.strip() for text in distribution.metadata.get_all("License") or [] if 0 < len(text.strip()) < 100]
    if expressions:
        component["licenses"] = [{"expression": expressions[0]}]
    elif texts:  # Longer ones are whole licences, which nobody needs here.
        component["licenses"] = [{"license": {"name": texts[0]}}]
    return component


def main() -> None:
    """Run the command line."""
    [target] = sys.argv[1:] or ["sbom.cdx.json"]
    # Set for a reproducible build; https://reproducible-builds.org/specs/source-date-epoch/
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    utc = datetime.timezone.utc
    now = datetime.datetime.fromtimestamp(int(epoch), utc) if epoch else datetime.datetime.now(utc)
    written = document(metadata.distributions(), now)
    Path(target).write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{target}: {len(written['components'])} packages")


if __name__ == "__main__":
    main()
