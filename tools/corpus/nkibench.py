"""Records the kernels of NKIBench and of a folder of solutions, and compares the interpreter's results with the devices'.

    python3 tools/corpus/nkibench.py NKIBENCH [SOLUTIONS] [--op OP] [--kernel TEXT] [--execute] [--seconds S] [--jobs N]

NKIBENCH is this folder of zhang677/AccelOpt: `summary.json` names a reference and a baseline for each op; the baselines
ran on a device. SOLUTIONS has `OP/benchmark.csv` and `OP/runs/*.py`, like `workspaces` of Jerry2423/kda-for-trainium:
the last row about a file is its verdict. A file with a latency ran. A file without a latency was refused if the notes
name a code of the compiler (NCC_…); otherwise its outcome is unknown.

* A kernel that ran must be recorded, within `--seconds` (120) of CPU time.
* A refused kernel must be refused, with the same code.
* With `--execute`, each recorded kernel runs with the inputs of seed 42. If the device's results were right, the
  relative L2 error against the reference must be at most 2e-5 (mamba 3e-5); if they were wrong, it must be larger.

The program prints a table by op, and exits with status 1 if any of these rules is broken. Each kernel runs in its own
process, because the files are untrusted.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import re
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nki_interpreter import kernel, loading
from nki_interpreter.errors import LoadError, NkiError

RAN, REFUSED, UNKNOWN = "ran", "refused", "of unknown fate"
"""The outcome of a kernel on a device."""

ACCEPTED = "accepted"
FAILED = "failed"
"""Neither accepted nor refused: an exception that is not a diagnostic, or a timeout."""

TOLERANCE = {"mamba": 3e-5}
DEFAULT_TOLERANCE = 2e-5
SEED = 42


@dataclass(frozen=True)
class SurveyedKernel:
    """A kernel, and its outcome on a device.

    Attributes:
        op, reference, path: the op, its reference in NumPy and the kernel's file.
        fate: `RAN`, `REFUSED` or `UNKNOWN`.
        codes: the compiler's codes in the notes of a refused kernel.
        right: whether a device's results were right; None if unknown.
    """

    op: str
    reference: Path
    path: Path
    fate: str
    codes: tuple[str, ...] = ()
    right: bool | None = None


@dataclass(frozen=True)
class Interpreted:
    """The interpreter's result for a kernel.

    Attributes:
        what: `ACCEPTED`, `REFUSED` or `FAILED`.
        message: the diagnostic, or the exception.
        seconds: the CPU seconds of recording.
        error: the relative L2 error of its results; None if it did not run.
    """

    what: str
    message: str
    seconds: float
    error: float | None = None


class _TooLongError(Exception):
    pass


def cases(bench: Path, solutions: Path | None) -> Iterator[SurveyedKernel]:
    """Yields the baselines of NKIBench and the solutions of its ops, in order."""
    for op, described in json.loads((bench / "summary.json").read_text(encoding="utf-8")).items():
        implementations = [i for case in described["cases"].values() for i in case["impls"]]
        for implementation in implementations:
            reference = bench / implementation["task"]
            yield SurveyedKernel(op, reference, bench / implementation["kernel"], RAN, right=True)
            if solutions is not None and (solutions / op / "runs").is_dir():
                yield from _solutions(op, reference, solutions / op)


def _solutions(op: str, reference: Path, folder: Path) -> Iterator[SurveyedKernel]:
    with (folder / "benchmark.csv").open(encoding="utf-8", newline="") as file:
        verdicts = {Path(row["candidate"]).name: row for row in csv.DictReader(file)}
    for path in sorted((folder / "runs").glob("*.py")):
        if not re.search(r"^def kernel\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            continue  # a study in NumPy, without a kernel
        row = verdicts.get(path.name, {})
        passed = {"true": True, "false": False}.get(row.get("passed", ""))
        codes = tuple(dict.fromkeys(re.findall(r"NCC_\w+", row.get("notes", ""))))
        if re.fullmatch(r"[\d.]+", row.get("latency_ms", "")):
            yield SurveyedKernel(op, reference, path, RAN, right=passed)
        elif passed is False and codes:
            yield SurveyedKernel(op, reference, path, REFUSED, codes)
        else:
            yield SurveyedKernel(op, reference, path, UNKNOWN)


def judge(case: SurveyedKernel, seconds: float, execute: bool) -> Interpreted:
    """Records a kernel in its own process, and runs it if `execute`."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(there, case, seconds, execute))
    process.start()
    there.close()
    try:
        outcome: Interpreted = here.recv()
    except EOFError:
        process.join()
        return Interpreted(FAILED, f"its process ended with status {process.exitcode}", 0.0)
    process.join()
    return outcome


def _work(there: Any, case: SurveyedKernel, seconds: float, execute: bool) -> None:
    def stop(*_: Any) -> None:
        raise _TooLongError(f"not recorded within {seconds:g} CPU seconds")

    began = time.process_time()
    try:
        if not execute:
            _draw_nothing()
        reference = runpy.run_path(str(case.reference))
        np.random.seed(SEED)  # the references draw from NumPy's global generator
        inputs = reference["get_inputs"]()
        given = reference["transform_to_nki_inputs"](inputs)
        signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        began = time.process_time()
        made = loading.load_kernel(case.path, "kernel")
        kernel.record_kernel(made, given, {})
        signal.setitimer(signal.ITIMER_PROF, 0)
        took = time.process_time() - began
        error = None
        if execute:
            wanted = reference["forward"](*inputs)
            got = reference["transform_nki_outputs"](kernel.simulate(made, *given), wanted)
            error = max(map(_error, got, wanted if isinstance(wanted, tuple) else (wanted,)))
        there.send(Interpreted(ACCEPTED, "", took, error))
    except (NkiError, LoadError) as refusal:
        there.send(Interpreted(REFUSED, str(refusal), time.process_time() - began))
    except Exception as failure:
        there.send(Interpreted(FAILED, f"{type(failure).__name__}: {failure}", time.process_time() - began))


def _draw_nothing() -> None:
    """Makes NumPy's generator return zeros: recording needs only the shapes, and drawing takes longer than recording."""

    def zeros(shape: Any) -> Any:
        return np.zeros(() if shape is None else shape)

    for name in ("normal", "uniform"):  # other distributions are still drawn
        setattr(np.random, name, lambda *given, size=None, **_: zeros(given[2] if len(given) > 2 else size))
    for name in ("rand", "randn"):
        setattr(np.random, name, lambda *shape: zeros(shape))
    for name in ("random", "standard_normal"):
        setattr(np.random, name, lambda size=None: zeros(size))


def _error(got: Any, wanted: Any) -> float:
    """Returns the relative L2 error, or infinity if a result is not finite."""
    a, b = (np.asarray(v, np.float64) for v in (got, wanted))
    error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return error if np.isfinite(error) else np.inf


def wrong(case: SurveyedKernel, outcome: Interpreted) -> str:
    """Returns how a kernel's result differs from the device's, or an empty string."""
    if outcome.what == FAILED:
        return outcome.message
    if case.fate == RAN and outcome.what == REFUSED:
        return f"it ran on a device, and is refused: {outcome.message}"
    if case.fate == REFUSED and outcome.what == ACCEPTED:
        return f"the compiler refused it ({', '.join(case.codes)}), and it is accepted"
    if case.fate == REFUSED and not any(code in outcome.message for code in case.codes):
        return f"the compiler refused it by {', '.join(case.codes)}, and the interpreter otherwise: {outcome.message}"
    if outcome.error is not None and case.right is not None:
        limit = TOLERANCE.get(case.op, DEFAULT_TOLERANCE)
        if (outcome.error <= limit) != case.right:
            return f"its results were {'right' if case.right else 'wrong'} on a device, and have an error of {outcome.error:.2g}"
    return ""


def table(found: Sequence[tuple[SurveyedKernel, Interpreted]]) -> Iterator[str]:
    """Yields the lines of the table by op, and the differences."""
    yield f"{'op':22} kernels  {'ran: accepted':>15} {'refused: refused':>17} {'unknown: accepted':>18} {'seconds':>8} {'error':>8}"
    for op in [*dict.fromkeys(case.op for case, _ in found), "all"]:
        rows = [(c, o) for c, o in found if op in (c.op, "all")]
        counts = []
        for fate, what in ((RAN, ACCEPTED), (REFUSED, REFUSED), (UNKNOWN, ACCEPTED)):
            of_fate = [o for c, o in rows if c.fate == fate]
            counts.append(f"{sum(o.what == what for o in of_fate)} of {len(of_fate)}" if of_fate else "")
        errors = [o.error for c, o in rows if o.error is not None and c.right]
        worst = f"{max(errors):.1e}" if errors else ""
        slowest = max(o.seconds for _, o in rows)
        yield f"{op:22} {len(rows):7}  {counts[0]:>15} {counts[1]:>17} {counts[2]:>18} {slowest:8.1f} {worst:>8}".rstrip()
    for case, outcome in found:
        reason = wrong(case, outcome)
        if reason:
            yield f"wrong: {case.op}/{case.path.name}: {reason}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bench", type=Path, metavar="NKIBENCH", help="the folder with summary.json")
    parser.add_argument("solutions", type=Path, nargs="?", help="the folder with OP/benchmark.csv and OP/runs/*.py")
    parser.add_argument("--op", action="append", help="only this op; may be repeated")
    parser.add_argument("--kernel", default="", help="only kernels whose file name contains this text")
    parser.add_argument("--execute", action="store_true", help="run recorded kernels, and compare with the reference")
    parser.add_argument("--seconds", type=float, default=120.0, help="the limit of CPU seconds to record a kernel")
    parser.add_argument("--jobs", type=int, default=1, help="kernels at a time; some need several gigabytes")
    given = parser.parse_args(words)
    if not (given.bench / "summary.json").is_file():
        parser.error(f"{given.bench} is not NKIBench: it has no summary.json")
    if given.solutions is not None and not given.solutions.is_dir():
        parser.error(f"{given.solutions} is not a folder")
    chosen = [
        c for c in cases(given.bench, given.solutions) if c.op in (given.op or [c.op]) and given.kernel in c.path.name
    ]
    if not chosen:
        parser.error("no such kernel")
    with ThreadPoolExecutor(given.jobs) as pool:
        outcomes = pool.map(lambda case: judge(case, given.seconds, given.execute), chosen)
        found = []
        for case, outcome in zip(chosen, outcomes, strict=True):
            found.append((case, outcome))
            print(f"{case.op}/{case.path.name}: {case.fate}; {outcome.what}, {outcome.seconds:.1f} s", file=sys.stderr)
    print(*table(found), sep="\n")
    return int(any(wrong(case, outcome) for case, outcome in found))


if __name__ == "__main__":
    sys.exit(main())
