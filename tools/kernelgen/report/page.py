"""The page of a report, and its table as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from kernelgen.report import kernel_page, plots
from kernelgen.report.numbers import PARTS

COLUMNS = {
    "id": "kernel",
    "kind": "op",
    "nodes": "nodes",
    "per_token": "per token",
    "per_prompt": "per prompt",
    "gflops": "GFLOPs",
    "mb": "MB moved",
    "intensity": "FLOPs per byte",
    "bound": "bound by",
    "lower_bound_us": "lower bound, µs",
    "us": "modelled, µs",
    "measured_us": "measured, µs",
    "share": "share of a token, %",
    "padding": "padding, %",
    "neff_bytes": "NEFF, bytes",
    "compile_s": "compile time, s",
}
"""Columns of the table of kernels: the key of a row and the heading."""
WORDS = ("id", "kind", "bound")
"""The columns with text; the others have numbers."""


def row(kernel: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a kernel's values by column."""
    found = {name: kernel.get(name) for name in COLUMNS}
    found["gflops"] = sum(kernel["flops"].values()) / 1e9
    found["mb"] = kernel["bytes"] / 1e6
    found["share"] = kernel["share"] * 100
    found["padding"] = kernel["padding"] * 100
    return found


def text(value: Any) -> str:
    """Returns a table's value as text; empty if unavailable."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)


def table(numbers: Mapping[str, Any]) -> str:
    """Returns the table of kernels as CSV; FLOPs have a column for each dtype."""
    dtypes = sorted({dtype for kernel in numbers["kernels"] for dtype in kernel["flops"]})
    names = [name for name in COLUMNS if name not in ("gflops", "mb")]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "bytes", *(f"flops_{dtype}" for dtype in dtypes)])
    for kernel in numbers["kernels"]:
        writer.writerow([kernel[n] for n in names] + [kernel["bytes"]] + [kernel["flops"].get(d, 0) for d in dtypes])
    return out.getvalue()


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kernelgen.report", "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["text"] = text
    return environment


def of_kernel(row: Mapping[str, Any], made: kernel_page.Made, report: str) -> str:
    """Returns the page of a kernel, in a folder beside the report.

    Args:
        row: its numbers (`kernelgen.report.numbers.collect`).
        made: its origin.
        report: the report's file name.
    """
    return (
        _environment()
        .get_template("kernel.html.j2")
        .render(
            row=row,
            report=report,
            parts=PARTS,
            facts=kernel_page.facts(row, made),
            tensors=kernel_page.tensors(made.hlo),
            hlo=kernel_page.hlo_text(made.hlo),
            log=made.log,
        )
    )


def page(
    numbers: Mapping[str, Any], differences: Sequence[Mapping[str, Any]] | None = None, kernels: str | None = None
) -> str:
    """Returns the page: self-contained HTML.

    Args:
        numbers: the result of `kernelgen.report.numbers.collect`.
        differences: from a baseline (`kernelgen.report.baseline`); None without one.
        kernels: the folder beside the page with each kernel's page; None without them.
    """
    by_cache, by_cores = numbers["by_cache"], numbers["by_cores"]
    measured = any(kernel["measured_us"] is not None for kernel in numbers["kernels"])
    unused = set() if measured else {"measured_us"}
    if not numbers["calls"]:
        unused |= {"per_token", "per_prompt"}
    if not numbers["bundles"]:
        unused.add("neff_bytes")
    if all(kernel["compile_s"] is None for kernel in numbers["kernels"]):
        unused.add("compile_s")
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            numbers=numbers,
            differences=differences,
            folder=kernels,
            parts=PARTS,
            color=plots.color,
            bars=[plots.bar(call["parts_ms"], _bar_label(call)) for call in numbers["calls"]],
            roofline=plots.roofline(numbers["kernels"], **numbers["roofline"]),
            cache_plot=plots.line(
                [(call["n_kv"], call["tokens_per_s"]) for call in by_cache],
                "cells of the cache",
                "tokens per second",
                "Tokens per second over cells of the cache; the table below has the numbers",
            ),
            cores_plot=plots.line(
                [(call["cores"], call["tokens_per_s"]) for call in by_cores],
                "cores",
                "tokens per second",
                "Tokens per second over cores; the table below has the numbers",
            ),
            columns={name: heading for name, heading in COLUMNS.items() if name not in unused},
            words=WORDS,
            row=row,
        )
    )


def _bar_label(call: Mapping[str, Any]) -> str:
    said = ", ".join(f"{PARTS[part]} {ms:.2f}" for part, ms in call["parts_ms"].items() if ms)
    return f"Milliseconds of {call['n_tokens']} tokens by part: {said}"
