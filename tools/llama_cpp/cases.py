"""The cases of test-backend-ops: their list, the kernels that each requests from the device, and their outcomes.

`GGML_BACKEND_PATH` is always set for the program, so that it has the device. This module reads both output streams as
one, line by line: the backend reports the ops without a kernel (`GGML_NEURON_LOG=2`) just before the program's row for
the case.
"""

from __future__ import annotations

import csv
import math
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import harness
import recordings

from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library

PASSED, FAILED, UNCOMPARED, UNSUPPORTED = "passed", "failed", "uncompared", "unsupported"
"""The statuses of a case. The device supports an `uncompared` case and llama.cpp's CPU backend does not, so it is not run."""

# A row of the program's CSV. The message of a failed comparison stands before it, on the same line.
_ROW = re.compile(r'^(?P<note>[^"]*)(?P<row>"[^"]*",".*)$')

_OWN = ("ggml-neuron:", "load_backend:")

_SHAPE = re.compile(r"\((\d+),(\d+),(\d+),(\d+)\)/")

# Types whose first quantization is slow: ggml builds tables for seconds in each process.
_SLOW_TYPES = re.compile(r"iq[123]_")


@dataclass(frozen=True)
class CaseRow:
    """A row of the program's CSV.

    Attributes:
        case: `OP(params)`, as the program's `-o` takes it.
        backends: the backends that refused the case, or the backend that ran it.
        supported: whether all backends support it.
        error: the error, empty if it passed.
        note: the message of the comparison.
        nodes: the nodes without a kernel, each with the reason why none can be built, or None if one can.
        seconds: the time since the row before it, or since the program began.
    """

    case: str
    backends: str
    supported: bool
    error: str
    note: str = ""
    nodes: tuple[tuple[str, str | None], ...] = ()
    seconds: float = 0.0

    @property
    def op(self) -> str:
        return op_of(self.case)

    @property
    def elements(self) -> int:
        """The elements of all tensors of the requested nodes, an estimate of the case's cost."""
        shapes = [shape for node, _ in self.nodes for shape in _SHAPE.findall(node)]
        return sum(math.prod(map(int, shape)) for shape in shapes)

    @property
    def status(self) -> str:
        if self.supported:
            return FAILED if self.error else PASSED
        return UNSUPPORTED if harness.DEVICE in self.backends else UNCOMPARED


def op_of(case: str) -> str:
    """Returns the op of a case, by the program's name for it."""
    return case.partition("(")[0]


class Reader:
    """Reads the program's output line by line.

    Attributes:
        rows: the rows read so far.
        log: the last of the other lines.
    """

    def __init__(self) -> None:
        self.rows: list[CaseRow] = []
        self.log: list[str] = []
        self._header: list[str] | None = None
        self._nodes: list[tuple[str, str | None]] = []
        self._catalog = Catalog([builtin_library()])
        self._last = time.monotonic()

    def line(self, line: str) -> None:
        line = line.rstrip("\n")
        if missing := recordings.missing_of(line, self._catalog):
            self._nodes.append(missing)
            return
        match = None if line.startswith(_OWN) else _ROW.match(line)
        values = next(csv.reader([match["row"]])) if match else []
        if match and self._header is None:
            self._header = values
        elif match and self._header is not None and len(values) == len(self._header):
            row = dict(zip(self._header, values, strict=True))
            now = time.monotonic()
            self.rows.append(
                CaseRow(
                    f"{row['op_name']}({row['op_params']})",
                    row["backend_name"],
                    row["supported"] == "1",
                    "" if row["test_mode"] == "support" else row["error_message"],
                    match["note"].strip(),
                    tuple(dict.fromkeys(self._nodes)),
                    round(now - self._last, 4),
                )
            )
            self._nodes = []
            self._last = now
        else:
            self.log.append(line)
            del self.log[:-4000]


@dataclass(frozen=True)
class ProgramExit:
    """The end of a run of the program.

    Attributes:
        rows: the rows that it printed.
        log: the last of its other lines.
        status: its exit status; None if it exceeded the timeout and was killed.
    """

    rows: list[CaseRow]
    log: str
    status: int | None


def run(
    programs: harness.Programs,
    mode: str,
    environment: dict[str, str],
    *,
    chosen: Sequence[str] = (),
    params: str | None = None,
    timeout: float = 3600,
    each: Callable[[int], None] | None = None,
) -> ProgramExit:
    """Runs test-backend-ops on the device.

    Args:
        programs: the programs to run.
        mode: `test` or `support`.
        environment: see `harness.Programs.environment`.
        chosen: ops, regular expressions for ops, or whole cases; all if empty.
        params: a regular expression for parameters.
        timeout: seconds.
        each: called at each row, with the number of rows so far.

    Raises:
        RuntimeError: the device was missing, or no such case exists; the program itself reports success then.
    """
    arguments = [mode, "-b", harness.DEVICE, "--output", "csv"]
    if chosen:
        arguments += ["-o", ",".join(chosen)]
    if params:
        arguments += ["-p", params]
    reader = Reader()
    # Line-buffered, so that the output of a program that crashes is complete.
    with subprocess.Popen(
        ["stdbuf", "-oL", programs.llama_cpp / "test-backend-ops", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout, stop)
        timer.start()
        try:
            assert process.stdout
            known = 0
            for line in process.stdout:
                reader.line(line)
                if each and len(reader.rows) > known:
                    known = len(reader.rows)
                    each(known)
            status: int | None = process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
    if late.is_set():
        status = None
    if status in (0, 1) and not any(harness.DEVICE in row.backends for row in reader.rows):
        what = ",".join(chosen)[:200] or "at all"
        raise RuntimeError(
            f"test-backend-ops had no device {harness.DEVICE}, or no case of {what}:\n" + "\n".join(reader.log[-40:])
        )
    return ProgramExit(reader.rows, "\n".join(reader.log), status)


# --- the list of cases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Cases that are built and run together.

    Attributes:
        name: the name of its folder.
        cases: each case, with the number of times that the program has it.
        nodes: the nodes that the cases request, each with the reason why no kernel can be built, or None.
        asks: for each case, the indices of its nodes.
    """

    name: str
    cases: dict[str, int]
    nodes: list[tuple[str, str | None]]
    asks: dict[str, list[int]]

    @property
    def size(self) -> int:
        return sum(self.cases.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Group:
        return Group(value["name"], value["cases"], [(n, r) for n, r in value["nodes"]], value["asks"])


def listing(
    programs: harness.Programs, empty: Path, *, chosen: Sequence[str] = (), params: str | None = None
) -> list[CaseRow]:
    """Returns every case that the program would test, with the nodes that it requests: without kernels, nothing runs.

    Args:
        programs: the programs to run.
        empty: a folder for the one kernel that the backend requires.
        chosen: see `run`.
        params: see `run`.

    Raises:
        RuntimeError: there is no device or no such case, or the program failed.
    """
    environment = programs.environment(kernels=harness.odd_kernel(empty), log=2)
    ended = run(programs, "test", environment, chosen=chosen, params=params)
    if ended.status != 0:
        raise RuntimeError(f"test-backend-ops ended with status {ended.status}:\n{ended.log[-4000:]}")
    return ended.rows


MOST_CASES = 200
"""The most cases in a group: few enough that a kill loses little, and enough that the program's start does not count."""

MOST_BYTES = 100_000
"""The most bytes of a group's cases on the command line; Linux limits an argument to 128 KiB."""


def group(rows: Iterable[CaseRow]) -> list[Group]:
    """Returns the cases in groups. An op with many cases has its own groups. The groups depend on the cases alone."""
    rows = list(rows)
    position = {id(row): number for number, row in enumerate(rows)}
    by_op: dict[str, list[CaseRow]] = {}
    for row in rows:
        by_op.setdefault(row.op, []).append(row)
    groups: list[list[CaseRow]] = []
    small: dict[bool, list[CaseRow]] = {False: [], True: []}
    for of_op in by_op.values():
        if len(of_op) >= MOST_CASES // 2:
            groups += _cut(sorted(of_op, key=_is_slow))
            continue
        for slow, rest in small.items():
            own = [row for row in of_op if _is_slow(row) == slow]
            if len(rest) + len(own) > MOST_CASES or _bytes(rest) + _bytes(own) > MOST_BYTES:
                groups.append(rest)
                rest = []
            small[slow] = rest + own
    groups += [rest for rest in small.values() if rest]
    numbers: Counter[str] = Counter()
    found = []
    for members in groups:
        name = members[0].op
        numbers[name] += 1
        # In the program's order, which identifies the case that ended the program.
        found.append(_made(f"{name}-{numbers[name]}", sorted(members, key=lambda row: position[id(row)])))
    return found


def _is_slow(row: CaseRow) -> bool:
    return bool(_SLOW_TYPES.search(row.case))


def _bytes(rows: Iterable[CaseRow]) -> int:
    return sum(len(case) + 1 for case in {row.case for row in rows})


def _cut(rows: list[CaseRow]) -> list[list[CaseRow]]:
    """Cuts an op's cases into groups of equal size; a case that the program has twice stays in one group."""
    cases: dict[str, list[CaseRow]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    pieces = max(-(-len(cases) // MOST_CASES), -(-_bytes(rows) // (MOST_BYTES * 9 // 10)))
    keys = list(cases)
    return [
        [row for key in keys[i * len(keys) // pieces : (i + 1) * len(keys) // pieces] for row in cases[key]]
        for i in range(pieces)
    ]


def _made(name: str, rows: Sequence[CaseRow]) -> Group:
    nodes: dict[tuple[str, str | None], int] = {}
    asks: dict[str, list[int]] = {}
    for row in rows:
        asks[row.case] = [nodes.setdefault(node, len(nodes)) for node in row.nodes]
    return Group(name, dict(Counter(row.case for row in rows)), list(nodes), asks)


# --- the outcomes of cases ------------------------------------------------------------------------------------------------


@dataclass
class CaseCount:
    """The cases of one op in the mode `test`.

    Attributes:
        cases: the number of cases.
        supported: the cases that the device supports.
        uncompared: of these, the cases that are not run because llama.cpp's CPU backend does not support them.
        passed: the cases that agreed with the CPU.
        failed: the cases that did not.
    """

    cases: int = 0
    supported: int = 0
    uncompared: int = 0
    passed: int = 0
    failed: int = 0

    def __iadd__(self, other: CaseCount) -> CaseCount:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self


@dataclass
class Result:
    """The result of one case.

    Attributes:
        case: the case.
        status: `passed`, `failed`, `uncompared` or `unsupported`.
        seconds: its duration, including loading its kernels.
        note: why it failed or is not supported.
    """

    case: str
    status: str
    seconds: float = 0.0
    note: str = ""


@dataclass
class TestResults:
    """The results of test-backend-ops.

    Attributes:
        results: one result per case, as many times as the program has it.
        failures: errors outside of single cases.
        ran: the nodes that ran on the device. A case without elements passes and runs none.
    """

    results: list[Result] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ran: int = 0

    @property
    def ok(self) -> bool:
        """Whether something ran and nothing failed."""
        return bool(self.of(PASSED)) and not self.of(FAILED) and not self.failures

    def of(self, status: str) -> list[Result]:
        """Returns the cases with this status."""
        return [result for result in self.results if result.status == status]

    def add(self, other: TestResults) -> None:
        """Adds the cases of another outcome."""
        self.results += other.results
        self.failures += other.failures
        self.ran += other.ran

    def counts(self) -> dict[str, CaseCount]:
        """Returns the counts by op, sorted."""
        found: dict[str, CaseCount] = {}
        for result in self.results:
            count = found.setdefault(op_of(result.case), CaseCount())
            count.cases += 1
            if result.status != UNSUPPORTED:
                count.supported += 1
                setattr(count, result.status, getattr(count, result.status) + 1)
        return dict(sorted(found.items()))

    def table(self) -> list[str]:
        """Returns the counts as lines of text."""
        counts = self.counts()
        total = CaseCount()
        for count in counts.values():
            total += count
        width = max([20, *(len(op) + 1 for op in counts)])
        lines = [f"{'op':<{width}}{'cases':>8}{'supported':>11}{'uncompared':>12}{'passed':>8}{'failed':>8}"]
        for op, c in [*counts.items(), ("all", total)]:
            lines.append(f"{op:<{width}}{c.cases:>8}{c.supported:>11}{c.uncompared:>12}{c.passed:>8}{c.failed:>8}")
        return [*lines, f"{self.ran} nodes ran on the device"]


def split_cases(text: str) -> list[str]:
    """Splits a comma-separated list of ops and whole cases, which have commas of their own between parentheses."""
    return [part for part in re.split(r",(?![^()]*\))", text) if part]
