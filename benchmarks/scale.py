"""Planning, rendering and analysing 10,000 kernels: `./bazelw run //benchmarks:scale`.

The manifest lists every kernel by itself, the longest form there is. Printed are seconds and, so that machines can be compared,
each step's cost per kernel against that of a tenth as many kernels: a ratio near 1 is linear.
Exit status 1 when a limit is passed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import scratch
from kernelgen import library, manifest
from kernelgen.plan import Plan
from kernelgen.render import bazel as renderer

LIMITS = {"plan": 2.0, "render": 3.0, "load and analyse": 20.0}


@dataclass(frozen=True)
class Cost:
    """Seconds of each step for one number of kernels."""

    kernels: int
    seconds: dict[str, float]


def text(count: int) -> str:
    """Returns a manifest `big` of `count` different kernels."""
    shapes = ((n, m) for n in range(1, 201) for m in range(1, 201))
    entries = [
        f'  - op: add\n    inputs: ["({n},{m},1,1)/f32", "({n},1,1,1)/f32"]\n    output: "({n},{m},1,1)/f32"\n'
        for (n, m), _ in zip(shapes, range(count), strict=False)
    ]
    return "format: 1\nname: big\ntargets: [trn1]\nkernels:\n" + "".join(entries)


def measure(count: int) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.yaml"
        path.write_text(text(count))
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kernelgen", "plan", "--format=json", str(path)],
            check=True,
            capture_output=True,
        )
        plan_seconds = time.perf_counter() - start
        if len(json.loads(done.stdout)["kernels"]) != count:
            raise SystemExit(f"the plan does not have {count} kernels")

        source = library.builtin_library()
        with contextlib.redirect_stdout(io.StringIO()):
            plan = Plan.merge(manifest.load([path], libraries=[source]))
        start = time.perf_counter()
        renderer.generate(plan, [renderer.BazelLibrary(source, "@@//kernels")], "@@")
        render_seconds = time.perf_counter() - start

    with scratch.checkout() as checkout:
        (checkout.path / "manifests/big.yaml").write_text(text(count))
        line = 'neuron.manifest(file = "//manifests:llama3.yaml")'
        checkout.edit("MODULE.bazel", line, f"{line}\n{line.replace('llama3', 'big')}")
        # The kernels repository is fetched first: planning is counted above.
        checkout.bazel("query", "@neuron_kernels//:plan.json")
        analysis = checkout.bazel("build", "@neuron_kernels//bundles:big_trn1", flags=["--nobuild"])
    return Cost(count, {"plan": plan_seconds, "render": render_seconds, "load and analyse": analysis.seconds})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", type=int, default=10_000)
    args = parser.parse_args()
    small, large = measure(args.kernels // 10), measure(args.kernels)
    print(f"{'step':20} {'kernels':>8} {'seconds':>8} {'limit':>6} {'growth':>7}")
    late = 0
    for step, limit in LIMITS.items():
        seconds = large.seconds[step]
        growth = seconds / large.kernels / (small.seconds[step] / small.kernels)
        print(f"{step:20} {large.kernels:8} {seconds:8.2f} {limit:6g} {growth:7.2f}")
        late += seconds > limit
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
