#!/usr/bin/env python3
"""What `bazelw` adds to a call of Bazel when everything is in place: at most 50 ms.

    benchmarks/bazelw.py [--runs N]

Times `./bazelw build` against a direct call of the same program, in turn, and prints the medians. The program is a stand-in for
Bazel that prints its version and ends at once, so that only the wrapper is measured: finding the program, asking its version
and reading the remembered answer of the registry probe. Exits with 1 when the difference is above the limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_MS = 50.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    runs = parser.parse_args().runs
    pinned = (ROOT / ".bazelversion").read_text().strip()
    with tempfile.TemporaryDirectory() as folder:
        bazel = Path(folder) / "bazel"
        bazel.write_text(f"#!/bin/sh\necho bazel {pinned}\n")
        bazel.chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        environment.pop("NEURON_KERNELGEN_OFFLINE", None)
        commands = {"bazel": [str(bazel), "build"], "bazelw": [str(ROOT / "bazelw"), "build"]}
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(runs + 1):  # the first, which may have to probe the network, is not counted
            for name, command in commands.items():
                begun = time.perf_counter()
                subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
                times[name].append((time.perf_counter() - begun) * 1000)
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    direct, wrapped = median["bazel"], median["bazelw"]
    added = wrapped - direct
    print(f"bazelw adds {added:.1f} ms to a call ({wrapped:.1f} ms against {direct:.1f} ms; limit {LIMIT_MS:.0f} ms)")
    return int(added > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
