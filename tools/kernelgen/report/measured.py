"""Measured times of kernels: from a table, the backend's profile, test-backend-ops or neuron-profile.

`read` recognizes the formats by their content:

- CSV with the columns `kernel` and `us`.
- The trace that the backend writes for GGML_NEURON_PROFILE: a kernel's time is the median of its launches.
- The output of llama.cpp's `test-backend-ops perf --output sql` (its CSV has no times), or CSV with the columns of that table. The
  SQL is read line by line in the one form that test-backend-ops writes, and not executed.
- The output of `neuron-profile view --output-format summary-json`: `{name: {"total_time": seconds, …}}`. The file's name is the
  kernel's id, `<id>.json`, because the summary does not contain it.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.report import inputs
from kernelgen.spec.kernel import KernelSpec

Times = dict[str, float]
"""Microseconds of a launch, by the kernel's id."""

_PLAIN = {"v": "0", "nf": "1", "perm1": "0", "src_overlap": "0", "per": "[0,1,2,3]", "k_v": "0", "o": "1"}
"""Parameters of cases with contiguous tensors and a graph of one op."""

_PARAM = re.compile(r"(\w+)=(\[[^\]]*\]|[^,]*)")

_CREATE = "CREATE TABLE IF NOT EXISTS test_backend_ops ("
_INSERT = re.compile(r"INSERT INTO test_backend_ops \(([a-z_, ]*)\) VALUES \('(.*)'\);")
"""A row of `sql_printer` in llama.cpp's tests/test-backend-ops.cpp, which writes each value as text and escapes nothing."""


def read(path: Path, specs: Iterable[KernelSpec]) -> Times:
    """Returns the microseconds of a launch, by kernel.

    Args:
        path: a file of one of the formats above.
        specs: specs of op kernels; the cases of test-backend-ops are matched with them.

    Raises:
        KernelgenError: the file has none of the formats, or a time in it is not a number above 0.
        OSError: it can't be read.
    """
    text = inputs.read_text(path)
    start = text.lstrip()[:1]
    if start == "[":
        return _of_profile(path, text)
    if start == "{":
        return _of_summary(path, text)
    if text.lstrip().startswith("CREATE TABLE"):
        return _of_cases(_sql_rows(path, text), specs)
    columns, rows = inputs.read_csv(path, text)
    if {"kernel", "us"} <= columns:
        return {row["kernel"]: inputs.number(f"{location}: us", row["us"]) for location, row in rows}
    if {"op_name", "op_params", "time_us"} <= columns:
        return _of_cases(rows, specs)
    if {"op_name", "op_params"} <= columns:
        raise KernelgenError(
            f"{path}: this CSV of test-backend-ops has no times: run `test-backend-ops perf --output sql` instead"
        )
    raise KernelgenError(
        f"{path}: expected a table with the columns kernel and us, a profile of the backend (GGML_NEURON_PROFILE), what "
        "`test-backend-ops perf --output sql` prints, or a summary of neuron-profile"
    )


def _of_profile(path: Path, text: str) -> Times:
    text = text.rstrip()
    if not text.endswith("]"):  # its program was killed: the last line may be incomplete
        text = text[: text.rfind("\n")].rstrip().rstrip(",") + "]"
    durations = defaultdict(list)
    for event in inputs.read_json(path, text, "a profile of the backend (GGML_NEURON_PROFILE)"):
        try:
            is_launch = event["ph"] == "X" and not event["args"]["failed"]
            kernel, dur = (event["name"], event["dur"]) if is_launch else ("", 0)
        except (KeyError, TypeError):
            kernel = None
        if not isinstance(kernel, str):
            raise KernelgenError(f"{path}: expected events of the backend's profile, not {repr(event)[:200]}")
        if is_launch:
            durations[kernel].append(inputs.number(f"{path}: dur of {kernel}", dur))
    return {kernel: statistics.median(times) for kernel, times in durations.items()}


def _of_summary(path: Path, text: str) -> Times:
    label = "what `neuron-profile view --output-format summary-json` prints"
    profiles = inputs.read_json(path, text, label)
    summary = next(iter(profiles.values()), None)
    if len(profiles) != 1 or not isinstance(summary, dict) or "total_time" not in summary:
        raise KernelgenError(f"{path}: expected {label}: one profile, with total_time in seconds")
    return {path.stem: inputs.number(f"{path}: total_time", summary["total_time"]) * 1e6}


def _sql_rows(path: Path, text: str) -> list[tuple[str, Mapping[str, str]]]:
    """Returns (place, values by column) of the rows that test-backend-ops wrote."""
    rows: list[tuple[str, Mapping[str, str]]] = []
    creates = False
    for number, line in enumerate(text.splitlines(), 1):
        location = f"{path}:{number}"
        insert = _INSERT.fullmatch(line)
        names, values = (insert[1].split(", "), insert[2].split("', '")) if insert else ([], [])
        if creates:
            creates = line != ");"
        elif insert and len(names) == len(values) and {"op_name", "op_params", "time_us"} <= set(names):
            rows.append((location, dict(zip(names, values, strict=True))))
        elif line == _CREATE:
            creates = True
        elif line:
            raise KernelgenError(f"{location}: expected a row as `test-backend-ops perf --output sql` prints it")
    return rows


def _of_cases(rows: Iterable[tuple[str, Mapping[str, str]]], specs: Iterable[KernelSpec]) -> Times:
    """Returns the times of test-backend-ops' cases; omits cases that no kernel, or more than one, computes."""
    by_shape = defaultdict(list)
    for spec in specs:
        first = spec.without_layouts.inputs[:2]
        by_shape[spec.op, tuple(first), spec.output].append(spec.id)
    found: Times = {}
    for location, row in rows:
        if not row["time_us"].strip("0."):  # the backend does not support the case
            continue
        time = inputs.number(f"{location}: time_us", row["time_us"])
        ids = {one for shape in _shapes(row["op_name"], row["op_params"]) for one in by_shape[shape]}
        if len(ids) == 1:
            found[ids.pop()] = time
    return found


Shape = tuple[str, tuple[TensorDesc | None, ...], TensorDesc]
"""An op, its first two inputs and its result."""


def _shapes(name: str, text: str) -> list[Shape]:
    """Returns the computation of a test-backend-ops case, if its known parameters determine it.

    Source: the classes test_mul_mat, test_bin_bcast and test_unary of llama.cpp's tests/test-backend-ops.cpp.
    """
    params = dict(_PARAM.findall(text))
    op = name.lower()
    try:
        if any(params.get(name, plain) != plain for name, plain in _PLAIN.items()):
            return []
        if op == "mul_mat":
            return _products(params)
        ne, dtype = _list(params["ne"] if "ne" in params else params["ne_a"]), params["type"]
        first = TensorDesc.make(ne, dtype)
        if "nr" not in params:
            return [(op, (first,), first)]
        # The first input is repeated to the result's shape: the case gives ne of the second.
        result = TensorDesc.make([n * r for n, r in zip(ne, _list(params["nr"]), strict=True)], dtype)
        return [(op, (result, first), result)]
    except (KeyError, ValueError):
        return []


def _products(params: Mapping[str, str]) -> list[Shape]:
    m, n, k = (int(params[name]) for name in ("m", "n", "k"))
    batch = _list(params["bs"])
    repeated = [b * r for b, r in zip(batch, _list(params["nr"]), strict=True)]
    weights = TensorDesc.make([k, m, *batch], params["type_a"])
    rows = TensorDesc.make([k, n, *repeated], params["type_b"])
    return [("mul_mat", (weights, rows), TensorDesc.make([m, n, *repeated], "f32"))]


def _list(text: str) -> list[int]:
    return [int(n) for n in text.strip("[]").split(",")]
