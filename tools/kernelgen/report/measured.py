"""Measured times of kernels: from a table, the backend's profile, test-backend-ops or neuron-profile.

`read` recognizes the formats by their content:

- CSV with the columns `kernel` and `us`.
- The trace that the backend writes for GGML_NEURON_PROFILE: a kernel's time is the median of its launches.
- The output of llama.cpp's `test-backend-ops perf --output sql` (its CSV has no times), or CSV with the columns of that table.
- The output of `neuron-profile view --output-format summary-json`: `{name: {"total_time": seconds, …}}`. The file's name is the
  kernel's id, `<id>.json`, because the summary does not contain it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sqlite3
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.op_kernel import KernelSpec

Times = dict[str, float]
"""Microseconds of a launch, by the kernel's id."""

_PLAIN = {"v": "0", "nf": "1", "perm1": "0", "src_overlap": "0", "per": "[0,1,2,3]", "k_v": "0", "o": "1"}
"""Parameters of cases with contiguous tensors and a graph of one op."""

_PARAM = re.compile(r"(\w+)=(\[[^\]]*\]|[^,]*)")


def read(path: Path, specs: Iterable[KernelSpec]) -> Times:
    """Returns the microseconds of a launch, by kernel.

    Args:
        path: a file of one of the formats above.
        specs: specs of op kernels; the cases of test-backend-ops are matched with them.

    Raises:
        KernelgenError: the file has none of the formats, or a time in it is not a number above 0.
        OSError: it can't be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KernelgenError(f"{path}: expected text: {error}") from None
    start = text.lstrip()[:1]
    if start == "[":
        return _of_profile(path, text)
    if start == "{":
        return _of_summary(path, text)
    if text.lstrip().startswith("CREATE TABLE"):
        return _of_cases(path, _sql_rows(path, text), specs)
    rows = csv.DictReader(io.StringIO(text, newline=""))
    columns = set(rows.fieldnames or ())
    if {"kernel", "us"} <= columns:
        return {row["kernel"]: _number(f"{path}:{rows.line_num}: us", row["us"]) for row in rows}
    if {"op_name", "op_params", "time_us"} <= columns:
        return _of_cases(path, list(rows), specs)
    if {"op_name", "op_params"} <= columns:
        raise KernelgenError(
            f"{path}: this CSV of test-backend-ops has no times: run `test-backend-ops perf --output sql` instead"
        )
    raise KernelgenError(
        f"{path}: expected a table with the columns kernel and us, a profile of the backend (GGML_NEURON_PROFILE), what "
        "`test-backend-ops perf --output sql` prints, or a summary of neuron-profile"
    )


def _number(where: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise KernelgenError(f"{where} is {value!r}; expected microseconds") from None
    if not 0 < found < math.inf:
        raise KernelgenError(f"{where} is {value}; expected a number above 0")
    return found


def _json(path: Path, text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise KernelgenError(f"{path}: expected {what}: {error}") from None


def _of_profile(path: Path, text: str) -> Times:
    text = text.rstrip()
    if not text.endswith("]"):  # its program was killed: the last line may be incomplete
        text = text[: text.rfind("\n")].rstrip().rstrip(",") + "]"
    found = defaultdict(list)
    for event in _json(path, text, "a profile of the backend (GGML_NEURON_PROFILE)"):
        try:
            if event["ph"] == "X" and not event["args"]["failed"]:
                found[event["name"]].append(float(event["dur"]))
        except (KeyError, TypeError, ValueError):
            raise KernelgenError(f"{path}: expected events of the backend's profile, not {event!r}") from None
    return {kernel: statistics.median(times) for kernel, times in found.items()}


def _of_summary(path: Path, text: str) -> Times:
    what = "what `neuron-profile view --output-format summary-json` prints"
    found = _json(path, text, what)
    summary = next(iter(found.values()), None)
    if len(found) != 1 or not isinstance(summary, dict) or "total_time" not in summary:
        raise KernelgenError(f"{path}: expected {what}: one profile, with total_time in seconds")
    return {path.stem: _number(f"{path}: total_time", summary["total_time"]) * 1e6}


def _sql_rows(path: Path, text: str) -> list[dict[str, Any]]:
    """Returns the rows of a table that an SQL script creates; the script may do nothing else."""
    allowed = {sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_READ}
    allowed |= {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_TRANSACTION}
    database = sqlite3.connect(":memory:")
    database.row_factory = sqlite3.Row
    database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY)
    try:
        database.executescript(text)
        rows = database.execute("SELECT op_name, op_params, time_us FROM test_backend_ops").fetchall()
    except sqlite3.Error as error:
        raise KernelgenError(f"{path}: expected what `test-backend-ops perf --output sql` prints: {error}") from None
    finally:
        database.close()
    return [dict(row) for row in rows]


def _of_cases(path: Path, rows: Iterable[Mapping[str, Any]], specs: Iterable[KernelSpec]) -> Times:
    """Returns the times of test-backend-ops' cases; omits cases that no kernel, or more than one, computes."""
    by_shape = defaultdict(list)
    for spec in specs:
        inputs = spec.without_layouts.inputs
        by_shape[spec.op, tuple(inputs[:2]), spec.output].append(spec.id)
    found: Times = {}
    for row in rows:
        if not row["time_us"] or float(row["time_us"]) == 0:  # the backend does not support the case
            continue
        time = _number(f"{path}: time_us of {row['op_name']}({row['op_params']})", row["time_us"])
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
