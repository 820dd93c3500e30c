"""Draws results as an SVG: costs by number of kernels, and builds against the scripts that people use today.

The same results give the same bytes: the SVG has no date and no random ids, and keeps text as text.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from figures import Figure

_KINDS = {"s": "seconds", "CPU s": "seconds of CPU time", "MB": "peak memory of a process, MB"}
"""The last words of a series' name, after a comma, and the title of its axis."""


def svg(results: Mapping[str, Sequence[Figure]], machine: Mapping[str, Any]) -> bytes:
    """Returns a picture of the figures that belong to a series.

    Args:
        results: the figures by benchmark.
        machine: the description from `machine.describe`.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    found = [figure for figures in results.values() for figure in figures if figure.series]
    lines = {kind: _lines([f for f in found if str(f.series).endswith(f", {kind}")]) for kind in _KINDS}
    drawn = [kind for kind, of_kind in lines.items() if of_kind]
    bars = _bars([f for f in found if ": " in f.what and f.series == f.what.partition(": ")[0]])
    panels = len(drawn) + bool(bars)
    settings = {"svg.hashsalt": "neuron-kernelgen", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with matplotlib.rc_context(settings):
        picture, axes = pyplot.subplots(max(panels, 1), 1, figsize=(9, 5 * max(panels, 1)), squeeze=False)
        at = iter(axes[:, 0])
        for kind in drawn:
            _draw_lines(next(at), kind, lines[kind])
        if bars:
            _draw_bars(next(at), bars)
        if not panels:
            axes[0, 0].set_axis_off()
            axes[0, 0].text(0.5, 0.5, "no series was measured", ha="center")
        load = ", ".join(map(str, machine["load"]))
        picture.suptitle(f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; load {load}", fontsize=9)
        picture.tight_layout(rect=(0, 0, 1, 0.98))
        out = io.BytesIO()
        picture.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(picture)
    # matplotlib leaves trailing blanks.
    return re.sub(rb"[ \t]+\n", b"\n", out.getvalue())


def _lines(found: Sequence[Figure]) -> dict[str, list[tuple[int, float]]]:
    """Returns (kernels, value) by series, for series that have several numbers of kernels."""
    series: dict[str, list[tuple[int, float]]] = {}
    for figure in found:
        if figure.kernels and figure.value > 0:
            series.setdefault(str(figure.series), []).append((figure.kernels, figure.value))
    return {name: sorted(points) for name, points in series.items() if len({n for n, _ in points}) > 1}


def _bars(found: Sequence[Figure]) -> dict[str, dict[str, float]]:
    """Returns seconds by way and case, from figures with names `way: case`."""
    ways: dict[str, dict[str, float]] = {}
    for figure in found:
        way, _, case = figure.what.partition(": ")
        ways.setdefault(way, {})[case] = figure.value
    return ways


def _draw_lines(axes: Any, kind: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    styles = ["-", "--", ":", "-."]
    for number, (name, points) in enumerate(lines.items()):
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            color=f"C{number % 10}",
            linestyle=styles[number // 10 % 4],
            label=name.removesuffix(f", {kind}"),
        )
    sizes = sorted({n for points in lines.values() for n, _ in points})
    # Through the largest cost at the largest size; higher values at smaller sizes are the cost of starting.
    high = max(value for points in lines.values() for _, value in points)
    axes.plot(sizes, [high * n / sizes[-1] for n in sizes], color="0.7", linewidth=0.8, label="linear")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.minorticks_off()
    axes.set_xlabel("kernels")
    axes.set_ylabel(_KINDS[kind])
    axes.grid(True, which="major", color="0.9")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_bars(axes: Any, ways: Mapping[str, Mapping[str, float]]) -> None:
    cases = list(dict.fromkeys(case for of_way in ways.values() for case in of_way))
    width = 0.8 / len(ways)
    for number, (way, values) in enumerate(ways.items()):
        places = [at + (number - (len(ways) - 1) / 2) * width for at in range(len(cases))]
        bars = axes.bar(places, [values.get(case, 0.0) for case in cases], width, label=way, color=f"C{number}")
        axes.bar_label(bars, fmt="%.3g", fontsize=6)
    axes.set_xticks(range(len(cases)), [textwrap.fill(case, 16) for case in cases])
    axes.set_ylabel("seconds")
    axes.grid(True, axis="y", which="major", color="0.9")
    axes.set_axisbelow(True)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
