"""Hooks of the documentation site: what differs between pages on a forge and pages of a site (mkdocs.yml, make docs).

Owns: the order of pages, which is that of README.md's four doors, and links that a site cannot have. mkdocs runs it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_LANGUAGES = re.compile(r"^(English|\[English\]\(.+?\)) · (简体中文|\[简体中文\]\(.+?\))$", re.MULTILINE)


def doors(text: str) -> list[tuple[str, list[str]]]:
    """Return the sections of README.md: the title of each and the pages to which it leads."""
    sections = [part.partition("\n") for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    return [
        (title, [page for _, page, _ in _LINK.findall(body) if not page.startswith("../")])
        for title, _, body in sections
    ]


def for_site(text: str, page: str) -> str:
    """Return a page without its line of languages, for which a site has a switch, and without links out of docs/.

    These become names of files: the project has no address yet under which they could be read.
    """

    def replaced(found: re.Match[str]) -> str:
        label, target, _ = found.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.startswith("docs/") and not (DOCS.parent / path).is_dir():
            return found[0]
        return f"`{path}`" if path in label else f"{label} (`{path}`)"

    return _LINK.sub(replaced, _LANGUAGES.sub("", text, count=1))


def on_config(config: Any) -> Any:
    """Give the site the order of the doors."""
    config.nav = ["README.md"]
    config.nav += [{title: pages} for title, pages in doors((DOCS / "README.md").read_text(encoding="utf-8"))]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Take out of a page what a site has otherwise, or not at all."""
    return for_site(markdown, page.file.src_uri)
