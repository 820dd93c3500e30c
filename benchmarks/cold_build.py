"""Compares a cold build, in s, with a shell loop as people use today, and with a lower bound.

    ./bazelw run //benchmarks:cold_build [-- --loop-kernels N]

Three ways build the NEFFs of //manifests:llama3_trn1 in one run, all with the simulator:

* `bazel build` in a scratch checkout with nothing built or cached; the build starts Bazel's server;
* the shell loop: for each kernel, a new process that emits and a new process that compiles, one after another;
* the lower bound: lowering and compiling alone, measured in one process with all imports done, divided by the number of cores.

The limits apply to these three. The other lines explain a miss:

* the time before the first action: starting the server, loading and analysing;
* Bazel alone: the same cold build with emit and compile steps that compute and import nothing;
* starting Python and importing JAX, which delays each core's first emit;
* the lower bound in one process per core at once, which share the machine's memory and caches like the build's processes;
* the lower bound in CPU time, which is less than the lower bound if the machine has other work.

Exit status 1 if the loop takes less than 10 times as long as the build, or the build more than 2 times as long as the
lower bound.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
import scratch
import synthetic_kernels
from kernelgen import lowering, manifest
from kernelgen.compilers import choice
from kernelgen.compilers.step import compile_file
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library, builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.plan import Kernel, Plan

LOOP_AT_LEAST, FLOOR_AT_MOST = 10.0, 2.0


def plan_of(source: Library) -> Plan:
    """Returns the plan of the manifest llama3."""
    return Plan.merge(manifest.load([scratch.CHECKOUT / "manifests/llama3.yaml"], Catalog([source])))


def build(kernels: int, *, alone: bool = False) -> tuple[float, float]:
    """Returns the seconds of the cold build before the first action (server, repositories, analysis), and of the rest.

    Args:
        kernels: the number of its kernels.
        alone: whether its emit and compile steps compute nothing, which measures Bazel alone.
    """
    with scratch.checkout() as checkout:
        if alone:
            folder = checkout.path.parent
            synthetic_kernels.stand_in(
                checkout.path, synthetic_kernels.sample(checkout.path, folder / "sample"), folder
            )
        result = checkout.bazel("build", "//manifests:llama3_trn1", count=False)
        ran = re.search(r"(\d+) worker", result.output)
        steps = 2 * kernels + 2  # the other two: the check of all HLO, and the bundle
        if not ran or int(ran[1]) != steps:
            raise SystemExit(f"the build was not cold: expected {steps} actions in workers\n{result.output}")
        (profile,) = checkout.output_root.glob("*/command.profile.gz")
        before = _before_actions(json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"])
        return before, result.seconds - before


def _before_actions(events: list[dict[str, Any]]) -> float:
    """Returns the seconds from the start of Bazel's client to the first action, from the profile that every build writes."""
    launch = next(e["ts"] for e in events if e.get("name") == "Launch Blaze")
    return (min(e["ts"] for e in events if e.get("cat") == "action processing") - launch) / 1e6  # type: ignore[no-any-return]


def loop(source: Library, plan: Plan, count: int | None) -> float:
    """Returns the seconds of the shell loop; with `count`, of that many kernels spread over the plan, scaled to all."""
    config = next(c for c in plan.configs if c.target == "trn1")
    chosen = plan.kernels if count is None else plan.kernels[:: max(1, len(plan.kernels) // count)]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        for k in chosen:
            out = Path(folder) / k.spec.id
            worker = [sys.executable, "-P", "-m", "kernelgen.steps.worker"]
            emit = [
                "emit",
                f"--spec={k.spec.json}",
                "--library=kernelgen",
                f"--emitter={source.root / k.emitter}.py",
            ]
            subprocess.run([*worker, *emit, f"--output={out}.pb"], check=True)
            compile_ = ["compile", "--compiler=simulator", *(f"--flag={word}" for word in config.flags())]
            files = [f"--kernel={k.spec.id}", f"--hlo={out}.pb", f"--output={out}.neff"]
            subprocess.run([*worker, *compile_, *files], check=True)
        return (time.perf_counter() - start) * len(plan.kernels) / len(chosen)


def floor(source: Library, plan: Plan) -> tuple[float, float]:
    """Returns the wall and CPU seconds of lowering and compiling alone, each divided by the number of cores."""
    config = next(c for c in plan.configs if c.target == "trn1")
    compiler = choice.resolve("simulator")
    registrations = source.scan()
    functions = {op: load_function(source, registrations[op]) for op in {k.spec.op for k in plan.kernels}}
    with tempfile.TemporaryDirectory() as folder:
        path, neff = Path(folder) / "k.pb", Path(folder) / "k.neff"

        def once(k: Kernel) -> None:
            path.write_bytes(lowering.emit(k.spec, functions[k.spec.op]))
            compile_file(path, neff, config, compiler, kernel=k.spec.id)

        once(plan.kernels[0])  # imports JAX and starts XLA
        wall, cpu = time.perf_counter(), time.process_time()
        for k in plan.kernels:
            once(k)
        cores = os.cpu_count() or 1
        return (time.perf_counter() - wall) / cores, (time.process_time() - cpu) / cores


def _floor_here(_number: int) -> float:
    source = builtin_library()
    return floor(source, plan_of(source))[0]


def floor_on_all_cores() -> float:
    """Returns the seconds of the lower bound with one process per core at once: the slowest process's."""
    cores = os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        return max(pool.map(_floor_here, range(cores), chunksize=1))


def import_jax() -> float:
    """Returns the seconds to start Python and import JAX with files in the page cache: the least of three."""
    command = [sys.executable, "-P", "-c", "from kernelgen.hlo import cpu; cpu.import_jax()"]
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        subprocess.run(command, check=True)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure(loop_kernels: int | None) -> Iterator[figures.Figure]:
    """Yields the cold build against the loop and the lower bound, then the explaining figures.

    Args:
        loop_kernels: the number of kernels in the loop, spread over the plan; its time is scaled to all. None: all.
    """
    source = builtin_library()
    plan = plan_of(source)
    kernels = len(plan.kernels)
    least, least_cpu = floor(source, plan)
    at_once, jax = floor_on_all_cores(), import_jax()
    alone = sum(build(kernels, alone=True))
    before, actions = build(kernels)
    ours = before + actions
    floor_peer = figures.Peer("lowering and compiling alone, over the cores", least)
    yield figures.Figure(
        "cold build", ours, "s", kernels, floor_peer, "value / peer", figures.Limit("ratio", at_most=FLOOR_AT_MOST)
    )
    theirs = loop(source, plan, loop_kernels)
    scaled = f", scaled from {loop_kernels}" if loop_kernels else ""
    yield figures.Figure(
        "cold build",
        ours,
        "s",
        kernels,
        figures.Peer(f"shell loop{scaled}", theirs),
        "peer / value",
        figures.Limit("ratio", at_least=LOOP_AT_LEAST),
    )
    whole = figures.Peer("cold build", ours)
    yield figures.Figure("cold build, before the first action", before, "s", kernels, whole)
    yield figures.Figure("cold build, from the first action on", actions, "s", kernels, whole)
    yield figures.Figure("Bazel alone: the same steps, which compute nothing", alone, "s", kernels, whole)
    yield figures.Figure("starting Python and importing JAX", jax, "s", peer=whole)
    yield figures.Figure("lowering and compiling alone, on all cores at once", at_once, "s", kernels, floor_peer)
    yield figures.Figure("lowering and compiling alone in CPU time", least_cpu, "s", kernels, floor_peer)


def main() -> int:
    parser = figures.arguments(__doc__)
    parser.add_argument(
        "--loop-kernels", type=int, help="Run the loop on a sample of this many kernels and scale its time."
    )
    args = parser.parse_args()
    return figures.report(args, lambda: measure(args.loop_kernels or (8 if args.quick else None)))


if __name__ == "__main__":
    sys.exit(main())
