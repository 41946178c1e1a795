"""YAML from strangers: a file's statements on its network, in a few lines.

    events of the parser, one by one: how deep, how many, what aliases stand for ─► the document

Owns: these bounds. Must not know what a document is about, nor import the parser before a document is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MAX_DEPTH = 20
MAX_ENTRIES = 200_000
"""Largest number of entries, aliases expanded. A network that reads text lists characters; PP-OCRv5 has 18,000."""
_MAX_SCALAR = 4096
"""Characters of a scalar: the time that YAML's numbers to the base of 60 take grows with the square of their length."""


def read_yaml(content: bytes, *, texts: bool = False, aliases: bool = False) -> Any:
    """Read the document. `texts`: all scalars are texts, e.g. the characters `1` or `true`; `aliases`: allowed.

    Raises ValueError, with a sentence, for a text that is no YAML, or is deeper or longer than such a file ever is.
    """
    import yaml

    fast = getattr(yaml, "CBaseLoader" if texts else "CSafeLoader", None)
    loader = fast or (yaml.BaseLoader if texts else yaml.SafeLoader)
    try:
        _check(yaml.parse(content, loader), yaml, aliases)
        return yaml.load(content, loader)
    # Its constructors raise anything on a value that is not of the type that the text states.
    except (yaml.YAMLError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(" ".join(str(error).split())[:200] or "it is no YAML") from error


def _check(events: Iterable[Any], yaml: Any, aliases: bool) -> None:
    """Check the bounds, without reading past an error. Raises ValueError."""
    known: dict[str, tuple[int, int]] = {}  # For each anchor: its number of entries, and its depth.
    open_ones: list[tuple[str | None, int, int]] = [(None, 0, 0)]
    for event in events:
        entries, depth = 1, 0
        if isinstance(event, yaml.AliasEvent):
            if not aliases:
                raise ValueError("it has aliases")
            if event.anchor not in known:
                raise ValueError(f"what {str(event.anchor)[:50]} stands for is not known, or holds itself")
            entries, depth = known[event.anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            known.pop(event.anchor, None)
            open_ones.append((event.anchor, 0, 0))
            if len(open_ones) > MAX_DEPTH:
                raise ValueError(f"it is deeper than {MAX_DEPTH} levels")
            continue
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, within, height = open_ones.pop()
            entries, depth = within + 1, height + 1
            if anchor is not None:
                known[anchor] = entries, depth
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > _MAX_SCALAR:
                raise ValueError(f"it has an entry of more than {_MAX_SCALAR} characters")
            if event.anchor is not None:
                known[event.anchor] = 1, 0
        else:
            continue
        anchor, within, height = open_ones.pop()
        open_ones.append((anchor, within + entries, max(height, depth)))
        if within + entries > MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES} entries")
        if len(open_ones) + depth > MAX_DEPTH:
            raise ValueError(f"it is deeper than {MAX_DEPTH} levels")
