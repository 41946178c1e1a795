"""Table of other people's clients in docs/protocols.md, compared with the results of these clients' tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "protocols.md").read_text(encoding="utf-8")


def assert_on_the_page(name: str, version: str, ran: Sequence[str]) -> None:
    """Assert that the table has this client, in this version, with exactly the features that worked here."""
    line = f"| {name} | {version} | {', '.join(ran)} |"
    assert line in PAGE.splitlines(), f"docs/protocols.md does not have what worked here: {line}"
