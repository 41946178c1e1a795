"""Line charts of `anychip bench` as SVG, drawn by matplotlib, which few need."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

_CHARTS = {
    "throughput": ("images a second", {"images_per_s": ""}),
    "latency": ("milliseconds", {"p50_ms": ", p50", "p99_ms": ", p99"}),
}
"""Label of the y axis, and the figures with what they add to the name of their line, by title."""


def plot_file(text: str) -> Path:
    """Read the option --plot. Raises ArgumentTypeError without matplotlib, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("it needs matplotlib: pip install matplotlib")
    return Path(text)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw throughput and latency of a document of results over the batch size or the load. Raises OSError."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = document["results"]
    names: tuple[str, ...] = ("protocol",)
    if document["kind"] == "device":
        x_label, key, names = "batch size", "batch_size", ("engine", "precision")
    elif open_rows := [row for row in rows if row["mode"] == "open"]:
        rows, x_label, key = open_rows, "requests a second", "rate"
    else:
        x_label, key = "connections", "connections"
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(" ".join(row[name] for name in names), []).append(row)
    # Names stay text, and "$" stays "$".
    with rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(7.2, 7.2), layout="constrained")
        for axes, (title, (y_label, figures)) in zip(figure.subplots(len(_CHARTS)), _CHARTS.items(), strict=True):
            axes.set(title=f"{document['model']}: {title}", xlabel=x_label, ylabel=y_label)
            # Wong's palette: people of all kinds of colour vision tell its colours apart.
            axes.set_prop_cycle(color=["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"])
            for name, each in lines.items():
                for column, more in figures.items():
                    axes.plot([row[key] for row in each], [row[column] for row in each], label=name + more, marker=".")
            axes.set_ylim(bottom=0)
            axes.grid(color="#e5e5e5")
            if lines:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
        figure.savefig(path, format="svg")
