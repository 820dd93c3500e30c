"""Plots of a report as SVG: only shapes and text, so that a page with them needs no script and no library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from kernelgen.report.numbers import PARTS

WIDTH, HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 48
COLORS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#8c6d1f",
    "#7f7f7f",
    "#5d3a9b",
    "#f0e442",
    "#332288",
    "#333333",
)
"""Okabe and Ito's colors, which people with any color vision can distinguish, and more for rare parts."""


def color(part: str) -> str:
    """Returns the color of a part of a call's time."""
    return dict(zip(PARTS, COLORS, strict=True))[part]


def bar(parts_ms: Mapping[str, float], label: str) -> Markup:
    """Returns a call's time as a bar with its parts.

    Args:
        parts_ms: milliseconds of each part.
        label: the alternative text of the picture.
    """
    total = sum(parts_ms.values())
    at, shapes = 0.0, []
    for part in PARTS:
        ms = parts_ms.get(part, 0.0)
        width = WIDTH * ms / total if total else 0.0
        if width > 0:
            shapes.append(
                f'<rect x="{at:.1f}" y="0" width="{width:.1f}" height="28" fill="{color(part)}">'
                f"<title>{PARTS[part]}: {ms:.2f} ms</title></rect>"
            )
        at += width
    return _svg(shapes, label, 28)


class _Axes:
    """Axes of a plot with logarithmic scales."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x0, self.x1 = _decades(xs)
        self.y0, self.y1 = _decades(ys)

    def x(self, value: float) -> float:
        part = (math.log10(value) - self.x0) / (self.x1 - self.x0)
        return _LEFT + part * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        part = (math.log10(value) - self.y0) / (self.y1 - self.y0)
        return HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM)

    def frame(self, x_label: str, y_label: str) -> list[str]:
        shapes = []
        for n in range(self.x0, self.x1 + 1):
            x = self.x(10.0**n)
            shapes.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
            shapes.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 20}" text-anchor="middle">{_power(n)}</text>')
        for n in range(self.y0, self.y1 + 1):
            y = self.y(10.0**n)
            shapes.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            shapes.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_power(n)}</text>')
        return shapes + _labels(x_label, y_label)


def roofline(kernels: Sequence[Mapping[str, Any]], gb_per_s: float, tflops: Mapping[str, float]) -> Markup | None:
    """Returns a plot of FLOP/s over FLOPs per byte for kernels with products, each a link to its row; None if there are none.

    Args:
        kernels: rows of a report.
        gb_per_s: bandwidth of the device's memory.
        tflops: 10¹² FLOP/s of products, by dtype.
    """
    dots = [(k, sum(k["flops"].values()) / k["us"] / 1e3) for k in kernels if k["flops"] and k["us"] and k["bytes"]]
    if not dots:
        return None
    most = max(tflops.values()) * 1e3
    ridge = most / gb_per_s
    xs = [k["intensity"] for k, _ in dots] + [ridge * 4]
    axes = _Axes(xs, [gflops for _, gflops in dots] + [most])
    shapes = axes.frame("FLOPs per byte", "GFLOP/s")
    for value in dict.fromkeys(tflops.values()):
        left, top = max(10.0**axes.x0, 10.0**axes.y0 / gb_per_s), value * 1e3
        points = [(left, left * gb_per_s), (top / gb_per_s, top), (10.0**axes.x1, top)]
        line = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in points)
        dtypes = ", ".join(dtype for dtype, rate in tflops.items() if rate == value)
        shapes.append(f'<polyline class="roof" points="{line}"/>')
        shapes.append(f'<text x="{WIDTH - _RIGHT}" y="{axes.y(top) - 4:.1f}" text-anchor="end">{dtypes}</text>')
    for kernel, gflops in dots:
        name = escape(kernel["id"])
        shapes.append(
            f'<a href="#{name}"><circle cx="{axes.x(kernel["intensity"]):.1f}" cy="{axes.y(gflops):.1f}" r="4">'
            f"<title>{escape(kernel['title'])}: {kernel['intensity']:.3g} FLOPs per byte, {gflops:.4g} GFLOP/s</title></circle></a>"
        )
    return _svg(
        shapes, "Roofline: GFLOP/s of kernels over their FLOPs per byte; the table below has the numbers", HEIGHT
    )


def line(points: Sequence[tuple[int, float]], x_label: str, y_label: str, label: str) -> Markup | None:
    """Returns a line through points, the horizontal scale logarithmic, the vertical one from 0; None for fewer than two points."""
    if len(points) < 2:
        return None
    first, last = math.log2(points[0][0]), math.log2(points[-1][0])
    step = _step(max(y for _, y in points))
    steps = math.ceil(max(y for _, y in points) / step)
    height, width = HEIGHT - _TOP - _BOTTOM, WIDTH - _LEFT - 2 * _RIGHT
    shapes = []
    for n in range(steps + 1):
        at = HEIGHT - _BOTTOM - height * n / steps
        shapes.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        shapes.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{n * step:g}</text>')
    path = []
    for x, y in points:
        across = _LEFT + width * (math.log2(x) - first) / (last - first)
        up = HEIGHT - _BOTTOM - height * y / (steps * step)
        path.append(f"{across:.1f},{up:.1f}")
        shapes.append(f'<text x="{across:.1f}" y="{HEIGHT - _BOTTOM + 20}" text-anchor="middle">{x}</text>')
        title = f"<title>{x} {escape(x_label)}: {y:.3g} {escape(y_label)}</title>"
        shapes.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4">{title}</circle>')
    shapes.append(f'<polyline class="line" points="{" ".join(path)}"/>')
    return _svg(shapes + _labels(x_label, y_label), label, HEIGHT)


def _labels(x_label: str, y_label: str) -> list[str]:
    middle = (HEIGHT - _BOTTOM) / 2
    return [
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="rotate(-90)" x="{-middle:.0f}" y="14" text-anchor="middle">{escape(y_label)}</text>',
    ]


def _step(most: float) -> float:
    """Returns the least of 1, 2 or 5 times a power of ten that fits at most five times into a value."""
    power: float = 10.0 ** math.floor(math.log10(most))
    return next(n * power for n in (0.2, 0.5, 1, 2) if most <= 5 * n * power)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _power(n: int) -> str:
    if 0 <= n <= 3:
        return str(10**n)
    return f"10<tspan dy='-5' font-size='9'>{n}</tspan>"


def _svg(shapes: Sequence[str], label: str, height: int) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(shapes)}</svg>'
    )
