"""Line charts as small inline SVG: no script, no font, no network. Pure; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 26, 30
_MAX_POINTS = 600


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value at a step; ``low`` and ``high`` end its error bar."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A vertical line at a step, such as a fault."""

    x: float
    label: str
    kind: str = "other"


@dataclass(frozen=True)
class _Frame:
    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - _TOP - _BOTTOM)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2 or 5 times a power of ten) between ``low`` and ``high``."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    points: Sequence[Point],
    *,
    title: str,
    lines: Sequence[Line] = (),
    more: Sequence[Point] = (),
    dots: bool = True,
    reference: tuple[float, str] | None = None,
) -> str:
    """A chart of ``points`` over steps with error bars, event lines and, if given, a second series of dots.

    ``reference`` is a horizontal line with a label (chance level, for example). Points that are no numbers
    are left out; without any there is a sentence in place of the chart.
    """
    shown = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    extra = [p for p in more if math.isfinite(p.x) and math.isfinite(p.y)]
    if not shown and not extra:
        return f'<p class="muted">{escape(title)}: no values yet.</p>'
    frame = _frame([*shown, *extra], lines, reference)
    body = [
        f'<text class="title" x="{_LEFT}" y="15">{escape(title)}</text>',
        *_axes(frame),
        *_event_lines(frame, lines),
        *_reference(frame, reference),
        *_error_bars(frame, shown),
        _path(frame, _thinned(shown)),
    ]
    if dots:
        body += [_dot(frame, p, "dot") for p in shown]
    body += [_dot(frame, p, "dot second") for p in extra]
    label = escape(f"{title}: {_summary(shown or extra)}", quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">' + "".join(body) + "</svg>"
    )


def _summary(points: Sequence[Point]) -> str:
    return f"{points[0].y:.4g} at step {points[0].x:g} to {points[-1].y:.4g} at step {points[-1].x:g}"


def _frame(points: Sequence[Point], lines: Sequence[Line], reference: tuple[float, str] | None) -> _Frame:
    xs = [p.x for p in points] + [line.x for line in lines]
    ys = [v for p in points for v in (p.y, p.low, p.high) if v is not None and math.isfinite(v)]
    if reference:
        ys.append(reference[0])
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    if x0 == x1:
        x0, x1 = x0 - 1, x1 + 1
    pad = (y1 - y0) * 0.08 or abs(y1) * 0.1 or 1.0
    side = (x1 - x0) * 0.02
    return _Frame(x0 - side, x1 + side, y0 - pad, y1 + pad)


def _axes(frame: _Frame) -> list[str]:
    found = []
    for value in ticks(frame.y0, frame.y1):
        y = frame.y(value)
        found.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        found.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{value:g}</text>')
    base = HEIGHT - _BOTTOM
    found.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    for value in ticks(frame.x0, frame.x1, 6):
        if value >= 0:
            x = frame.x(value)
            found.append(f'<text class="tick" x="{x:.1f}" y="{base + 16}" text-anchor="middle">{value:,g}</text>')
    return found


def _event_lines(frame: _Frame, lines: Sequence[Line]) -> list[str]:
    """Dashed verticals; labels on the side with room, each on a level of its own while levels last."""
    found = []
    for number, line in enumerate(sorted(lines, key=lambda one: one.x)):
        x = frame.x(line.x)
        top, bottom = _TOP, HEIGHT - _BOTTOM
        kind = "fault" if line.kind == "fault" else "other"
        found.append(f'<line class="event {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        right = x < WIDTH * 0.6
        place = f'x="{x + (5 if right else -5):.1f}" y="{top + 10 + 13 * (number % 4)}"'
        anchor = "start" if right else "end"
        text = escape(line.label if len(line.label) <= 34 else line.label[:33] + "…")
        found.append(f'<text class="event-label {kind}" {place} text-anchor="{anchor}">{text}</text>')
    return found


def _reference(frame: _Frame, reference: tuple[float, str] | None) -> list[str]:
    if reference is None:
        return []
    y = frame.y(reference[0])
    return [
        f'<line class="reference" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text class="tick" x="{WIDTH - _RIGHT}" y="{y - 4:.1f}" text-anchor="end">{escape(reference[1])}</text>',
    ]


def _error_bars(frame: _Frame, points: Sequence[Point]) -> list[str]:
    found = []
    for p in points:
        if p.low is None or p.high is None or not (math.isfinite(p.low) and math.isfinite(p.high)):
            continue
        x, low, high = frame.x(p.x), frame.y(p.low), frame.y(p.high)
        found.append(
            f'<path class="bar" d="M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8"/>'
        )
    return found


def _path(frame: _Frame, points: Sequence[Point]) -> str:
    if len(points) < 2:
        return ""
    return '<path class="line" d="M' + "L".join(f"{frame.x(p.x):.1f} {frame.y(p.y):.1f}" for p in points) + '"/>'


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most :data:`_MAX_POINTS`, keeping first, last and the extremes of each stretch."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    width = math.ceil(len(points) / (_MAX_POINTS / 2))
    kept: list[Point] = []
    for start in range(0, len(points), width):
        group = points[start : start + width]
        ends = {id(p): p for p in (min(group, key=lambda p: p.y), max(group, key=lambda p: p.y))}
        kept += sorted(ends.values(), key=lambda p: p.x)
    return [points[0], *(p for p in kept if p is not points[0] and p is not points[-1]), points[-1]]


def _dot(frame: _Frame, p: Point, kind: str) -> str:
    text = escape(p.label or f"step {p.x:g}: {p.y:.4g}")
    return (
        f'<circle class="{kind}" cx="{frame.x(p.x):.1f}" cy="{frame.y(p.y):.1f}" r="3.6"><title>{text}</title></circle>'
    )


def sparkline(values: Sequence[float]) -> str:
    """Values as a run of block characters, for plain text."""
    found = [v for v in values if math.isfinite(v)]
    if not found:
        return ""
    low, high = min(found), max(found)
    marks = "▁▂▃▄▅▆▇█"
    return "".join(marks[round((v - low) / (high - low) * 7) if high > low else 3] for v in found)
