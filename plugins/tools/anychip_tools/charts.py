"""Line charts as SVG, for reports, drawn by matplotlib.

Owns: their form. Must not know what is drawn. Must not import matplotlib at its head: few need it.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Chart:
    """Line chart. `series`: lines by name. `log_y`: a logarithmic axis, which leaves out values of 0 or less."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log_y: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)  # Places of vertical lines, by label.


def plot_file(text: str) -> Path:
    """Read the option --plot. Raises ArgumentTypeError without matplotlib, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("it needs matplotlib: pip install matplotlib")
    return Path(text)


def draw(charts: Sequence[Chart], path: Path) -> None:
    """Draw the charts into one file, one below the other. Raises OSError."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Wong's palette: people of all kinds of colour vision tell its colours apart. Names stay text, and "$" stays "$".
    with rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(7.2, 3.6 * len(charts)), layout="constrained")
        for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
            axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
            axes.set_prop_cycle(color=["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"])
            for name, points in chart.series.items():
                axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) <= 40 else "")
            for name, place in chart.marks.items():
                axes.axvline(place, color="#888888", linestyle="--")
                axes.text(place, 0.97, f" {name}", transform=axes.get_xaxis_transform(), va="top")
            if chart.log_y:
                axes.set_yscale("log", nonpositive="mask")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            else:
                axes.set_ylim(bottom=0)
            axes.grid(color="#e5e5e5")
            if chart.series:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
        figure.savefig(path, format="svg")
