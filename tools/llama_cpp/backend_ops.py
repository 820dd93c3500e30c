"""Runs llama.cpp's test-backend-ops on a simulated NeuronCore, with kernels built for exactly the cases' ops.

    ./bazelw run //tools/llama_cpp:backend_ops                       all cases
    ./bazelw run //tools/llama_cpp:backend_ops -- -o ADD,MUL_MAT     only these ops, or whole cases, as test-backend-ops takes them
    ./bazelw run //tools/llama_cpp:backend_ops -- -o ROPE --languages nki,jax
    ./bazelw run //tools/llama_cpp:backend_ops -- -o ROPE --languages nki,jax --computed-by nki --shard 1/4
    ./bazelw run //tools/llama_cpp:backend_ops -- --sample           the cases that the tests run
    ./bazelw run //tools/llama_cpp:backend_ops -- --write-sample F   also writes a new sample of the passed cases to F

First the backend runs without kernels and reports which kernels each case needs. Then the program builds the kernels of
each group of cases, and runs the group against the CPU; as many groups run in parallel as there are CPUs. After an
interruption, the next run continues. It repeats a group if something that it depends on has changed. At the end, the
program prints the numbers of cases, of supported cases, and of those that passed and failed. It leaves in the work
folder:

    support.csv   `test-backend-ops support --output csv`, as in llama.cpp's docs/ops
    results.csv   each case of the mode `test`, with its outcome and the reason
    kernels.csv   each kernel, with the bytes of its HLO

Exit status 1 if a case failed, a kernel that should have been built was not, nothing ran, or the device was missing.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


import case_runner
import cases
import harness
import kernel_builder
import work_folder
import worker_pool

from kernelgen import fileio

SAMPLE = Path(__file__).with_name("sample.txt")

SAMPLE_SIZE = 425
"""The approximate number of cases in the sample."""

DEAREST = 1_000_000
"""The most elements of all tensors that a sample case may have, if its op has smaller cases."""

_HEADER = "# Cases of test-backend-ops, some for each op; written by `backend_ops.py --write-sample`."


def default_work() -> Path:
    """Returns the default folder for kernels and results, from NEURON_KERNELGEN_CACHE, XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("NEURON_KERNELGEN_CACHE"):
        return Path(own) / "backend-ops"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neuron-kernelgen" / "backend-ops"


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
        by_op.setdefault(cases.op_of(case), []).append(case)
    # Each op gets a share in proportion to the square root of its number of cases: no op fills the sample, none is left
    # out.
    low, high = 0.0, float(size)
    for _ in range(50):
        share = (low + high) / 2
        if sum(_quota(len(of_op), share) for of_op in by_op.values()) < size:
            low = share
        else:
            high = share
    chosen: list[str] = []
    for of_op in by_op.values():
        cheap = [case for case in of_op if costs[case] <= DEAREST] or [min(of_op, key=costs.__getitem__)]
        count = min(_quota(len(of_op), high), len(cheap))
        for i in range(count):
            stretch = cheap[i * len(cheap) // count : (i + 1) * len(cheap) // count]
            chosen.append(min(stretch, key=costs.__getitem__))
    return chosen


def _quota(count: int, share: float) -> int:
    return min(count, max(2, round(share * count**0.5)))


# --- the run ---------------------------------------------------------------------------------------------------------------


@dataclass
class Summary:
    """The findings of a run.

    Attributes:
        outcome: the outcome of all cases.
        costs: the number of elements of each case's tensors, in the program's order.
        groups: the outcome of each group, by its name.
        seconds: the duration.
    """

    outcome: cases.TestResults = field(default_factory=cases.TestResults)
    costs: dict[str, int] = field(default_factory=dict)
    groups: dict[str, case_runner.GroupResult] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed_kernels(self) -> dict[str, str]:
        return {kernel: why for done in self.groups.values() for kernel, why in done.built.failed.items()}

    @property
    def ok(self) -> bool:
        return self.outcome.ok and not self.failed_kernels


class Show:
    """Shows the progress of a run: one changing line in a terminal, otherwise one line per group."""

    def __init__(self, total: int, groups: int, *, terminal: bool | None = None) -> None:
        self.total, self.groups = total, groups
        self.terminal = sys.stderr.isatty() if terminal is None else terminal
        self.begun = time.monotonic()
        self.fresh = 0
        self.ended = 0
        self.counts = cases.CaseCount()
        self.at: dict[str, str] = {}

    def stage(self, group: cases.Group, stage: str, count: int) -> None:
        """Reports that a group is being built or run."""
        self.at[group.name] = f"{group.name} {stage} {count}"
        self._draw()

    def done(self, group: cases.Group, done: case_runner.GroupResult) -> None:
        """Reports that a group has finished."""
        self.at.pop(group.name, None)
        self.ended += 1
        if not done.reused:
            self.fresh += group.size
        own = cases.CaseCount()
        for count in done.outcome.counts().values():
            own += count
        self.counts += own
        how = "unchanged" if done.reused else f"{done.seconds:.0f} s"
        if not self.terminal or own.failed or done.built.failed or done.outcome.failures:
            self.line(
                f"{self.ended}/{self.groups} {group.name}: {own.supported} of {own.cases} cases supported, "
                f"{own.passed} passed, {own.failed} failed; {len(done.built.sizes)} kernels, {how}"
                f"; {self._left()}"
            )
        self._draw()

    def line(self, text: str) -> None:
        """Prints a line above the changing line."""
        print(("\r\x1b[K" if self.terminal else "") + text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _left(self) -> str:
        spent = time.monotonic() - self.begun
        left = self.total - self.counts.cases
        if not self.fresh or not left:
            return f"{spent / 60:.0f} min"
        return f"{spent / 60:.0f} min, about {spent / self.fresh * left / 60:.0f} min left"

    def _draw(self) -> None:
        if self.terminal:
            c = self.counts
            text = (
                f"{c.cases:,} of {self.total:,} cases: {c.passed:,} passed, {c.failed} failed; "
                f"{', '.join(self.at.values())}; {self._left()}"
            )
            columns = shutil.get_terminal_size().columns
            print("\r\x1b[K" + text[: columns - 1], end="", file=sys.stderr, flush=True)


def run(
    programs: harness.Programs,
    work: Path,
    *,
    chosen: Sequence[str] = (),
    params: str | None = None,
    languages: Sequence[str] = (),
    language: str = "",
    shard: tuple[int, int] = (1, 1),
    jobs: int | None = None,
    terminal: bool | None = None,
) -> Summary:
    """Builds and runs cases in groups, and returns the findings.

    Args:
        programs: the programs to run.
        work: the folder for kernels and results.
        chosen: ops, regular expressions for ops, or whole cases; every case if empty.
        params: a regular expression for parameters.
        languages: the languages that may compute the kernels, the first choice first; JAX if empty.
        language: only run cases with a kernel in this language; any language if empty.
        shard: (k, n): run the k-th of n parts of the groups, with about as many cases each; all by default.
        jobs: groups at once; one per CPU by default.
        terminal: whether to show progress as in a terminal; detected by default.

    Raises:
        RuntimeError: the device was missing, or no such case exists.
    """
    begun = time.monotonic()
    rows = cases.listing(programs, work / "no-kernels", chosen=_filter(chosen), params=params)
    rows = _wanted(rows, chosen)
    if language:
        rows = computed_by(rows, language, languages)
    groups = cases.group(rows)[shard[0] - 1 :: shard[1]]
    if not groups:
        raise RuntimeError("no such case")
    taken = {case for group in groups for case in group.cases}
    rows = [row for row in rows if row.case in taken]
    show = Show(len(rows), len(groups), terminal=terminal)
    summary = Summary(costs={row.case: row.elements for row in rows})
    by_name = {group.name: group for group in groups}

    def done(request: dict[str, Any], answer: dict[str, Any]) -> None:
        found = case_runner.GroupResult.from_json(answer)
        summary.groups[request["name"]] = found
        show.done(by_name[request["name"]], found)

    order = sorted(groups, key=lambda group: _expected(work, group))
    try:
        worker_pool.share_out(
            Path(case_runner.__file__),
            {"work": str(work), "languages": list(languages)},
            programs,
            [group.to_json() for group in order],
            jobs or len(os.sched_getaffinity(0)),
            stage=lambda request, stage, count: show.stage(by_name[request["name"]], stage, count),
            done=done,
        )
    finally:
        show.close()
    for group in groups:
        summary.outcome.add(summary.groups[group.name].outcome)
    listed, found = Counter(row.case for row in rows), Counter(result.case for result in summary.outcome.results)
    if listed != found:
        odd = [*(listed - found), *(found - listed)]
        summary.outcome.failures.append(f"{len(odd)} cases were not run as often as they are listed: {odd[:3]}")
    summary.seconds = time.monotonic() - begun
    return summary


def _filter(chosen: Sequence[str]) -> Sequence[str]:
    """Returns the filter for the program; empty if it is too long for a command line, because `_wanted` filters then."""
    return chosen if sum(len(each) + 1 for each in chosen) <= cases.MOST_BYTES else ()


def _wanted(rows: Sequence[cases.CaseRow], chosen: Sequence[str]) -> list[cases.CaseRow]:
    if len(_filter(chosen)) == len(chosen):
        return list(rows)
    wanted = frozenset(chosen)
    return [row for row in rows if row.case in wanted or row.op in wanted]


def computed_by(rows: Sequence[cases.CaseRow], language: str, languages: Sequence[str]) -> list[cases.CaseRow]:
    """Returns the cases with a kernel in this language, if kernels may be in `languages`."""
    entries = sorted({node for row in rows for node, reason in row.nodes if reason is None})
    found, _, _ = kernel_builder.KernelBuilder(languages).read(entries)
    own = {entry for entry, kernel in found.items() if kernel.language == language}
    return [row for row in rows if any(node in own for node, _ in row.nodes)]


def _expected(work: Path, group: cases.Group) -> tuple[bool, float]:
    """Returns the sort key of a group: groups with earlier results first, since most of these are unchanged; then the longest."""
    try:
        seconds = json.loads((work / group.name / "result.json").read_text())["done"]["seconds"]
    except (OSError, ValueError, KeyError):
        return True, -group.size
    return False, -seconds


def ask(
    programs: harness.Programs,
    work: Path,
    summary: Summary,
    *,
    chosen: Sequence[str] = (),
    params: str | None = None,
) -> list[cases.CaseRow]:
    """Returns what the mode `support` reports for the kernels of all groups; takes `run`'s arguments and its result.

    That mode omits the cases of several ops that other backends compute as one.
    """
    packs = [str(work / name / "kernels") for name, done in summary.groups.items() if done.built.sizes]
    environment = programs.environment(kernels=work / "no-kernels") | {"GGML_NEURON_KERNEL_DIR": ":".join(packs)}
    rows = cases.run(programs, "support", environment, chosen=_filter(chosen), params=params).rows
    return [row for row in _wanted(rows, chosen) if row.case in summary.costs]


def write_results(work: Path, summary: Summary, requested: Iterable[cases.CaseRow]) -> None:
    """Writes the CSVs; `requested` is the result of `ask`."""
    header = ["backend_name", "op_name", "op_params", "test_mode", "supported", "error_message", "backend_reg_name"]
    support = [
        (
            harness.DEVICE,
            row.op,
            _params(row.case),
            "support",
            int(row.supported),
            "yes" if row.supported else "no",
            "NEURON",
        )
        for row in requested
    ]
    _write_csv(work / "support.csv", header, support)
    results = [
        (cases.op_of(result.case), _params(result.case), result.status, f"{result.seconds:.3f}", result.note)
        for result in summary.outcome.results
    ]
    _write_csv(work / "results.csv", ["op", "params", "status", "seconds", "reason"], results)
    sizes = {kernel: size for done in summary.groups.values() for kernel, size in done.built.sizes.items()}
    _write_csv(work / "kernels.csv", ["kernel", "hlo_bytes"], sorted(sizes.items()))


def _params(case: str) -> str:
    return case.partition("(")[2].removesuffix(")")


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    fileio.write_bytes(path, text.getvalue().encode())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(summary: Summary) -> None:
    """Prints the unsupported cases, the failures, and the table."""
    reasons = Counter(result.note for result in summary.outcome.of(cases.UNSUPPORTED))
    if reasons:
        print("cases left out, by reason:")
        for reason, count in reasons.most_common():
            print(f"{count:7}  {reason}")
    for kernel, why in summary.failed_kernels.items():
        print(f"failed to build: {kernel}: {why}")
    for result in summary.outcome.of(cases.FAILED):
        print(f"failed: {result.case}: {result.note}")
    for failure in summary.outcome.failures:
        print(f"failed: {failure}")
    print("\n".join(summary.outcome.table()))
    made: Counter[str] = Counter()
    for done in summary.groups.values():
        made.update(done.built.languages)
    print("kernels by language: " + ", ".join(f"{count:,} in {name}" for name, count in sorted(made.items())))


def _shard(text: str) -> tuple[int, int]:
    """Returns the part and the number of parts of a text `K/N`."""
    number, _, count = text.partition("/")
    part = int(number), int(count)
    if not 1 <= part[0] <= part[1]:
        raise argparse.ArgumentTypeError(f"{text}: expected K/N, K from 1 to N")
    return part


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", dest="ops", metavar="OPS", help="ops or whole cases; every case by default")
    parser.add_argument("-p", dest="params", metavar="REGEX", help="only cases whose parameters match")
    parser.add_argument(
        "--languages", default="", help="languages of the kernels, the first choice first, such as nki,jax"
    )
    parser.add_argument(
        "--computed-by", default="", metavar="LANGUAGE", help="only cases with a kernel in this language"
    )
    parser.add_argument(
        "--shard",
        type=_shard,
        default=(1, 1),
        metavar="K/N",
        help="run the K-th of N parts; all parts share the work folder",
    )
    parser.add_argument("--sample", action="store_true", help="run the cases that the tests run")
    parser.add_argument("--write-sample", type=Path, metavar="FILE", help="write a new sample of the passed cases")
    parser.add_argument("--work", type=Path, default=default_work(), help="the folder of kernels and results")
    parser.add_argument("-j", "--jobs", type=int, help="groups at once; one per CPU by default")
    args = parser.parse_args()
    chosen = sample() if args.sample else cases.split_cases(args.ops) if args.ops else []
    programs = harness.Programs.find()
    # Runs of other choices have other cases, and folders of their own, so that the whole run's results stay.
    languages = [name for name in args.languages.split(",") if name]
    named: tuple[Any, ...] = (chosen, args.params)
    named += (languages,) if languages else ()
    named += (args.computed_by,) if args.computed_by else ()
    whole = not any(named)
    work = args.work.absolute() / ("whole" if whole else work_folder.digest(*named)[:12])
    summary = run(
        programs,
        work,
        chosen=chosen,
        params=args.params,
        languages=languages,
        language=args.computed_by,
        shard=args.shard,
        jobs=args.jobs,
    )
    report(summary)
    requested = ask(programs, work, summary, chosen=chosen, params=args.params)
    write_results(work, summary, requested)
    print(f"in the mode support: {sum(row.supported for row in requested):,} of {len(requested):,} cases")
    if args.write_sample:
        passed = {result.case for result in summary.outcome.of(cases.PASSED)}
        lines = choose({case: cost for case, cost in summary.costs.items() if case in passed})
        args.write_sample.write_text("\n".join([_HEADER, *lines, ""]))
    print(f"{summary.seconds:.0f} s; {work}/support.csv, results.csv, kernels.csv")
    return 0 if summary.ok else 1


if __name__ == "__main__":
    sys.exit(main())
