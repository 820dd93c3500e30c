"""Measures what builds of 100, 1,000 and 10,000 kernels cost, and checks that the cost grows no faster than the kernels.

    ./bazelw run //benchmarks:scale [-- --sizes N… --without bazel|ninja]

The manifest lists every kernel separately, the longest possible form. No kernel is really emitted or compiled, except
one: the bundles contain kernels made from it, and the builds' steps write its HLO and NEFF for all kernels
(`synthetic_kernels.py`).

For each step, the program prints the wall time in s, the CPU time in s, and the largest memory of one process in MB.

* The wall time has limits at 10,000 kernels.
* The CPU time per kernel must not exceed `GROWTH` times that of the previous size. CPU time is used because other work
  on the machine affects it less. A step with quadratic cost would have a factor of 10.
* Every process except Bazel's server must stay under `PEAK_MB`. CMake's peak includes the kernelgen that it runs.

Exit status 1 if a limit is exceeded.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cmake_project
import figures
import scratch
import synthetic_kernels
import usage

SIZES = (100, 1_000, 10_000)
QUICK = (20, 100)

SECONDS = {"plan": 2.0, "render for Bazel": 3.0, "Bazel: load and analyse": 20.0}
"""Limits in seconds at 10,000 kernels."""

GROWTH = 1.5
"""The largest allowed factor between the costs per kernel of two sizes: n log n gives 1.33, and the rest allows for noise."""

PEAK_MB = 1500.0
MOST = 40_000
"""The number of different kernels that `text` can write."""


@dataclass(frozen=True)
class Cost:
    """The cost of one step.

    Attributes:
        step: its name.
        seconds: wall time.
        cpu_seconds: CPU time.
        peak_mb: the largest memory of one process, in MB.
        own: whether that process belongs to this project, or to a tool that it calls; False for Bazel's server.
    """

    step: str
    seconds: float
    cpu_seconds: float
    peak_mb: float
    own: bool = True

    @staticmethod
    def of(step: str, used: usage.Usage) -> Cost:
        return Cost(step, used.seconds, used.cpu_seconds, used.peak_mb)


def text(count: int) -> str:
    """Returns a manifest `big` of `count` different kernels."""
    if count > MOST:
        raise ValueError(f"at most {MOST} kernels, not {count}")
    shapes = ((n, m) for n in range(1, 201) for m in range(1, 201))
    entries = [
        f'  - op: add\n    inputs: ["({n},{m},1,1)/f32", "({n},1,1,1)/f32"]\n    output: "({n},{m},1,1)/f32"\n'
        for (n, m), _ in zip(shapes, range(count), strict=False)
    ]
    return "format: 1\nname: big\ntargets: [trn1]\nkernels:\n" + "".join(entries)


def by_itself(count: int, folder: Path, copy: Path, sample: synthetic_kernels.Sample) -> Iterator[Cost]:
    """Yields kernelgen's costs without a build tool: plan, render, and bundles written and opened.

    Args:
        count: the number of kernels.
        folder: scratch space.
        copy: a copy of the checkout.
        sample: the real kernel from which the others are made.
    """
    env = {**cmake_project.environment(), "PYTHONPATH": str(copy / "tools"), "PYTHONDONTWRITEBYTECODE": "1"}
    kernelgen = [sys.executable, "-P", "-m", "kernelgen"]
    manifest = folder / "big.yaml"
    manifest.write_text(text(count))
    planned = usage.run([*kernelgen, "plan", "--format=json", manifest], env=env)
    if planned.output.count('"emitters"') != count:
        raise SystemExit(f"the plan does not have {count} kernels")
    yield Cost.of("plan", planned)
    plan = folder / "plan.json"
    plan.write_text(planned.output)

    def child(what: str, *arguments: object) -> Cost:
        """Runs one function of this file in a child process, which prints the times of the relevant part."""
        used = usage.run([sys.executable, "-P", __file__, "--child", what, *arguments], env=env)
        seconds, cpu = json.loads(used.output)
        return Cost(what, seconds, cpu, used.peak_mb)

    yield child("render for Bazel", plan)
    sample_file = folder / "sample.hlo.pb"
    sample_file.write_bytes(sample.hlo)
    child("make kernels up", plan, sample_file, folder / "made-up")
    out = folder / "bundles"
    made = folder / "made-up"
    for form in ("pack", "tree"):
        bundle = [*kernelgen, "bundle", "--plan", plan, "--hlo-dir", made / "hlo", "--neff-dir", made / "neff"]
        yield Cost.of(f"write the {form}", usage.run([*bundle, "--form", form, "-o", out], env=env))
    yield child("open the pack", out / "big_trn1.kernels.gguf", count)


def with_bazel(count: int, sample: synthetic_kernels.Sample) -> Iterator[Cost]:
    """Yields Bazel's costs: loading and analysis, and a build with nothing to do."""
    with scratch.checkout() as checkout:
        synthetic_kernels.stand_in(checkout.path, sample, checkout.path.parent)
        (checkout.path / "manifests/big.yaml").write_text(text(count))
        line = 'neuron.kernels(manifest = ["//manifests:llama3.yaml"])'
        checkout.edit("MODULE.bazel", line, f"{line}\n{line.replace('llama3', 'big')}")
        # The kernels repository is fetched first, because planning is measured separately.
        checkout.bazel("query", "@neuron_kernels//:plan.json")
        pid = int(checkout.bazel("info", "server_pid").output.split()[-1])

        def measured(step: str, *flags: str) -> Cost:
            before = usage.process_cpu_seconds(pid)
            # The synthetic steps write only their outputs, so they need no sandbox, which would take longer than they
            # do.
            result = checkout.bazel(
                "build", "@neuron_kernels//bundles:big_trn1", flags=["--noworker_sandboxing", *flags], count=False
            )
            # The clock of CPU time ticks 100 times a second.
            cpu = max(usage.process_cpu_seconds(pid) - before, 0.01)
            return Cost(step, result.seconds, cpu, usage.process_memory_mb(pid)[1], own=False)

        yield measured("Bazel: load and analyse", "--nobuild")
        measured("Bazel: everything")
        measured("Bazel: the first null build")
        yield measured("Bazel: null build")


def with_ninja(count: int, sample: synthetic_kernels.Sample, folder: Path, copy: Path) -> Iterator[Cost]:
    """Yields the costs of CMake and Ninja: configuring, and a build with nothing to do."""
    project = cmake_project.Project(folder / "project", folder / "build")
    cmake_project.write(
        project.source,
        [
            f'include("{copy}/rules/cmake/NeuronKernels.cmake")',
            "add_neuron_kernels(big MANIFEST big.yaml TARGETS trn1 COMPILER simulator FORM PACK)",
        ],
    )
    (project.source / "big.yaml").write_text(text(count))
    configure = ["cmake", "-G", "Ninja", "-S", project.source, "-B", project.build]
    env = cmake_project.environment()
    yield Cost.of("CMake: configure", usage.run([*configure, f"-DNEURON_KERNELGEN_PYTHON={sys.executable}"], env=env))
    usage.run(["ninja", "-C", project.build], env=env)
    usage.run(["ninja", "-C", project.build], env=env)  # Ninja compacts its log of dependencies once
    runs = [usage.run(["ninja", "-C", project.build], env=env) for _ in range(3)]
    if not all("no work to do" in run.output for run in runs):
        raise SystemExit(f"Ninja found something to do:\n{runs[0].output}")
    yield Cost.of("Ninja: null build", min(runs, key=lambda run: run.seconds))


def costs(count: int, *, bazel: bool = True, ninja: bool = True) -> Iterator[Cost]:
    """Yields the cost of each step for `count` kernels."""
    with tempfile.TemporaryDirectory(prefix="neuron-kernelgen-") as name:
        folder = Path(name)
        copy = cmake_project.copy(folder / "kernelgen")
        sample = synthetic_kernels.sample(copy, folder / "sample")
        yield from by_itself(count, folder, copy, sample)
        if ninja:
            synthetic_kernels.stand_in(copy, sample, folder)
            yield from with_ninja(count, sample, folder, copy)
        if bazel:
            yield from with_bazel(count, sample)


def judge(count: int, cost: Cost, before: tuple[int, Cost] | None, largest: bool) -> Iterator[figures.Figure]:
    """Yields a step's figures with their limits.

    Args:
        count: the number of kernels.
        cost: the cost of the step.
        before: the previous size, and the step's cost there.
        largest: whether this is the size to which the limits on time apply.
    """

    def peer(attribute: str) -> figures.Peer | None:
        return figures.Peer("the size before", getattr(before[1], attribute), before[0]) if before else None

    step = cost.step
    late = figures.Limit("value", at_most=SECONDS[step]) if largest and step in SECONDS else None
    yield figures.Figure(step, cost.seconds, "s", count, peer("seconds"), limit=late)
    growth = figures.Limit("ratio", at_most=GROWTH) if before else None
    what = f"{step}: CPU time"
    yield figures.Figure(what, cost.cpu_seconds, "s", count, peer("cpu_seconds"), limit=growth)
    limit = figures.Limit("value", at_most=PEAK_MB) if cost.own else None
    what = f"{step}: peak memory" + ("" if cost.own else " of the server")
    yield figures.Figure(what, cost.peak_mb, "MB", count, peer("peak_mb"), limit=limit)


def measure(sizes: Sequence[int], *, bazel: bool = True, ninja: bool = True) -> Iterator[figures.Figure]:
    before: dict[str, tuple[int, Cost]] = {}
    for count in sizes:
        for cost in costs(count, bazel=bazel, ninja=ninja):
            yield from judge(count, cost, before.get(cost.step), count == SIZES[-1])
            before[cost.step] = count, cost


def _child(what: str, *arguments: str) -> None:
    """Runs one function and prints its wall and CPU seconds, without imports and without reading the plan."""
    begun = cpu = 0.0
    sys.path.insert(0, str(scratch.CHECKOUT / "tools"))

    def start() -> None:
        nonlocal begun, cpu
        begun, cpu = time.perf_counter(), time.process_time()

    if what == "open the pack":
        from kernelgen.bundle import pack

        start()
        opened = pack.read(arguments[0])
        if len(opened.index.ids) != int(arguments[1]):
            raise SystemExit(f"the pack does not have {arguments[1]} kernels")
    else:
        from kernelgen.plan import Plan

        plan = Plan.from_json(Path(arguments[0]).read_text())
        if what == "render for Bazel":
            from kernelgen.emitters.library import builtin_library
            from kernelgen.render import bazel as renderer

            start()
            renderer.generate(plan, [renderer.BazelLibrary(builtin_library(), "@@//kernels")], "@@")
        else:
            sample = synthetic_kernels.Sample(Path(arguments[1]).read_bytes(), b"", "")
            start()
            synthetic_kernels.files(plan, sample, Path(arguments[2]))
    print(json.dumps([time.perf_counter() - begun, time.process_time() - cpu]))


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        _child(*sys.argv[2:])
        return 0
    parser = figures.arguments(__doc__)
    parser.add_argument(
        "--sizes", type=int, nargs="+", metavar="N", help=f"Numbers of kernels; by default {' '.join(map(str, SIZES))}."
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=("bazel", "ninja"),
        help="Leave out this build tool; can be given twice.",
    )
    args = parser.parse_args()
    sizes = sorted(args.sizes or (QUICK if args.quick else SIZES))
    if sizes[0] < 1 or sizes[-1] > MOST:
        parser.error(f"sizes are from 1 to {MOST}")
    without = args.without
    return figures.report(args, lambda: measure(sizes, bazel="bazel" not in without, ninja="ninja" not in without))


if __name__ == "__main__":
    sys.exit(main())
