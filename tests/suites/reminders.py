"""What a change of a page forgets that no test can see, as `make check` says it at its end.

Owns: the sentences. A test compares the names and numbers of both languages; the prose between them, and whether people
notice a change, only its author knows.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

CHANGELOG = "CHANGELOG.md"
PROMISES = tuple(f"docs/{name}.md" for name in ("api", "observability", "predict", "protocols", "settings", "tools"))
"""Pages of names that clients and dashboards depend on. Tests fail if a new name is not in its page."""


def reminders(changed: Collection[str], root: Path) -> list[str]:
    """Return a sentence for each page that did not change with another, of the changed paths of a repository."""
    said = []
    for page in sorted(path for path in changed if path.endswith(".md") and (root / path).exists()):
        chinese = f"{page.removesuffix('.md')}.zh-CN.md"
        if (root / chinese).exists() and chinese not in changed:
            said.append(f"{page} changed, {chinese} did not: does it still say the same?")
    noticed = [page for page in PROMISES if page in changed]
    if noticed and CHANGELOG not in changed:
        said.append(f"{', '.join(noticed)} changed, {CHANGELOG} did not: a change that people notice has a line there.")
    return said
