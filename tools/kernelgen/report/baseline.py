"""The differences between two reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernelgen.errors import KernelgenError
from kernelgen.report import inputs
from kernelgen.report.numbers import FORMAT


def read(path: Path) -> dict[str, Any]:
    """Returns the numbers of a report's JSON.

    Raises:
        KernelgenError: the file is not a report, or a time that `differences` compares is not a number above 0.
        OSError: it can't be read.
    """
    label = "the JSON that `kernelgen report` writes"
    report = inputs.read_json(path, inputs.read_text(path), label)
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise KernelgenError(f"{path}: expected a report of format {FORMAT}; write it again with this kernelgen")
    try:
        report["target"], report["lnc"]
        for call in report["calls"]:
            call["ms"] = inputs.number(f"{path}: ms of {_call_name(call)}", call["ms"])
        for kernel in report["kernels"]:
            kernel["id"] = str(kernel["id"])
            for column in ["us"] if kernel["measured_us"] is None else ["us", "measured_us"]:
                kernel[column] = inputs.number(f"{path}: {column} of {kernel['id']}", kernel[column])
    except (KeyError, TypeError):
        raise KernelgenError(
            f"{path}: expected {label}, with the target, its LNC, and times of calls and kernels"
        ) from None
    return report


def differences(before: dict[str, Any], now: dict[str, Any], threshold: float) -> list[dict[str, Any]]:
    """Returns the differences in calls and kernels, and for each whether it is a regression.

    For a kernel with measured times in both reports these are compared, else the forecasts.

    Args:
        before: the earlier report.
        now: the later one.
        threshold: the fraction by which a time may grow: 0.05 for 5 %.

    Raises:
        KernelgenError: the reports are for different targets.
    """
    places = [(one["target"], one["lnc"]) for one in (before, now)]
    if places[0] != places[1]:
        (target, lnc), (other, other_lnc) = places
        raise KernelgenError(
            f"the baseline is for {target} with LNC {lnc}, and this report for {other} with LNC {other_lnc}"
        )
    found = []
    calls = {_call_name(call): call for call in before["calls"]}
    for call in now["calls"]:
        old = calls.get(_call_name(call))
        if old is not None:
            found.append(_difference(_call_name(call), "ms", old["ms"], call["ms"], threshold))
    kernels = {kernel["id"]: kernel for kernel in before["kernels"]}
    for kernel in now["kernels"]:
        old = kernels.get(kernel["id"])
        if old is not None:
            measured = old["measured_us"] is not None and kernel["measured_us"] is not None
            column = "measured_us" if measured else "us"
            found.append(_difference(kernel["id"], column, old[column], kernel[column], threshold))
    return [one for one in found if one["before"] != one["now"]]


def _call_name(call: dict[str, Any]) -> str:
    return f"n_tokens {call['n_tokens']}, n_kv {call['n_kv']}"


def _difference(name: str, column: str, before: float, now: float, threshold: float) -> dict[str, Any]:
    return {
        "name": name,
        "column": column,
        "before": before,
        "now": now,
        "regression": now > before * (1 + threshold),
    }
