"""The page of a report, and its table as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jinja2

from kernelgen.report import kernel_page, plots
from kernelgen.report.numbers import PARTS

COLUMNS = {
    "title": ("kernel", "what it computes, and the id that bundles and the backend's log have for it"),
    "kind": ("op", "ggml's op; a group is one program for several nodes"),
    "nodes": ("nodes", "nodes of ggml's graph that a launch computes"),
    "per_token": ("per token", "launches for one token"),
    "per_prompt": ("per prompt", "launches for the prompt"),
    "flops": ("GFLOPs", "10⁹ FLOPs of a launch's products, by type: two for each multiply-add"),
    "mb": ("MB moved", "10⁶ bytes of device memory that a launch reads and writes"),
    "intensity": ("FLOPs per byte", "the two columns before, divided"),
    "bound": ("bound by", "what takes the largest part of a launch's time"),
    "lower_bound_us": (
        "lower bound, µs",
        "the longer of two times: moving these bytes, and computing the products at the tensor engine's full rate",
    ),
    "us": ("modelled, µs", "the forecast time of a launch"),
    "measured_us": ("measured, µs", "the time of a launch in the files of --measured"),
    "share": (
        "share, %",
        "the part of the forecast time: of one token, or without a model of one launch of each kernel",
    ),
    "padding": (
        "padding, %",
        "the part of the tensor engine's work that the kernel does not need: a product with one row takes as long as one with "
        "128 rows. It costs no time where memory is the bound",
    ),
    "neff_mb": ("NEFF, MB", "the size of the compiled program"),
    "compile_s": ("compile time, s", "the time that neuronx-cc took on this machine"),
}
"""Columns of the table of kernels: key, heading and meaning. FLOPs have a column for each dtype."""
WORDS = ("title", "kind", "bound")
"""The columns with text; the others have numbers."""
CSV_COLUMNS = (
    *("id", "title", "kind", "nodes", "per_token", "per_prompt", "intensity", "bound", "lower_bound_us", "us"),
    *("measured_us", "share", "padding", "neff_bytes", "compile_s", "bytes"),
)
"""The keys of a kernel in the CSV; a column of FLOPs for each dtype follows."""


def row(kernel: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a kernel's values by column of the page."""
    found = {name: kernel.get(name) for name in COLUMNS}
    del found["flops"]
    found |= {_flops_column(dtype): flops / 1e9 for dtype, flops in kernel["flops"].items()}
    found["mb"] = kernel["bytes"] / 1e6
    found["neff_mb"] = None if kernel["neff_bytes"] is None else kernel["neff_bytes"] / 1e6
    found["share"] = kernel["share"] * 100
    found["padding"] = kernel["padding"] * 100
    return found


def _flops_column(dtype: str) -> str:
    return f"flops_{dtype}"


def _dtypes(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the dtypes of the kernels' products, sorted."""
    return sorted({dtype for kernel in kernels for dtype in kernel["flops"]})


def _columns(kernels: Sequence[Mapping[str, Any]], unused: Collection[str]) -> dict[str, str]:
    """Returns the headings of the page's table, with a column of FLOPs for each dtype."""
    found: dict[str, str] = {}
    for name, (heading, _) in COLUMNS.items():
        if name == "flops":
            found |= {_flops_column(dtype): f"{heading}, {dtype}" for dtype in _dtypes(kernels)}
        elif name not in unused:
            found[name] = heading
    return found


def text(value: Any) -> str:
    """Returns a value as text, a float with three significant digits; empty if unavailable."""
    if value is None:
        return ""
    if isinstance(value, float):
        rounded = float(f"{value:.3g}")
        return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(numbers: Mapping[str, Any]) -> str:
    """Returns the table of kernels as CSV; FLOPs have a column for each dtype."""
    dtypes = _dtypes(numbers["kernels"])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*CSV_COLUMNS, *map(_flops_column, dtypes)])
    for kernel in numbers["kernels"]:
        writer.writerow([kernel[n] for n in CSV_COLUMNS] + [kernel["flops"].get(d, 0) for d in dtypes])
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


def of_kernel(row: Mapping[str, Any], made: kernel_page.KernelOrigin, report: str) -> str:
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
            tensors=kernel_page.tensors(made.hlo, row["tensors"]),
            hlo=kernel_page.hlo_text(made.hlo),
            log=made.log,
        )
    )


def page(numbers: Mapping[str, Any], kernels: str | None = None) -> str:
    """Returns the page: self-contained HTML.

    Args:
        numbers: the result of `kernelgen.report.numbers.collect`.
        kernels: the folder beside the page with each kernel's page; None without them.
    """
    by_cache, by_cores = numbers["by_cache"], numbers["by_cores"]
    measured = any(kernel["measured_us"] is not None for kernel in numbers["kernels"])
    unused = set() if measured else {"measured_us"}
    if not numbers["calls"]:
        unused |= {"per_token", "per_prompt"}
    if not numbers["bundles"]:
        unused.add("neff_mb")
    if all(kernel["compile_s"] is None for kernel in numbers["kernels"]):
        unused.add("compile_s")
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            numbers=numbers,
            folder=kernels,
            parts=PARTS,
            color=plots.color,
            bars=[plots.bar(call["parts_ms"], _bar_label(call)) for call in numbers["calls"]],
            roofline=plots.roofline(numbers["kernels"], **numbers["roofline"]),
            cache_plot=plots.line(
                [(call["n_kv"], call["tokens_per_s"]) for call in by_cache],
                "cells of the KV cache",
                "tokens per second",
                "Tokens per second over cells of the KV cache; the table below has the numbers",
            ),
            cores_plot=plots.line(
                [(call["cores"], call["tokens_per_s"]) for call in by_cores],
                "cores",
                "tokens per second",
                "Tokens per second over cores; the table below has the numbers",
            ),
            columns=_columns(numbers["kernels"], unused),
            meanings=[meaning for name, meaning in COLUMNS.items() if name not in unused],
            launched=[
                one for one in numbers["kernels"] if not numbers["calls"] or one["per_token"] or one["per_prompt"]
            ],
            words=WORDS,
            row=row,
        )
    )


def _bar_label(call: Mapping[str, Any]) -> str:
    said = ", ".join(f"{PARTS[part]} {ms:.2f}" for part, ms in call["parts_ms"].items() if ms)
    return f"Milliseconds of {call['n_tokens']} tokens by part: {said}"
