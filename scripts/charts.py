"""Draws line charts as SVG, in one style, light and dark.

No library: the files are small, have real text, and are the same on every machine, so that a test can compare them.
Colours are classes, with a second palette for readers whose system is dark. The background is drawn: a page can be
dark where the system is light.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, log10
from typing import Final
from xml.sax.saxutils import escape

__all__ = ["STYLE", "Chart", "Series", "drawing"]

WIDTH: Final = 760
HEIGHT: Final = 400
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 54, 92

STYLE: Final = """
  .back { fill: #ffffff; } .text { fill: #1f2933; } .soft { fill: #5b6770; }
  .grid { stroke: #e3e8ec; } .axis { stroke: #8a96a0; } .mark { stroke: #1f2933; }
  .box { fill: #f4f7f9; stroke: #b7c2cb; } .accent { fill: #e6f2f1; stroke: #0b7a75; }
  .c0 { stroke: #0b7a75; fill: #0b7a75; } .c1 { stroke: #c2410c; fill: #c2410c; }
  .c2 { stroke: #6b7280; fill: #6b7280; } .c3 { stroke: #4338ca; fill: #4338ca; }
  .c4 { stroke: #a16207; fill: #a16207; } .c5 { stroke: #be185d; fill: #be185d; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #14191f; } .text { fill: #e6edf3; } .soft { fill: #9aa7b2; }
    .grid { stroke: #27303a; } .axis { stroke: #64717d; } .mark { stroke: #e6edf3; }
    .box { fill: #1c242c; stroke: #3b4754; } .accent { fill: #12302f; stroke: #3cc4bb; }
    .c0 { stroke: #3cc4bb; fill: #3cc4bb; } .c1 { stroke: #fb8b4b; fill: #fb8b4b; }
    .c2 { stroke: #9aa7b2; fill: #9aa7b2; } .c3 { stroke: #9b94f7; fill: #9b94f7; }
    .c4 { stroke: #e0b13f; fill: #e0b13f; } .c5 { stroke: #f472b6; fill: #f472b6; }
  }
"""


def drawing(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """An SVG document with the common style."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" font-size="13">'
    )
    body = [
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
    ]
    return "\n".join([head, *body, *parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int
    dashed: bool = False
    markers: bool = True


@dataclass(frozen=True)
class Chart:
    """A line chart. Axes are linear and begin at 0, or logarithmic."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    line_at: tuple[float, str] | None = None
    """A horizontal line with its label: the quota."""
    x_ticks: Sequence[float] = field(default=())

    def svg(self) -> str:
        xs = [x for one in self.series for x, _ in one.points]
        ys = [y for one in self.series for _, y in one.points]
        if self.line_at is not None:
            ys.append(self.line_at[0])
        x_axis = _Axis(xs, self.log_x, LEFT, WIDTH - RIGHT, self.x_ticks)
        y_axis = _Axis(ys, self.log_y, HEIGHT - BOTTOM, TOP, ())
        parts = [
            f'<text class="text" x="{LEFT}" y="28" font-size="16" font-weight="600">{escape(self.title)}</text>'
        ]
        for tick in y_axis.ticks:
            y = y_axis.place(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(
                f'<text class="soft" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{_number(tick)}</text>'
            )
        for tick in x_axis.ticks:
            x = x_axis.place(tick)
            parts.append(
                f'<text class="soft" x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_number(tick)}</text>'
            )
        low = HEIGHT - BOTTOM
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{low}" y2="{low}"/>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(
            f'<text class="soft" x="{middle:g}" y="{low + 38}" text-anchor="middle">{escape(self.x)}</text>'
        )
        height = (TOP + low) / 2
        parts.append(
            f'<text class="soft" transform="translate(18 {height:g}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y)}</text>"
        )
        if self.line_at is not None:
            value, label = self.line_at
            y = y_axis.place(value)
            parts.append(
                f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke-dasharray="2 3"/>'
            )
            parts.append(f'<text class="text" x="{LEFT + 6}" y="{y - 6:g}">{escape(label)}</text>')
        for one in reversed(self.series):  # the first one on top
            parts += _line(one, x_axis, y_axis)
        parts += _legend(self.series)
        return drawing(WIDTH, HEIGHT, self.title, parts)


class _Axis:
    """Maps values to coordinates, and chooses ticks."""

    def __init__(
        self, values: Sequence[float], is_log: bool, start: int, end: int, ticks: Sequence[float]
    ) -> None:
        self._is_log = is_log
        self._start, self._end = start, end
        if is_log:
            first, last = floor(log10(min(values))), floor(log10(max(values)) + 0.999999)
            self._low, self._high = float(first), float(max(last, first + 1))
            self.ticks = list(ticks) or [10.0**power for power in range(first, int(self._high) + 1)]
        else:
            step = _step(max(values))
            self._low = 0.0
            self._high = max(values) if ticks else step * -(-max(values) // step)
            self.ticks = list(ticks) or [step * number for number in range(round(self._high / step) + 1)]

    def place(self, value: float) -> float:
        at = log10(value) if self._is_log else value
        return round(self._start + (self._end - self._start) * (at - self._low) / (self._high - self._low), 1)


def _step(highest: float) -> float:
    power = 10.0 ** floor(log10(highest / 5))
    return next(power * times for times in (1, 2, 5, 10) if power * times * 6 >= highest)


def _number(value: float) -> str:
    for bound, name in ((1e6, "M"), (1e4, "k")):
        if value >= bound:
            return f"{value / (1e3 if name == 'k' else 1e6):g}{name}"
    return f"{value:g}"


def _line(one: Series, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in one.points]
    path = " ".join(f"{x:g},{y:g}" for x, y in places)
    dash = ' stroke-dasharray="6 4"' if one.dashed else ""
    line = f'class="c{one.color}" points="{path}" style="fill: none" stroke-width="2" stroke-linejoin="round"'
    parts = [f"<polyline {line}{dash}/>"]
    if one.markers:
        parts += [f'<circle class="c{one.color}" cx="{x:g}" cy="{y:g}" r="3.5"/>' for x, y in places]
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    at, row = LEFT, HEIGHT - 30
    for one in series:
        wide = 34 + round(7.0 * len(one.label))
        if at + wide > WIDTH - RIGHT and at > LEFT:
            at, row = LEFT, row + 18
        dash = ' stroke-dasharray="6 4"' if one.dashed else ""
        parts.append(
            f'<line class="c{one.color}" x1="{at}" x2="{at + 20}" y1="{row - 4}" y2="{row - 4}" '
            f'stroke-width="2"{dash}/>'
        )
        parts.append(f'<text class="text" x="{at + 26}" y="{row}">{escape(one.label)}</text>')
        at += wide + 12
    return parts
