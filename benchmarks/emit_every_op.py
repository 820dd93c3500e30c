"""Measures emitting every kernel of test-backend-ops through one worker: kernels per second, memory in MB, bytes of HLO.

    ./bazelw run //benchmarks:emit_every_op [-- --kernels N]

llama.cpp's test program lists its cases without a kernel present, and the backend records the kernels that they
request. The worker emits these kernels one after another, in a fixed random order. The program prints kernels per
second, the worker's memory over time and the sizes of HLO. Exit status 1 if the worker's memory grows: JAX caches
traced functions, so the worker must clear its caches.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "tools" / "llama_cpp"))
sys.path.insert(0, str(Path(__file__).absolute().parent))

import cases
import harness
import kernel_builder

import figures
import usage
from kernelgen.plan import Kernel
from kernelgen.spec.op_kernel import spec_json

WORKER = [sys.executable, "-P", "-m", "kernelgen.steps.worker", "--persistent_worker"]

GROWTH = 1.15
"""The limit of the worker's memory in the last fifth of the run, relative to the second fifth; the first fifth warms up."""

PEAK_MB = 1074.0
"""The limit of its memory in MB: 1 GiB."""


def recorded(programs: harness.Programs) -> list[Kernel]:
    """Returns every different kernel that the cases request and that an emitter may support."""
    with tempfile.TemporaryDirectory() as folder:
        rows = cases.listing(programs, Path(folder))
    entries = sorted({node for row in rows for node, reason in row.nodes if reason is None})
    builder = kernel_builder.KernelBuilder()
    found, _, refused = builder.read(entries)
    kernels = {kernel.spec.id: kernel for kernel in found.values()}
    print(f"{len(rows)} cases have {len(entries)} ops; {len(refused)} of these break a rule of ggml's")
    order = sorted(kernels)
    random.Random(1).shuffle(order)
    return [kernels[kernel] for kernel in order]


def main() -> int:
    parser = figures.arguments(__doc__)
    parser.add_argument("--kernels", type=int, help="The number of kernels; all by default.")
    args = parser.parse_args()
    root = kernel_builder.KernelBuilder().library.root
    kernels = recorded(harness.Programs.find())[: args.kernels or (100 if args.quick else None)]
    sizes: dict[str, list[int]] = {}
    refused: Counter[str] = Counter()
    memory: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker,
    ):
        assert worker.stdin and worker.stdout
        output = Path(folder) / "kernel.hlo.pb"
        begun = time.perf_counter()
        for number, kernel in enumerate(kernels, 1):
            step = [
                "emit",
                f"--spec={spec_json(kernel.spec)}",
                "--library=kernelgen",
                f"--emitter={root / kernel.emitter}.py",
                f"--output={output}",
            ]
            worker.stdin.write(json.dumps({"arguments": step}) + "\n")
            worker.stdin.flush()
            answer = json.loads(worker.stdout.readline())
            if answer["exitCode"]:
                if "Traceback" in answer["output"]:
                    raise SystemExit(f"{kernel.spec.id}: {answer['output']}")
                refused[f"{kernel.spec.op}: {harness.generalize(answer['output'])}"] += 1
            else:
                sizes.setdefault(kernel.spec.op, []).append(output.stat().st_size)
            memory.append(usage.process_memory_mb(worker.pid)[0])
            if number % max(1, len(kernels) // 20) == 0:
                rate = number / (time.perf_counter() - begun)
                print(f"{number:6} kernels  {rate:6.1f} a second  {memory[-1]:6.0f} MB", flush=True)
        seconds = time.perf_counter() - begun
        _, peak = usage.process_memory_mb(worker.pid)
        cpu = usage.process_cpu_seconds(worker.pid)
        worker.stdin.close()
    emitted = [size for of_op in sizes.values() for size in of_op]
    print(f"\n{'op':<28}{'kernels':>8}{'median':>9}{'largest':>9}  bytes of HLO")
    for op, of_op in sorted(sizes.items()):
        print(f"{op:<28}{len(of_op):>8}{statistics.median(of_op):>9.0f}{max(of_op):>9}")
    for reason, count in refused.most_common():
        print(f"refused {count}: {reason}")
    fifth = max(1, len(memory) // 5)
    early, late = statistics.median(memory[fifth : 2 * fifth] or memory), statistics.median(memory[-fifth:])
    print()
    count = len(kernels)

    def found() -> Iterator[figures.Figure]:
        yield figures.Figure("emitting all kernels, with the worker's start", seconds, "s", count)
        alone = figures.Peer("by CPU time", count / cpu)
        yield figures.Figure("kernels per second", count / seconds, "1/s", count, alone)
        largest = figures.Peer("the largest", max(emitted))
        yield figures.Figure("HLO of a kernel, median", statistics.median(emitted), "bytes", count, largest)
        yield figures.Figure(
            "the worker's memory in the last fifth",
            late,
            "MB",
            count,
            figures.Peer("in the second fifth", early),
            limit=figures.Limit("ratio", at_most=GROWTH),
        )
        yield figures.Figure(
            "the worker's peak memory", peak, "MB", count, limit=figures.Limit("value", at_most=PEAK_MB)
        )

    return figures.report(args, found)


if __name__ == "__main__":
    sys.exit(main())
