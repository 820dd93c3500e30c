"""Measures emitting through a persistent worker against one process per kernel, in s.

    ./bazelw run //benchmarks:persistent_worker [-- --kernels N]

Both emit the same 200 kernels, those of the manifest llama3 and repetitions of them, one after another in the same run;
the result is the ratio of their times. Exit status 1 if it is below 8.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
from kernelgen import manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.plan import Kernel, Plan
from kernelgen.spec.op_kernel import spec_json

CHECKOUT = Path(__file__).resolve().parent.parent
WORKER = [sys.executable, "-P", "-m", "kernelgen.steps.worker"]
AT_LEAST = 8.0


def requests(count: int, folder: Path) -> list[list[str]]:
    """Returns the arguments of `count` emit steps: the kernels of llama3, repeated from the first if there are fewer."""
    source = builtin_library()
    plan = Plan.merge(manifest.load([CHECKOUT / "manifests/llama3.yaml"], Catalog([source])))
    kernels: list[Kernel] = list(itertools.islice(itertools.cycle(plan.kernels), count))
    return [
        [
            "emit",
            f"--spec={spec_json(k.spec)}",
            "--library=kernelgen",
            f"--emitter={source.root / k.emitter}.py",
            f"--output={folder / f'{number}.hlo.pb'}",
        ]
        for number, k in enumerate(kernels)
    ]


def through_worker(steps: list[list[str]]) -> float:
    """Returns the seconds of one worker, including its start."""
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
    """Returns the seconds with one process per kernel."""
    start = time.perf_counter()
    for step in steps:
        subprocess.run([*WORKER, *step], check=True)
    return time.perf_counter() - start


def measure(kernels: int) -> Iterator[figures.Figure]:
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder) / "worker", Path(folder) / "processes"
        worker = through_worker(requests(kernels, one))
        processes = process_per_kernel(requests(kernels, other))
        for file in one.iterdir():
            if file.read_bytes() != (other / file.name).read_bytes():
                raise SystemExit(f"{file.name}: the worker and the process emitted different bytes")
    yield figures.Figure(
        "emitting through one worker",
        worker,
        "s",
        kernels,
        figures.Peer("a process per kernel", processes),
        "peer / value",
        figures.Limit("ratio", at_least=AT_LEAST),
    )


def main() -> int:
    parser = figures.arguments(__doc__)
    parser.add_argument("--kernels", type=int, help="The number of kernels; 200 by default.")
    args = parser.parse_args()
    return figures.report(args, lambda: measure(args.kernels or (20 if args.quick else 200)))


if __name__ == "__main__":
    sys.exit(main())
