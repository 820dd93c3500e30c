"""Runs benchmarks and writes their results: `./bazelw run //benchmarks -- [--quick] [--only NAME]… [-o FOLDER]`.

Each benchmark runs in its own process, one after another; its output passes through. The program writes `results.json`
(schema: results.schema.json), with a description of the machine. Exit status 1 if a limit was missed or a benchmark
failed; the others still run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
import machine

HERE = Path(__file__).resolve().parent

FORMAT = 1
"""The version of the format of results.json."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        what: what it measures.
        command: the command that runs it; `--json FILE` and `--quick` are added. Programs of this project are built
            when a benchmark that needs them runs, so that other runs do not wait for llama.cpp.
        default: whether it runs when none is named.
    """

    what: str
    command: Sequence[str]
    default: bool = True


def _built(label: str) -> tuple[str, ...]:
    return (str(HERE.parent / "bazelw"), "run", "--ui_event_filters=-info", "--noshow_progress", label, "--")


# What each script measures, and each program that Bazel builds.
_SCRIPTS = {
    "incremental_bazel": "what Bazel repeats after a change",
    "incremental_cmake": "what Ninja repeats after a change",
    "cold_build": "a cold build, against a shell loop and against a lower bound",
    "against_scripts": "five builds, against a shell loop and a generator without a cache",
    "scale": "the cost of 100, 1,000 and 10,000 kernels",
}
_PROGRAMS = {
    "//benchmarks:layer_kernels": "layers of models as one kernel each (builds llama.cpp)",
    "//benchmarks:simulated_token": "a generated token on the simulator against llama.cpp's CPU backend (builds llama.cpp)",
    "//benchmarks/launch:launch": "a launch of a small kernel on the simulator",
    "//benchmarks:layer_launches": "a token with groups of nodes in one launch, and without (builds llama.cpp)",
    "//benchmarks/dispatch:dispatch": "the backend's time per op (builds llama.cpp)",
    "//benchmarks/dispatch:repacked_weights": "loading repacked weights, against repacking them at load (builds llama.cpp)",
}

BENCHMARKS: Mapping[str, Benchmark] = {
    **{name: Benchmark(what, (sys.executable, "-P", str(HERE / f"{name}.py"))) for name, what in _SCRIPTS.items()},
    **{label.rpartition(":")[2]: Benchmark(what, _built(label), default=False) for label, what in _PROGRAMS.items()},
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one benchmark.

    Attributes:
        seconds: its duration.
        found: the figures that it wrote.
        failure: the error, or None.
    """

    seconds: float
    found: Sequence[figures.Figure]
    failure: str | None = None

    @property
    def status(self) -> str:
        return "failed" if self.failure else "met" if all(f.met for f in self.found) else "missed"


def run(benchmark: Benchmark, *, quick: bool) -> Outcome:
    """Runs one benchmark to its end."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        words = [*benchmark.command, f"--json={path}", *(["--quick"] if quick else [])]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("BUILD_", "RUNFILES"))}
        # Bazel runs in the checkout, whatever the user's working directory is.
        done = subprocess.run(words, check=False, env=environment, cwd=HERE.parent)
        seconds = time.perf_counter() - begun
        try:
            found = figures.read(path)
        except (OSError, ValueError) as error:
            return Outcome(seconds, [], f"exit status {done.returncode}: {error}")
    missed = not all(figure.met for figure in found)
    if done.returncode != int(missed):
        # Its exit status and its figures disagree about a failure.
        return Outcome(seconds, found, f"exit status {done.returncode}, expected {int(missed)} from its figures")
    return Outcome(seconds, found)


def to_json(outcomes: Mapping[str, Outcome], described: Mapping[str, Any], quick: bool) -> str:
    """Returns results.json."""
    benchmarks = [
        {
            "name": name,
            "seconds": round(outcome.seconds, 3),
            "status": outcome.status,
            "failure": outcome.failure,
            "figures": [figure.to_json() for figure in outcome.found],
        }
        for name, outcome in outcomes.items()
    ]
    value = {"format": FORMAT, "quick": quick, "machine": described, "benchmarks": benchmarks}
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Returns the figures of all benchmarks as one table."""
    width = max(len(name) for name in outcomes)
    lines = [f"{'':{width}}  {figures.line(figures.HEADER)}"]
    for name, outcome in outcomes.items():
        lines += [f"{name:{width}}  {figures.line(figures.row(figure))}" for figure in outcome.found]
        if outcome.failure:
            lines.append(f"{name:{width}}  FAILED: {outcome.failure}")
    return "\n".join(lines)


def collect(
    names: Sequence[str], output: Path, *, quick: bool, benchmarks: Mapping[str, Benchmark] = BENCHMARKS
) -> int:
    """Runs benchmarks, prints and writes their results, and returns the exit status.

    It rewrites the files after each benchmark, so that an interruption does not lose the earlier figures.
    """
    output.mkdir(parents=True, exist_ok=True)
    described = machine.describe()
    outcomes: dict[str, Outcome] = {}
    for name in names:
        print(f"\n== {name}: {benchmarks[name].what}", flush=True)
        outcomes[name] = run(benchmarks[name], quick=quick)
        (output / "results.json").write_text(to_json(outcomes, described, quick))
    print(f"\n{table(outcomes)}\n")
    counts = {status: sum(o.status == status for o in outcomes.values()) for status in ("met", "missed", "failed")}
    print(", ".join(f"{count} {status}" for status, count in counts.items() if count), f"; {output}/results.json")
    return 0 if counts["met"] == len(outcomes) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="\n".join(
            f"  {name:17} {b.what}{'' if b.default else '; only when named'}" for name, b in BENCHMARKS.items()
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=BENCHMARKS,
        metavar="NAME",
        help="Run only this benchmark; can be given several times.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Use small sizes, to check that the benchmarks work; their figures then mean nothing.",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("build/benchmarks"),
        help="The folder of the results; default: %(default)s.",
    )
    args = parser.parse_args()
    names = args.only or [name for name, benchmark in BENCHMARKS.items() if benchmark.default]
    return collect(list(dict.fromkeys(names)), args.output, quick=args.quick)


if __name__ == "__main__":
    sys.exit(main())
