"""Runs llama.cpp's test-backend-ops on a simulated NeuronCore, with kernels built for exactly what it asks.

    ./bazelw run //tests/llama:backend_ops                       every op that has an emitter: all its cases
    ./bazelw run //tests/llama:backend_ops -- -o ADD,MUL_MAT     these ops, or whole cases, as test-backend-ops takes them
    ./bazelw run //tests/llama:backend_ops -- --sample           the cases that the tests run
    ./bazelw run //tests/llama:backend_ops -- --write-sample F   all cases; writes a new sample of what passed to F

Three steps for each op: the backend, which has no kernel yet, records what it is asked for as a manifest; what can be built of the
manifest is built; the cases run against the CPU. Prints how many cases there are, how many the device supports, and how many
passed and failed. Exit status 1 when a case failed, a kernel did not build, nothing ran, or the device was not there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness

_HEADER = "# Cases of test-backend-ops, some for each op with an emitter; written by `backend_ops.py --write-sample`."

SAMPLE = Path(__file__).with_name("sample.txt")


def default_work() -> Path:
    """Returns where kernels are kept between runs: NEURON_KERNELGEN_CACHE, XDG_CACHE_HOME or ~/.cache decide."""
    if own := os.environ.get("NEURON_KERNELGEN_CACHE"):
        return Path(own) / "backend-ops"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neuron-kernelgen" / "backend-ops"


def sample() -> list[str]:
    """Returns the cases of sample.txt."""
    return [line for line in SAMPLE.read_text().splitlines() if line and not line.startswith("#")]


def choose(passed: list[str]) -> list[str]:
    """Returns some cases of every op, spread evenly over the op's cases: more of the ops that have many."""
    chosen = []
    for cases in harness.by_op(dict.fromkeys(passed)).values():
        count = min(len(cases), 4 if len(cases) < 100 else 12)
        chosen += [cases[i * len(cases) // count] for i in range(count)]
    return chosen


def run(
    programs: harness.Programs,
    groups: dict[str, list[str]],
    work: Path,
    *,
    params: str | None = None,
    jobs: int | None = None,
    say: harness.Say = print,
) -> tuple[harness.Outcome, dict[str, harness.Built]]:
    """Does the three steps for each group, and returns what was found and what was built, by group.

    A group has a folder and a run of its own, so that one that crashes takes no other with it.
    """
    outcome = harness.Outcome()
    built: dict[str, harness.Built] = {}
    for name, cases in groups.items():
        begun = time.monotonic()
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        recorded = folder / "recorded.yaml"
        harness.record_ops(programs, cases, recorded, params)
        built[name] = harness.build(recorded, folder / "kernels", jobs=jobs, say=say)
        found = harness.test_ops(programs, cases, folder / "kernels", params)
        outcome.add(found)
        made = built[name]
        counts = found.counts.values()
        say(
            f"{name}: {made.kernels} kernels ({made.compiled} compiled, {made.seconds:.0f} s); "
            f"{sum(c.supported for c in counts)} of {sum(c.cases for c in counts)} cases supported, "
            f"{sum(c.passed for c in counts)} passed, {sum(c.failed for c in counts)} failed, {time.monotonic() - begun:.0f} s"
        )
    return outcome, built


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", dest="ops", metavar="OPS", help="ops or whole cases; every op with an emitter by default")
    parser.add_argument("-p", dest="params", metavar="REGEX", help="only cases whose parameters match")
    parser.add_argument("--sample", action="store_true", help="the cases that the tests run")
    parser.add_argument("--write-sample", type=Path, metavar="FILE", help="write a new sample of what passed")
    parser.add_argument("--work", type=Path, default=default_work(), help="where kernels are kept between runs")
    parser.add_argument("-j", "--jobs", type=int, help="kernels built at once; one per CPU by default")
    args = parser.parse_args()
    if args.sample:
        groups = {"sample": sample()}
    elif args.ops:
        groups = harness.by_op(harness.split_cases(args.ops))
    else:
        groups = harness.by_op(harness.emitted_ops())
    begun = time.monotonic()
    outcome, built = run(harness.Programs.find(), groups, args.work, params=args.params, jobs=args.jobs, say=say)
    report(outcome, built)
    if args.write_sample:
        args.write_sample.write_text("\n".join([_HEADER, *choose(outcome.passed), ""]))
    print(f"{time.monotonic() - begun:.0f} s")
    failed = any(made.failed for made in built.values())
    return 0 if outcome.ok and not failed else 1


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(outcome: harness.Outcome, built: dict[str, harness.Built]) -> None:
    """Prints what was refused, what failed, and the table."""
    refused: Counter[str] = Counter()
    for made in built.values():
        refused.update(made.refused)
    if refused:
        print("not built, by reason:")
        for reason, count in refused.most_common():
            print(f"{count:7}  {reason}")
    for made in built.values():
        for kernel, reason in made.failed.items():
            print(f"failed to build: {kernel}: {reason}")
    for case, reason in outcome.failures:
        print(f"failed: {case}: {reason}")
    print("\n".join(outcome.table()))


if __name__ == "__main__":
    sys.exit(main())
