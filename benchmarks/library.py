"""Emitting every kernel that test-backend-ops asks for, through one worker: `./bazelw run //benchmarks:library`.

llama.cpp's test program is asked for its cases with no kernel there, and what the backend then records is emitted, one kernel
after another in a random order that is always the same. Prints kernels per second, the worker's memory over time and sizes of HLO.
Exit status 1 when the worker's memory grows: JAX keeps what it traced, and must be made to forget.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT / "tests" / "llama"))

import cases  # noqa: E402
import harness  # noqa: E402
import lane  # noqa: E402

from kernelgen.plan import Kernel, spec_json  # noqa: E402

WORKER = [sys.executable, "-P", "-m", "kernelgen.worker", "--persistent_worker"]

GROWTH = 1.15
"""What the worker's memory in the last fifth may be of that in the second: the first warms up."""

PEAK_MB = 1024
"""What it may ever be, in MiB."""


def recorded(programs: harness.Programs) -> list[Kernel]:
    """Returns every distinct kernel that the cases ask for and an emitter may take."""
    with tempfile.TemporaryDirectory() as folder:
        rows = cases.listing(programs, Path(folder))
    entries = sorted({node for row in rows for node, reason in row.nodes if reason is None})
    builder = lane.Builder()
    found, _, refused = builder.read(entries)
    kernels = {kernel.spec.id: kernel for kernel in found.values()}
    print(f"{len(rows)} cases ask for {len(entries)} ops, {len(refused)} of which break a rule of ggml's")
    order = sorted(kernels)
    random.Random(1).shuffle(order)
    return [kernels[kernel] for kernel in order]


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> tuple[float, float]:
    """Returns a process's resident memory and its peak so far, in MiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    now, peak = (re.search(rf"{key}:\s*(\d+) kB", text) for key in ("VmRSS", "VmHWM"))
    assert now and peak
    return int(now[1]) / 1024, int(peak[1]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", type=int, help="so many of them; all by default")
    args = parser.parse_args()
    root = lane.Builder().library.root
    kernels = recorded(harness.Programs.find())[: args.kernels]
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
                "--library=kernels",
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
            memory.append(memory_mb(worker.pid)[0])
            if number % max(1, len(kernels) // 20) == 0:
                rate = number / (time.perf_counter() - begun)
                print(f"{number:6} kernels  {rate:6.1f} a second  {memory[-1]:6.0f} MiB", flush=True)
        seconds = time.perf_counter() - begun
        _, peak = memory_mb(worker.pid)
        cpu = cpu_seconds(worker.pid)
        worker.stdin.close()
    emitted = [size for of_op in sizes.values() for size in of_op]
    print(f"\n{'op':<28}{'kernels':>8}{'median':>9}{'largest':>9}  bytes of HLO")
    for op, of_op in sorted(sizes.items()):
        print(f"{op:<28}{len(of_op):>8}{statistics.median(of_op):>9.0f}{max(of_op):>9}")
    for reason, count in refused.most_common():
        print(f"refused {count}: {reason}")
    fifth = max(1, len(memory) // 5)
    early, late = statistics.median(memory[fifth : 2 * fifth] or memory), statistics.median(memory[-fifth:])
    print(
        f"{len(emitted)} kernels in {seconds:.0f} s, the worker's start included: {len(kernels) / seconds:.1f} a second, "
        f"{len(kernels) / cpu:.1f} a second of CPU time\n"
        f"HLO: median {statistics.median(emitted):.0f} bytes, largest {max(emitted)}\n"
        f"memory: peak {peak:.0f} MiB (at most {PEAK_MB}); {early:.0f} MiB in the second fifth, {late:.0f} in the last: "
        f"{late / early:.2f} (at most {GROWTH})"
    )
    return 0 if peak <= PEAK_MB and late <= early * GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
