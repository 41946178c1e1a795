"""Line charts as SVG, for reports: no library, no network, readable in any browser.

Owns: scales, axes, lines and the legend. Must not know what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 34, 46
_ROW = 18  # Height of a row of the legend.
# Wong's palette: people of all kinds of colour vision tell its colours apart (Nature Methods 8, 441, 2011).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True)
class Chart:
    """Line chart. `series`: lines by name. `log_y`: a logarithmic axis, which leaves out values of 0 or less."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    log_y: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)  # Places of vertical lines, by label.


def page(charts: Sequence[Chart]) -> str:
    """Draw the charts into one SVG file, one below the other."""
    heights = [_HEIGHT + _ROW * max(1, len(chart.series)) for chart in charts]
    parts, top = [], 0
    for chart, height in zip(charts, heights, strict=True):
        parts.append(f'<g transform="translate(0 {top})">{_drawn(chart)}</g>')
        top += height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _drawn(chart: Chart) -> str:
    lines = {name: _shown(chart, points) for name, points in chart.series.items()}
    everything = [point for points in lines.values() for point in points]
    parts = [f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(chart.title)}</text>']
    if not everything:
        return "".join([*parts, f'<text x="{_LEFT}" y="60">nothing was measured</text>'])
    x_axis = _Axis([x for x, _ in everything], _LEFT, _WIDTH - _RIGHT, False, least=None)
    y_axis = _Axis([y for _, y in everything], _HEIGHT - _BOTTOM, _TOP, chart.log_y, least=0.0)
    for value in x_axis.ticks:
        x = x_axis.place(value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_number(value)}</text>')
    for value in y_axis.ticks:
        y = y_axis.place(value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    middle_y = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    parts.append(
        f'<text transform="translate(14 {middle_y}) rotate(-90)" text-anchor="middle">{escape(chart.y_label)}</text>'
    )
    for text, value in chart.marks.items():
        x = x_axis.place(value)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#888" '
            f'stroke-dasharray="4 3"/>'
            f'<text x="{x + 4:.1f}" y="{_TOP + 12}">{escape(text)}</text>'
        )
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{places}"/>')
        if len(points) <= 40:
            parts += [
                f'<circle cx="{x_axis.place(x):.1f}" cy="{y_axis.place(y):.1f}" r="3" fill="{colour}"/>'
                for x, y in points
            ]
        y = _HEIGHT + _ROW * number
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + 24}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{_LEFT + 32}" y="{y + 4}">{escape(name)}</text>')
    return "".join(parts)


class _Axis:
    def __init__(
        self, values: Sequence[float], start: float, end: float, logarithmic: bool, least: float | None
    ) -> None:
        self._start, self._end, self._log = start, end, logarithmic
        low, high = min(values), max(values)
        if logarithmic:
            low, high = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
            high = max(high, low + 1)
            self.ticks = [10.0**power for power in range(low, high + 1)]
        else:
            low = low if least is None else min(low, least)
            high = high if high > low else low + 1
            step = _step((high - low) / 5)
            self.ticks = [index * step for index in range(math.floor(low / step), math.ceil(high / step) + 1)]
            low, high = self.ticks[0], self.ticks[-1]
        self._low, self._high = low, high

    def place(self, value: float) -> float:
        value = math.log10(value) if self._log else value
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)


def _step(rough: float) -> float:
    """Return the least step of 1, 2 or 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _shown(chart: Chart, points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (y > 0 or not chart.log_y)]


def _number(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if 0 < abs(value) < 1e-3 else f"{value:g}"
