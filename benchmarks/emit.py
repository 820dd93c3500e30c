"""Emitting through a persistent worker against one process per kernel: `./bazelw run //benchmarks:emit`.

Both emit the same 200 kernels of the manifest llama3 and others like them, one after another, in the same run; the result is their
ratio. Exit status 1 when it is below 8.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kernelgen import library, manifest
from kernelgen.plan import Kernel, Plan, spec_json

CHECKOUT = Path(__file__).resolve().parent.parent
WORKER = [sys.executable, "-P", "-m", "kernelgen.worker"]
AT_LEAST = 8.0


def requests(count: int, folder: Path) -> list[list[str]]:
    """Returns the arguments of `count` emit steps: the kernels of llama3, and again from the first when there are fewer."""
    source = library.builtin_library()
    plan = Plan.merge(manifest.load([CHECKOUT / "manifests/llama3.yaml"], libraries=[source]))
    kernels: list[Kernel] = list(itertools.islice(itertools.cycle(plan.kernels), count))
    return [
        [
            "emit",
            f"--spec={spec_json(k.spec)}",
            "--library=kernels",
            f"--emitter={source.root / k.emitter}.py",
            f"--output={folder / f'{number}.hlo.pb'}",
        ]
        for number, k in enumerate(kernels)
    ]


def through_worker(steps: list[list[str]]) -> float:
    """Returns the seconds that one worker takes, its start included."""
    start = time.perf_counter()
    with subprocess.Popen(
        [*WORKER, "--persistent_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin and worker.stdout
        for step in steps:
            worker.stdin.write(json.dumps({"arguments": step}) + "\n")
            worker.stdin.flush()
            answer = json.loads(worker.stdout.readline())
            if answer["exitCode"]:
                raise SystemExit(answer["output"])
        worker.stdin.close()
    return time.perf_counter() - start


def process_per_kernel(steps: list[list[str]]) -> float:
    """Returns the seconds that a process for each kernel takes."""
    start = time.perf_counter()
    for step in steps:
        subprocess.run([*WORKER, *step], check=True)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder) / "worker", Path(folder) / "processes"
        worker = through_worker(requests(args.kernels, one))
        processes = process_per_kernel(requests(args.kernels, other))
        for file in one.iterdir():
            if file.read_bytes() != (other / file.name).read_bytes():
                raise SystemExit(f"{file.name}: the worker and the process emitted different bytes")
    ratio = processes / worker
    print(f"{args.kernels} kernels: {worker:.1f} s through one worker, {processes:.1f} s with a process each")
    print(f"ratio {ratio:.1f} (at least {AT_LEAST:g})")
    return 0 if ratio >= AT_LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
