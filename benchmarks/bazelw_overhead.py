#!/usr/bin/env python3
"""Measures what `bazelw` adds to a call of Bazel, in ms; the limit is 50 ms.

    benchmarks/bazelw_overhead.py [--runs N] [--quick] [--json FILE]

It calls `./bazelw build` and the same program directly, in turn, and prints the medians. The program is a stand-in for
Bazel that prints its version and exits, so that only the wrapper is measured: finding the program, calling it for its
version, and reading the cached answer of the registry probe. Exit status 1 if the difference exceeds the limit.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures

ROOT = Path(__file__).resolve().parents[1]
LIMIT_MS = 50.0


def measure(runs: int) -> Iterator[figures.Figure]:
    """Yields the medians of `runs` calls each, and their difference."""
    pinned = (ROOT / ".bazelversion").read_text().strip()
    with tempfile.TemporaryDirectory() as folder:
        bazel = Path(folder) / "bazel"
        bazel.write_text(f"#!/bin/sh\necho bazel {pinned}\n")
        bazel.chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        environment.pop("NEURON_KERNELGEN_OFFLINE", None)
        commands = {"bazel": [str(bazel), "build"], "bazelw": [str(ROOT / "bazelw"), "build"]}
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(runs + 1):  # the first call, which may probe the network, is not counted
            for name, command in commands.items():
                begun = time.perf_counter()
                subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
                times[name].append((time.perf_counter() - begun) * 1000)
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    direct, wrapped = median["bazel"], median["bazelw"]
    yield figures.Figure("a call through bazelw", wrapped, "ms", peer=figures.Peer("a direct call", direct))
    yield figures.Figure("what bazelw adds", wrapped - direct, "ms", limit=figures.Limit("value", at_most=LIMIT_MS))


def main() -> int:
    parser = figures.arguments(__doc__)
    parser.add_argument("--runs", type=int, help="The number of calls of each; 50 by default.")
    args = parser.parse_args()
    return figures.report(args, lambda: measure(args.runs or (5 if args.quick else 50)))


if __name__ == "__main__":
    sys.exit(main())
