"""Compares the modelled times of NKI kernels, in ns, with latencies that others measured.

    ./bazelw run //benchmarks:nki_judged -- ACCELOPT KDA

ACCELOPT is a checkout of zhang677/AccelOpt; its folder NKIBench has 14 kernels and their inputs. KDA is a checkout of
Jerry2423/kda-for-trainium; it has variants of these kernels, and `benchmark.csv` with a latency for each. Neither is
part of this project.

The program records each kernel and counts its work (nki_interpreter.cost). kernelgen.dispatch.modelled_cost converts
the work to nanoseconds by the figures of a physical core of trn2. The device of the latencies is uncertain (its rates
are about twice those of such a core), so one factor scales all modelled times. Every second op by name serves to fit
the factor, and the share of waiting between engines (`modelled_cost.UNHIDDEN`); the other ops judge the model. For two
kernels of an op whose latencies differ by 3 % or more, the table also counts whether the model orders them correctly,
wrongly, or calls them equal (within 3 %).
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from kernelgen.dispatch import chips
from kernelgen.dispatch.modelled_cost import alone, elapsed, shared
from nki_interpreter.cost import cost
from nki_interpreter.errors import LoadError, NkiError
from nki_interpreter.kernel import record_kernel
from nki_interpreter.loading import interpreter, load_kernel

TARGET = "trn2"
EQUAL = 1.03
"""Times with a smaller ratio count as equal."""
FACTOR = 1.5
ENGINES = ("tensor", "vector", "scalar", "dma")
SCALES = tuple(0.01 * n for n in range(10, 201))
"""The scales to try."""


@dataclass(frozen=True)
class MeasuredKernel:
    """A kernel: its op and name, the measured ns, the modelled ns of each engine, and of work that either of two engines can do."""

    op: str
    name: str
    measured: float
    engines: Mapping[str, float]
    either: Mapping[str, float]

    def modelled(self, scale: float = 1.0) -> float:
        """Returns the modelled nanoseconds of the kernel."""
        return scale * elapsed(shared(self.engines, self.either))


def latencies(folder: Path) -> dict[str, float]:
    """Returns the milliseconds of each kernel of an op, by its file's stem, from the last row with a single latency."""
    found = {}
    with (folder / "benchmark.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                found[Path(row["candidate"].split(":")[-1]).stem] = float(row["latency_ms"])
            except ValueError:  # "N/A"
                continue
    return found


class _TooLong(Exception):
    pass


def _stop(*_: object) -> None:
    raise _TooLong


def counted(kernel: Path, reference: Path, seconds: int) -> dict[str, Any]:
    """Returns the work of a kernel for the inputs of its op's reference.

    Raises:
        LoadError: the file has no kernel.
        NkiError: the kernel breaks a rule of NKI.
        _TooLong: recording it takes more than `seconds`.
    """
    spec = importlib.util.spec_from_file_location("reference", reference)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(seconds)
    try:
        spec.loader.exec_module(module)
        arrays = module.transform_to_nki_inputs(module.get_inputs())
        with interpreter():
            recorded = record_kernel(load_kernel(kernel, "kernel"), arrays, {}, older=True)
            return cost(recorded.block, recorded.storages, older=True).to_json()
    finally:
        signal.alarm(0)


def corpus(accelopt: Path, kda: Path, kept: dict[str, Any], seconds: int) -> Iterator[MeasuredKernel]:
    """Yields the kernels that have a latency and can be recorded; prints why the others can't.

    Args:
        accelopt: the checkout of AccelOpt.
        kda: the checkout of kda-for-trainium.
        kept: the cached work of kernels by op and name; new work is added.
        seconds: the time limit of recording one kernel.
    """
    bench = accelopt / "NKIBench"
    baselines = {one["kernel"]: one for one in json.loads((kda / "baselines.json").read_text()).values()}
    for op, known in sorted(json.loads((bench / "summary.json").read_text()).items()):
        (case,) = known["cases"].values()
        (case,) = case["impls"]
        folder = kda / "workspaces" / op
        measured = latencies(folder) if folder.is_dir() else {}
        baseline = bench / case["kernel"]
        if baseline.name in baselines:
            measured[baseline.stem] = baselines[baseline.name]["baseline_latency_ms"]
        for file in (baseline, *sorted((folder / "runs").glob("*.py"))):
            if file.stem not in measured:
                continue
            key = f"{op} {file.stem}"
            try:
                if key not in kept:
                    kept[key] = counted(file, bench / case["task"], seconds)
            except (LoadError, NkiError) as error:
                print(f"{key}: not recorded: {str(error)[:120]}", file=sys.stderr)
                continue
            except _TooLong:
                print(f"{key}: not recorded in {seconds} s", file=sys.stderr)
                continue
            ns = alone(kept[key]["work"], kept[key]["instructions"], chips.of(TARGET, 1))
            yield MeasuredKernel(op, file.stem, measured[file.stem] * 1e6, *ns)


def _distance(kernels: Sequence[MeasuredKernel], scale: float) -> float:
    """Returns the mean, over ops, of the mean distance between the logarithms of modelled and measured times."""
    by_op: dict[str, list[float]] = {}
    for one in kernels:
        by_op.setdefault(one.op, []).append(abs(math.log(one.modelled(scale) / one.measured)))
    return statistics.mean(map(statistics.mean, by_op.values()))


def fit(kernels: Sequence[MeasuredKernel]) -> float:
    """Returns the factor that brings modelled times nearest to measured times."""
    return min(SCALES, key=lambda scale: _distance(kernels, scale))


def order(kernels: Sequence[MeasuredKernel]) -> tuple[int, int, int]:
    """Returns the numbers of pairs of different kernels of one op that the model orders right, orders wrong, and calls equal."""
    right = wrong = tied = 0
    for a, b in combinations(kernels, 2):
        if a.op != b.op or max(a.measured, b.measured) < EQUAL * min(a.measured, b.measured):
            continue
        one, other = a.modelled(), b.modelled()
        if max(one, other) < EQUAL * min(one, other):
            tied += 1
        elif (one < other) == (a.measured < b.measured):
            right += 1
        else:
            wrong += 1
    return right, wrong, tied


def table(kernels: Sequence[MeasuredKernel]) -> list[str]:
    """Returns the lines of the result: the fitted scale, each op, and each half."""
    ops = sorted({one.op for one in kernels})
    fitted = [one for one in kernels if one.op in ops[::2]]
    scale = fit(fitted)
    lines = [f"{scale:.2f} of the time of a physical core of {TARGET}, fitted on {', '.join(ops[::2])}", ""]
    lines.append(
        f"{'op':24} kernels  measured/modelled: least, median, most   within {FACTOR:g}  pairs right, wrong, tied"
    )
    groups = [(op, [one for one in kernels if one.op == op]) for op in ops]
    groups += [("fitted", fitted), ("judged", [one for one in kernels if one.op in ops[1::2]]), ("all", list(kernels))]
    for name, some in groups:
        if not some:
            continue
        ratios = sorted(one.measured / one.modelled(scale) for one in some)
        within = sum(1 / FACTOR <= ratio <= FACTOR for ratio in ratios)
        spread = f"{ratios[0]:.2f}, {statistics.median(ratios):.2f}, {ratios[-1]:.2f}"
        right, wrong, tied = order(some)
        lines.append(f"{name:24} {len(some):7}  {spread:38} {within:4} of {len(some):<3} {right:4} {wrong:4} {tied:4}")
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("accelopt", type=Path, help="a checkout of zhang677/AccelOpt")
    parser.add_argument("kda", type=Path, help="a checkout of Jerry2423/kda-for-trainium")
    parser.add_argument("--seconds", type=int, default=600, help="the time limit of recording one kernel")
    parser.add_argument("--kept", type=Path, help="a JSON file that keeps the work of kernels between runs")
    args = parser.parse_args(arguments)
    for file in (args.accelopt / "NKIBench" / "summary.json", args.kda / "baselines.json"):
        if not file.is_file():
            print(f"error: {file} is not there", file=sys.stderr)
            return 1
    kept = json.loads(args.kept.read_text()) if args.kept and args.kept.is_file() else {}
    kernels = list(corpus(args.accelopt, args.kda, kept, args.seconds))
    if args.kept:
        args.kept.write_text(json.dumps(kept))
    if not kernels:
        print("error: no kernel has a latency", file=sys.stderr)
        return 1
    for one in kernels:
        engine = max(one.engines, key=lambda name: one.engines[name])
        print(
            f"{one.op:24} {one.name:36} {one.measured / 1e6:8.3f} ms measured; {one.modelled() / 1e6:8.3f} ms, {engine}"
        )
    print()
    print("\n".join(table(kernels)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
