"""Small charts as SVG, for a page that carries all it needs."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[float, float]]

_W, _H, _LEFT, _BASE = 420, 200, 52, 172  # the axes end at x = _W - 8, y = 8
_COLOURS = ("#3b82f6", "#d97706", "#10b981", "#8b5cf6", "#ef4444", "#64748b")

STYLE = (
    "svg{max-width:100%;height:auto}svg text{font-size:11px;fill:currentColor}"
    ".axis{stroke:currentColor;opacity:.35;fill:none}"
    ".line{fill:none;stroke-width:1.6}"
    + "".join(
        f".c{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(_COLOURS)
    )
)


def lines(
    title: str, series: Mapping[str, Points], square: bool = False
) -> str:
    """Up to six lines over one pair of axes.

    Args:
        title: above the chart.
        series: points (x, y) by name; those that are not finite are left out.
        square: both axes have the same range, and a diagonal is drawn.
    """
    kept = {
        name: [p for p in points if math.isfinite(p[1])]
        for name, points in list(series.items())[: len(_COLOURS)]
    }
    xs = [x for points in kept.values() for x, _ in points]
    ys = [y for points in kept.values() for _, y in points]
    if not xs:
        return ""
    if square:
        xs = ys = [*xs, *ys, 0.0]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    x1 += x1 == x0
    y1 += (y1 == y0) * (abs(y0) or 1.0)

    def at(x: float, y: float) -> str:
        across = _LEFT + (x - x0) / (x1 - x0) * (_W - 8 - _LEFT)
        return f"{across:.1f},{_BASE - (y - y0) / (y1 - y0) * (_BASE - 8):.1f}"

    body = [_axes(x0, x1, y0, y1)]
    if square:
        ends = f"{at(x0, y0)} {at(x1, y1)}"
        body.append(f'<polyline class="axis" points="{ends}"/>')
    for i, points in enumerate(kept.values()):
        where = " ".join(at(x, y) for x, y in points)
        body.append(f'<polyline class="line c{i}" points="{where}"/>')
        if len(points) < 30:
            body += (
                '<circle class="f{}" r="2.5" cx="{}" cy="{}"/>'.format(
                    i, *at(x, y).split(",")
                )
                for x, y in points
            )
    names = " ".join(
        f'<span style="color:{_COLOURS[i]}">■</span> {html.escape(name)}'
        for i, name in enumerate(kept)
    )
    return _figure(title, body, names if len(kept) > 1 else "")


def bars(title: str, counts: Sequence[float], x0: float, x1: float) -> str:
    """A histogram of equal bins from x0 to x1."""
    if not counts:
        return ""
    wide, top = (_W - 8 - _LEFT) / len(counts), max(counts) or 1
    body = [_axes(x0, x1, 0, top)]
    for i, count in enumerate(counts):
        high = count / top * (_BASE - 8)
        body.append(
            f'<rect class="f0" x="{_LEFT + i * wide:.1f}" '
            f'y="{_BASE - high:.1f}" width="{max(wide - 1, 0.5):.1f}" '
            f'height="{high:.1f}"/>'
        )
    return _figure(title, body)


def _axes(x0: float, x1: float, y0: float, y1: float) -> str:
    return (
        f'<polyline class="axis" points="{_LEFT},8 {_LEFT},{_BASE} '
        f'{_W - 8},{_BASE}"/>'
        f'<text x="{_LEFT - 5}" y="16" text-anchor="end">{_number(y1)}</text>'
        f'<text x="{_LEFT - 5}" y="{_BASE}" text-anchor="end">'
        f"{_number(y0)}</text>"
        f'<text x="{_LEFT}" y="{_H - 12}">{_number(x0)}</text>'
        f'<text x="{_W - 8}" y="{_H - 12}" text-anchor="end">'
        f"{_number(x1)}</text>"
    )


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _figure(title: str, body: Sequence[str], names: str = "") -> str:
    title = html.escape(title)
    return (
        f"<figure><figcaption>{title}</figcaption>"
        f'<svg role="img" viewBox="0 0 {_W} {_H}" width="{_W}">'
        f"<title>{title}</title>{''.join(body)}</svg><small>{names}</small>"
        "</figure>"
    )
