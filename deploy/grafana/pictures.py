"""Draw the dashboard's panels from a live Prometheus, a picture for each row, where there is no Grafana.

    python deploy/grafana/pictures.py http://localhost:9090 --last-s 600 --out pictures/

These are our own plots of the results of each panel's queries: the data is the same as in Grafana, the drawing is not
Grafana's. Owns: that drawing. Needs matplotlib and httpx, for development only. Must not change a panel's queries: they
are read from anychip.json, with every variable at All.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl
from cycler import cycler

mpl.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

BOARD = Path(__file__).with_name("anychip.json")
VARIABLES = ("namespace", "job", "model", "device", "instance")
_POINTS = 240
_INCH_A_COLUMN, _INCH_A_ROW, _DPI = 0.5, 0.33, 100
_LEFT, _RIGHT, _BELOW, _ABOVE = 1.3, 0.3, 1.0, 1.2
"""Margins of a panel's plot, in columns and rows of Grafana's grid: for numbers and the title."""
_NARROW = 0.3
"""Left margin of panels without numbers there, and of titles."""
_GAP = 0.1
"""Half of the space between two panels, in columns and rows."""
_LEGEND = 3
"""Lines of names below a plot; series for which there is no room are only counted."""
_INCH_A_NAME, _INCH_A_LETTER = 0.15, 0.057
_SCALES = {"percentunit": (100, " %"), "s": (1000, " ms"), "bytes": (2**-20, " MiB"), "Bps": (2**-20, " MiB/s")}
_SCALES |= {"hertz": (1e-6, " MHz"), "celsius": (1, " °C"), "watt": (1, " W")}
_COLORS = {"red": "#f2495c", "orange": "#ff9830", "green": "#73bf69"}
_PAGE, _PANEL, _LINE, _TEXT = "#111217", "#181b1f", "#2c3036", "#d0d3db"
_SERIES = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff9830", "#f2495c", "#b877d9", "#5794f2", "#96d98d")
mpl.rcParams.update(
    {
        "axes.axisbelow": True,
        "axes.edgecolor": _LINE,
        "axes.facecolor": _PANEL,
        "axes.labelcolor": _TEXT,
        "axes.prop_cycle": cycler(color=_SERIES),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": _PAGE,
        "font.size": 9,
        "grid.color": _LINE,
        "legend.frameon": False,
        "text.color": _TEXT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
    }
)


@dataclass(frozen=True)
class Series:
    """Result of a query for some labels, at the times asked for; NaN where there was nothing."""

    name: str
    labels: Mapping[str, str]
    values: Sequence[float]


class Data:
    """Answers of a Prometheus over a span of time that ends now."""

    def __init__(self, url: str, last_s: float, rate_interval_s: float, ends_s: float) -> None:
        """Open the Prometheus. `rate_interval_s`: value of Grafana's variable, four times the scrape interval."""
        self.times = [ends_s - last_s + last_s * point / (_POINTS - 1) for point in range(_POINTS)]
        self._interval = f"{rate_interval_s:g}s"
        self._client = httpx.Client(base_url=url, timeout=60)

    def series(self, target: Mapping[str, Any]) -> list[Series]:
        """Return the series of one query of a panel. Raises httpx.HTTPError."""
        expression = target["expr"].replace("$__rate_interval", self._interval)
        for variable in VARIABLES:
            expression = expression.replace(f"${variable}", ".*")
        step = self.times[1] - self.times[0]
        span = {"query": expression, "start": self.times[0], "end": self.times[-1], "step": step}
        answer = self._client.get("/api/v1/query_range", params=span).raise_for_status().json()
        return [self._one(each, target["legendFormat"]) for each in answer["data"]["result"]]

    def _one(self, found: Mapping[str, Any], legend: str) -> Series:
        step = self.times[1] - self.times[0]
        values = [nan] * _POINTS
        for at, value in found["values"]:
            values[round((at - self.times[0]) / step)] = float(value)
        labels = {name: value for name, value in found["metric"].items() if name != "__name__"}
        named = re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)
        return Series(", ".join(labels.values()) if legend == "__auto" else named, labels, values)


def rows(board: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each of the dashboard's headings with the panels below it."""
    title, panels = "", list[dict[str, Any]]()
    for panel in board["panels"]:
        if panel["type"] != "row":
            panels.append(panel)
            continue
        if panels:
            yield title, panels
        title, panels = panel["title"], []
    yield title, panels


def draw(data: Data, folder: Path) -> list[Path]:
    """Draw a picture for each row; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for title, panels in rows(json.loads(BOARD.read_text(encoding="utf-8"))):
        top = min(panel["gridPos"]["y"] for panel in panels)
        high = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) - top
        figure = pyplot.figure(figsize=(24 * _INCH_A_COLUMN, high * _INCH_A_ROW))
        for panel in panels:
            place = panel["gridPos"]
            numbers = _NARROW if panel["type"] in ("stat", "table") else _LEFT
            left, bottom = place["x"] + numbers, high - (place["y"] - top + place["h"]) + _BELOW
            width, height = place["w"] - numbers - _RIGHT, place["h"] - _BELOW - _ABOVE
            corner = (place["x"] + _GAP) / 24, (high - (place["y"] - top + place["h"]) + _GAP) / high
            around = (place["w"] - 2 * _GAP) / 24, (place["h"] - 2 * _GAP) / high
            figure.add_artist(Rectangle(corner, *around, facecolor=_PANEL, edgecolor=_LINE, zorder=-1))
            axes = figure.add_axes((left / 24, bottom / high, width / 24, height / high))
            axes.set_title(panel["title"], fontsize=10, loc="left", x=(_NARROW - numbers) / width)
            _panel(axes, panel, data)
        path = folder / f"dashboard-{re.sub(r'[^a-z]+', '-', title.lower())}.png"
        figure.savefig(path, dpi=_DPI)
        pyplot.close(figure)
        written.append(path)
    return written


def _panel(axes: Axes, panel: Mapping[str, Any], data: Data) -> None:
    found = [series for target in panel["targets"] for series in data.series(target)]
    {"stat": _number, "table": _table, "heatmap": _heatmap, "state-timeline": _states}.get(panel["type"], _lines)(
        axes, panel, found, data.times
    )


def _clock(axes: Axes, times: list[float]) -> None:
    """Show the time of day below, as Grafana does."""
    axes.set_xlim(times[0], times[-1])
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 3, 6]))
    axes.xaxis.set_major_formatter(lambda at, _: time.strftime("%H:%M:%S", time.localtime(at)))
    axes.tick_params(length=0)


def _scale(panel: Mapping[str, Any]) -> tuple[float, str]:
    return _SCALES.get(panel["fieldConfig"]["defaults"]["unit"], (1, ""))


def _color(panel: Mapping[str, Any], value: float) -> str:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or step["value"] <= value]
    return _COLORS.get(reached[-1], _TEXT)


def _last(series: Series) -> float:
    return next((value for value in reversed(series.values) if not isnan(value)), nan)


def _number(axes: Axes, panel: Mapping[str, Any], found: list[Series], times: list[float]) -> None:
    value = _last(found[0]) if found else nan
    factor, unit = _scale(panel)
    shown = value * factor
    text = "no data" if isnan(value) else f"{shown:.0f}{unit}" if abs(shown) >= 100 else f"{shown:.3g}{unit}"
    axes.text(0.5, 0.4, text, fontsize=20, ha="center", va="center", color=_color(panel, value))
    axes.axis("off")


def _table(axes: Axes, panel: Mapping[str, Any], found: list[Series], times: list[float]) -> None:
    axes.axis("off")
    now = [series for series in found if not isnan(series.values[-1])]
    names = sorted({name for series in now for name in series.labels} - {"job", "namespace"})
    if not now:
        axes.text(0.5, 0.5, "none", ha="center", va="center")
        return
    cells = [[series.labels.get(name, "") for name in names] for series in now[:12]]
    longest = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    table = axes.table(
        cells,
        colLabels=names,
        colWidths=[(each + 1) / (sum(longest) + len(names)) for each in longest],
        loc="upper left",
        cellLoc="left",
        colLoc="left",
        edges="B",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(min(8, 60 * panel["gridPos"]["w"] / (sum(longest) + len(names))))
    table.scale(1, 1.3)
    for (row, _), cell in table.get_celld().items():
        cell.set_edgecolor(_LINE)
        cell.get_text().set_color(_SERIES[6] if row == 0 else _TEXT)
        cell.PAD = 0.02


def _heatmap(axes: Axes, panel: Mapping[str, Any], found: list[Series], times: list[float]) -> None:
    by_bound = sorted(found, key=lambda series: float(series.labels["le"]))
    cells, below = [], [0.0] * len(times)
    for series in by_bound:  # The buckets are cumulative.
        cells.append([max(value - less, 0) for value, less in zip(series.values, below, strict=True)])
        below = list(series.values)
    if cells:
        axes.pcolormesh(times, range(len(cells)), cells, cmap="inferno", shading="nearest")
    axes.set_yticks(range(0, len(by_bound), 3), [series.labels["le"] for series in by_bound[::3]])
    _clock(axes, times)


def _states(axes: Axes, panel: Mapping[str, Any], found: list[Series], times: list[float]) -> None:
    width = times[1] - times[0]
    for number, series in enumerate(found):
        for at, value in zip(times, series.values, strict=True):
            if not isnan(value):
                axes.broken_barh([(at, width)], (number - 0.4, 0.8), color=_color(panel, value))
        axes.text(times[0], number, f" {series.name}", va="center", color=_PAGE)
    axes.set_yticks([])
    _clock(axes, times)


def _lines(axes: Axes, panel: Mapping[str, Any], found: list[Series], times: list[float]) -> None:
    factor, unit = _scale(panel)
    scaled = [[value * factor for value in series.values] for series in found]
    names = [series.name for series in found]
    if panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal" and scaled:
        filled = [[0.0 if isnan(value) else value for value in values] for values in scaled]
        axes.stackplot(times, filled, labels=names, alpha=0.7)
    else:
        for values, name in zip(scaled, names, strict=True):
            axes.plot(times, values, label=name, linewidth=1.2)
    _clock(axes, times)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if found:
        _legend(axes, panel["gridPos"]["w"] - 2 * _NARROW)
    else:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
        axes.set_yticks([])
    axes.set_ylabel(unit.strip(), labelpad=0)
    axes.grid(axis="y")


def _legend(axes: Axes, width: float) -> None:
    """Name the series below the plot, where they cover none of it."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    inch = 1 / figure.get_size_inches()[1]
    handles, names = axes.get_legend_handles_labels()
    place, panel = axes.get_position(), width * _INCH_A_COLUMN
    columns = max(1, int(panel / _INCH_A_LETTER / (max(map(len, names)) + 5)))
    room = _LEGEND * columns
    if len(names) > room:
        names = [*names[: room - 1], f"and {len(names) - room + 1} more"]
        handles = [*handles[: room - 1], Rectangle((0, 0), 0, 0, alpha=0)]
    high = -(-len(names) // columns) * _INCH_A_NAME * inch
    axes.set_position((place.x0, place.y0 + high, place.width, place.height - high))
    axes.legend(
        handles,
        names,
        ncols=columns,
        fontsize=7,
        loc="lower left",
        bbox_to_anchor=(place.x0 - (_LEFT - _NARROW) / 24, place.y0 - 0.28 * inch),
        bbox_transform=figure.transFigure,
        borderaxespad=0,
        borderpad=0,
        labelspacing=0.2,
        handlelength=1.2,
        columnspacing=1,
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Draw the dashboard's panels from a live Prometheus.")
    parser.add_argument("url", help="of the Prometheus")
    parser.add_argument("--last-s", type=float, default=600, help="the span of time to draw")
    parser.add_argument("--rate-interval-s", type=float, default=60, help="four times the scrape interval")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the pictures")
    options = parser.parse_args()
    for path in draw(Data(options.url, options.last_s, options.rate_interval_s, time.time()), options.out):
        print(path)


if __name__ == "__main__":
    main()
