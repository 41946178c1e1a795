"""Comparison of two files of results.

Owns: the pairing of rows, and whether a figure got better. Must not measure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.arguments import CommandError

# Columns that identify a row; figures that are compared, and whether more of them is better.
KEYS = ("engine", "precision", "batch_size", "protocol", "mode", "connections", "rate", "threads", "batch")
FIGURES: Mapping[str, bool] = {
    "images_per_s": True,
    "goodput_per_s": True,
    "p50_ms": False,
    "p99_ms": False,
    "joules_per_image": False,
}


def compare(before: Path, after: Path, tolerance: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the change of each figure of each row, and the differences of the two environments. Raises CommandError.

    `better`: the factor by which a figure is better, 1.1 for a tenth; `slower`: it is worse by more than `tolerance`.
    """
    one, other = _read(before), _read(after)
    rows = {_key(row): row for row in other["results"]}
    changes = []
    for row in one["results"]:
        now = rows.get(_key(row), {})
        for figure, more_is_better in FIGURES.items():
            then_value, now_value = row.get(figure), now.get(figure)
            if then_value and now_value:
                better = now_value / then_value if more_is_better else then_value / now_value
                change = {"row": _key(row), "figure": figure, "before": then_value, "after": now_value}
                changes.append({**change, "better": better, "slower": better < 1 - tolerance})
    if not changes:
        raise CommandError(f"{before} and {after} have no row in common: both must be of the same sizes and engines")
    ours, theirs = one["environment"], other["environment"]
    names = [name for name in (*ours, *(each for each in theirs if each not in ours)) if name != "load_average"]
    differing = [
        f"{name}: {ours.get(name, 'none')} / {theirs.get(name, 'none')}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
    return changes, differing


def _key(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in KEYS if row.get(name) not in (None, ""))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document["results"], list) or not isinstance(document["environment"], dict):
            raise KeyError("results")
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(f"{path} holds no results of anychip bench: {error}") from None
    return document
