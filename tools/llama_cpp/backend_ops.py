"""Runs llama.cpp's test-backend-ops with kernels for exactly the ops of its cases; docs/reference/backend-ops-tests.md is the manual.

First the backend runs without kernels and reports which kernels each case needs. Then the kernels of each group of
cases are built, and the group runs against the CPU.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import harness

PASSED, FAILED, UNCOMPARED, UNSUPPORTED = "passed", "failed", "uncompared", "unsupported"
"""The statuses of a case. The device supports an `uncompared` case and llama.cpp's CPU backend does not, so it is not run."""

SAMPLE = Path(__file__).with_name("sample.txt")
_HEAD = "# Cases of test-backend-ops, some for each op; a run of all cases with --write-page writes them."
SAMPLE_SIZE = 425
"""The approximate number of cases in the sample."""
DEAREST = 1_000_000
"""The most elements of all tensors that a sample case may have, if its op has smaller cases."""

MOST_CASES = 200
"""The most cases in a group: few enough that a crash loses little, and enough that the program's start does not count."""
MOST_BYTES = 100_000
"""The most bytes of a group's cases on the command line; Linux limits an argument to 128 KiB."""

# A row of the program's CSV. The message of a failed comparison stands before it, on the same line.
_ROW = re.compile(r'^(?P<note>[^"]*)(?P<row>"[^"]*",".*)$')
_SHAPE = re.compile(r"\((\d+),(\d+),(\d+),(\d+)\)/")
_SLOW_TYPES = re.compile(
    r"iq[123]_"
)  # their first quantization is slow: ggml builds tables for seconds in each process


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
    """

    case: str
    backends: str
    supported: bool
    error: str
    note: str = ""
    nodes: tuple[tuple[str, str | None], ...] = ()

    @property
    def op(self) -> str:
        return op_of(self.case)

    @property
    def elements(self) -> int:
        """The elements of all tensors of the requested nodes, an estimate of the case's cost."""
        return sum(math.prod(map(int, shape)) for node, _ in self.nodes for shape in _SHAPE.findall(node))

    @property
    def status(self) -> str:
        if self.supported:
            return FAILED if self.error else PASSED
        return UNSUPPORTED if harness.DEVICE in self.backends else UNCOMPARED


def op_of(case: str) -> str:
    """Returns the op of a case, by the program's name for it."""
    return case.partition("(")[0]


def split_cases(text: str) -> list[str]:
    """Splits a comma-separated list of ops and whole cases, which have commas of their own between parentheses."""
    return [part for part in re.split(r",(?![^()]*\))", text) if part]


def read_rows(output: str) -> list[CaseRow]:
    """Returns the rows of the program's output, both streams in one: a case's nodes without a kernel stand before its row."""
    rows: list[CaseRow] = []
    header: list[str] = []
    nodes: dict[tuple[str, str | None], None] = {}
    for line in output.splitlines():
        if node := harness.missing_node(line):
            nodes[node] = None
            continue
        match = None if line.startswith(("ggml-neuron:", "load_backend:")) else _ROW.match(line)
        values = next(csv.reader([match["row"]])) if match else []
        if match and not header:
            header = values
        elif match and len(values) == len(header):
            row = dict(zip(header, values, strict=True))
            case = f"{row['op_name']}({row['op_params']})"
            supported = row["supported"] == "1"
            note = match["note"].strip()
            rows.append(CaseRow(case, row["backend_name"], supported, row["error_message"], note, tuple(nodes)))
            nodes = {}
    return rows


def run_program(
    programs: harness.Programs, environment: dict[str, str], chosen: Sequence[str] = (), params: str | None = None
) -> tuple[list[CaseRow], str, int]:
    """Runs test-backend-ops on the device; returns its rows, its output, and its exit status.

    Args:
        programs: the programs to run.
        environment: see `harness.Programs.environment`.
        chosen: ops, regular expressions for ops, or whole cases; all if empty.
        params: a regular expression for parameters.

    Raises:
        RuntimeError: the device was missing, or no such case exists; the program itself reports success then.
    """
    # Line-buffered, so that the output of a program that crashes is complete.
    command = ["stdbuf", "-oL", programs.llama_cpp / "test-backend-ops", "test", "-b", harness.DEVICE]
    command += ["--output", "csv", *(["-o", ",".join(chosen)] if chosen else []), *(["-p", params] if params else [])]
    streams = {"capture_output": False, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = harness.run(command, environment, **streams)
    output, status = done.stdout, done.returncode
    rows = read_rows(output)
    if status in (0, 1) and not any(harness.DEVICE in row.backends for row in rows):
        which = ",".join(chosen)[:200] or "at all"
        raise RuntimeError(f"test-backend-ops had no device {harness.DEVICE}, or no case of {which}:\n{output[-4000:]}")
    return rows, output, status


def list_cases(
    programs: harness.Programs, folder: Path, chosen: Sequence[str] = (), params: str | None = None
) -> list[CaseRow]:
    """Returns every case that the program would test, with the nodes that it requests: without kernels, nothing runs.

    Raises:
        RuntimeError: there is no device or no such case, or the program failed.
    """
    environment = programs.environment(kernels=harness.odd_kernel(folder / "odd-kernel"), log=2)
    fits = sum(len(case) + 1 for case in chosen) <= MOST_BYTES
    rows, output, status = run_program(programs, environment, chosen if fits else (), params)
    if status != 0:
        raise RuntimeError(f"test-backend-ops ended with status {status}:\n{output[-4000:]}")
    return [row for row in rows if fits or row.case in chosen or row.op in chosen]


def computed_by(rows: Sequence[CaseRow], language: str, languages: Sequence[str]) -> list[CaseRow]:
    """Returns the cases with a kernel in this language, if kernels may be in `languages`."""
    entries = sorted({node for row in rows for node, reason in row.nodes if reason is None})
    kernels, _, _ = harness.builder().read(entries, languages)
    return [row for row in rows if any(node in kernels and kernels[node].language == language for node, _ in row.nodes)]


# --- groups ----------------------------------------------------------------------------------------------------------------


@dataclass
class GroupResult:
    """The outcome of cases that are built and run together.

    Attributes:
        results: each case with its status, and why it failed or is not supported; as many times as the program has it.
        failures: errors outside of single cases.
        ran: the nodes that ran on the device. A case without elements passes and runs none.
        pack: the kernels.
    """

    results: list[tuple[str, str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ran: int = 0
    pack: harness.BuiltPack = field(default_factory=harness.BuiltPack)

    def of(self, status: str) -> dict[str, str]:
        """Returns the cases with this status, and the note of each."""
        return {case: note for case, of_case, note in self.results if of_case == status}

    @property
    def ok(self) -> bool:
        """Whether something ran and nothing failed."""
        return bool(self.of(PASSED)) and not (self.of(FAILED) or self.failures or self.pack.failed)

    def __iadd__(self, other: GroupResult) -> GroupResult:
        self.results += other.results
        self.failures += other.failures
        self.ran += other.ran
        self.pack.languages += other.pack.languages
        self.pack.failed |= other.pack.failed
        return self


def group(rows: Iterable[CaseRow]) -> dict[str, list[CaseRow]]:
    """Returns the cases in groups, by name, in the program's order; the groups depend on the cases alone."""
    by_case: dict[str, list[CaseRow]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    groups: list[list[str]] = [[]]
    for case in by_case:
        if len(groups[-1]) == MOST_CASES or sum(len(other) + 1 for other in [*groups[-1], case]) > MOST_BYTES:
            groups.append([])
        groups[-1].append(case)
    named = {}
    for cases in groups:
        digest = hashlib.sha256("\n".join(cases).encode()).hexdigest()
        named[f"{op_of(cases[0])}-{digest[:12]}"] = [row for case in cases for row in by_case[case]]
    return named


def run_group(
    programs: harness.Programs, rows: Sequence[CaseRow], folder: Path, languages: Sequence[str] = ()
) -> GroupResult:
    """Builds the kernels of some cases, and runs the cases."""
    result = GroupResult()
    with harness.builder().lock:
        entries = sorted({node for row in rows for node, reason in row.nodes if reason is None})
        kernels, request, refused = harness.builder().read(entries, languages)
        if request:
            result.pack = harness.builder().pack(request, folder / "kernels")
    refused |= {e: result.pack.refused[k.spec.id] for e, k in kernels.items() if k.spec.id in result.pack.refused}
    packs = folder / "kernels" if result.pack.kernels else harness.odd_kernel(folder / "odd-kernel")
    environment = programs.environment(kernels=packs, log=True) | {"OMP_THREAD_LIMIT": "1"}
    waiting, asked = Counter(row.case for row in rows), {row.case: row for row in rows}
    ran_rows, output, status = run_program(programs, environment, list(waiting))
    tail = "\n".join(output.splitlines()[-12:])[-2000:]
    for row in ran_rows:
        waiting[row.case] -= 1
        note = {FAILED: row.note or row.error, UNSUPPORTED: _why(asked[row.case], refused)}.get(row.status, "")
        result.results.append((row.case, row.status, note))
    ran = harness.ran(output)
    result.ran = ran.device.total()
    if ran.cpu:
        result.failures.append(f"the backend ran ops on the CPU: {ran.on_cpu}: {tail}")
    # The program runs the cases in its own order, which is also the group's order.
    result.results += [(case, FAILED, "not run: a case before it ended the program") for case in waiting.elements()]
    if status != (1 if any(row.status == FAILED for row in ran_rows) else 0):
        result.failures.append(f"exit status {status}, at {next(waiting.elements(), 'the end')}: {tail}")
    return result


def _why(row: CaseRow, refused: Mapping[str, str]) -> str:
    """Returns why a case is not supported: its nodes without a kernel."""
    reasons = {}
    for node, reason in row.nodes:
        if reason := reason or refused.get(node):
            reasons[f"{harness.op_of_node(node).upper()}: {harness.generalize(reason)}"] = None
    return "; ".join(reasons) or "a kernel was not built"


def run(
    programs: harness.Programs,
    rows: Sequence[CaseRow],
    folder: Path,
    *,
    languages: Sequence[str] = (),
    work: Path | None = None,
    jobs: int | None = None,
) -> GroupResult:
    """Builds and runs cases from `list_cases`, and returns the findings.

    Args:
        programs: the programs to run.
        rows: the cases.
        folder: the folder for kernels.
        languages: the languages that may compute the kernels, the first choice first; JAX if empty.
        work: see `harness.survey`.
        jobs: see `harness.survey`.
    """
    groups = group(rows)

    def line(name: str, done: GroupResult) -> str:
        passed, failed = len(done.of(PASSED)), len(done.of(FAILED))
        return f"{name}: {len(done.results)} cases, {passed} passed, {failed} failed, {done.pack.kernels} kernels"

    done = harness.survey(
        list(groups),
        lambda name: run_group(programs, groups[name], folder / name, languages),
        line,
        work=work,
        jobs=jobs,
    )
    result = GroupResult()
    for of_group in done.values():
        result += of_group
    return result


# --- the sample ------------------------------------------------------------------------------------------------------------


def sample() -> list[str]:
    """Returns the cases of sample.txt."""
    return [line for line in SAMPLE.read_text().splitlines() if line and not line.startswith("#")]


def choose(costs: Mapping[str, int], size: int = SAMPLE_SIZE) -> list[str]:
    """Chooses about `size` cases: some of each op, more of ops with more cases, spread evenly, the cheapest of each stretch.

    Args:
        costs: the cost of each case that may be chosen, in the program's order.
        size: the number of cases.
    """
    by_op: dict[str, list[str]] = {}
    for case in costs:
        by_op.setdefault(op_of(case), []).append(case)

    def quota(n: int, share: float) -> int:
        return min(n, max(2, round(share * n**0.5)))

    # Each op gets a share in proportion to the square root of its number of cases: no op fills the sample, none is left
    # out.
    share = 0.0
    while share < size and sum(quota(len(of_op), share) for of_op in by_op.values()) < size:
        share += 0.05
    chosen: list[str] = []
    for of_op in by_op.values():
        cheap = [case for case in of_op if costs[case] <= DEAREST] or [min(of_op, key=costs.__getitem__)]
        n = min(quota(len(of_op), share), len(cheap))
        for i in range(n):
            stretch = cheap[i * len(cheap) // n : (i + 1) * len(cheap) // n]
            chosen.append(min(stretch, key=costs.__getitem__))
    return chosen


# --- the report ------------------------------------------------------------------------------------------------------------

STATUSES = (UNCOMPARED, PASSED, FAILED)


def by_op(result: GroupResult) -> dict[str, tuple[int, ...]]:
    """Returns for each op, and for `all`: the cases, the supported ones, and of these those of each of `STATUSES`."""
    ops = sorted({op_of(case) for case, _, _ in result.results})
    found = {}
    for name in [*ops, "all"]:
        statuses = Counter(status for case, status, _ in result.results if name in ("all", op_of(case)))
        total = statuses.total()
        found[name] = (total, total - statuses[UNSUPPORTED], *(statuses[status] for status in STATUSES))
    return found


def page(result: GroupResult) -> Iterator[str]:
    """Yields the part of docs/results/ops.md that a run of all cases writes."""
    rows = by_op(result)
    cases, supported, uncompared, passed, failed = rows["all"]
    yield (
        f"The device supports {supported:,} of {cases:,} cases: {passed:,} passed, {failed:,} failed, and {uncompared:,} "
        "did not run because llama.cpp's CPU backend cannot compute them."
    )
    yield from ("", "| Operation | cases | supported | not comparable | passed | failed |", "|---|--:|--:|--:|--:|--:|")
    yield from (harness.row(op, *numbers) for op, numbers in rows.items())
    yield from ("", "## Cases left out, and why", "", "| Operation | cases | reason |", "|---|--:|---|")
    left_out = Counter((op_of(case), note) for case, status, note in result.results if status == UNSUPPORTED)
    for (op, note), n in sorted(left_out.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
        yield harness.row(op, n, note.replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*"))


def report(result: GroupResult) -> None:
    """Prints the table, the unsupported cases, and the failures."""
    print(*page(result), "", sep="\n")
    print(f"{result.ran} nodes ran on the device; kernels by language: {harness.counts(result.pack.languages)}")
    for kernel, error in result.pack.failed.items():
        print(f"failed to build: {kernel}: {error}")
    for case, note in result.of(FAILED).items():
        print(f"failed: {case}: {note}")
    for failure in result.failures:
        print(f"failed: {failure}")


def main(programs: harness.Programs, args: argparse.Namespace) -> bool:
    """Runs the suite; returns whether nothing failed."""
    chosen = sample() if args.sample else split_cases(args.only or "")
    languages = [name for name in args.languages.split(",") if name]
    with tempfile.TemporaryDirectory() as scratch:
        rows = list_cases(programs, Path(scratch), chosen, args.params)
        if args.computed_by:
            rows = computed_by(rows, args.computed_by, languages)
        result = run(programs, rows, Path(scratch), languages=languages, work=args.work, jobs=args.jobs)
    report(result)
    listed, ran = Counter(row.case for row in rows), Counter(case for case, _, _ in result.results)
    if listed != ran:
        odd = [*(listed - ran), *(ran - listed)]
        print(f"failed: {len(odd)} cases were not run as often as they are listed: {odd[:3]}")
    if args.write_page:
        passed = result.of(PASSED)
        lines = choose({row.case: row.elements for row in rows if row.case in passed})
        (harness.DOCS.parent / "tools/llama_cpp" / SAMPLE.name).write_text("\n".join([_HEAD, *lines, ""]))
        harness.write_page("ops.md", page(result))
    return result.ok and listed == ran
