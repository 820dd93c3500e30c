"""Counts the actions that a build repeats after a change, against the expected counts.

    python3 benchmarks/incremental_bazel.py

It works in scratch copies of this checkout. For each change, it prints how many emit and compile actions Bazel executed
and how many it should have executed. Then, for Bazel, CMake and `kernelgen build`, with the double of neuronx-cc and
with the simulator, it prints how many kernels were compiled after changes that leave HLO unchanged
(`unchanged_hlo.py`). Exit status 1 if a count is wrong.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
import scratch
import unchanged_hlo

NUMERIC = ("np.float32(attn_factor)", "np.float32(1.5 * attn_factor)")
"""A change of rope's computation."""

ADDED = """
  - op: add
    inputs: ["(96,5,1,1)/f32", "(96,1,1,1)/f32"]
    output: "(96,5,1,1)/f32"
"""


SMALL = Path(__file__).with_name("small.yaml").read_text(encoding="utf-8")
"""A manifest `llama3` of a tiny llama: every kind of kernel that Llama-3-8B has, a few of each."""


@dataclass(frozen=True)
class Row:
    """One change: its description, the numbers of actions that ran, and the expected numbers."""

    change: str
    emits: int
    compiles: int
    want_emits: int
    want_compiles: int
    seconds: float

    @property
    def right(self) -> bool:
        return (self.emits, self.compiles) == (self.want_emits, self.want_compiles)


def run(checkouts: scratch.Checkouts, manifest: str | None = None) -> Iterator[Row]:
    """Yields a row per change.

    Args:
        checkouts: the checkouts to build in.
        manifest: the text of a manifest `llama3` in place of the project's; a small one makes a quick test. It must
            contain trn1 and inf2, and ropes.
    """
    with tempfile.TemporaryDirectory(prefix="neuron-kernelgen-") as cache, contextlib.ExitStack() as stack:
        flags = [f"--disk_cache={cache}"]
        first = stack.enter_context(checkouts.lend("project", flags=flags))
        if manifest is not None:
            (first.path / "manifests/llama3.yaml").write_text(manifest)
        target = "//manifests:llama3_trn1"

        def row(change: str, want_emits: int, want_compiles: int, *targets: str) -> Row:
            result = first.bazel("build", *(targets or (target,)))
            return Row(change, result.emits, result.compiles, want_emits, want_compiles, result.seconds)

        cold = first.bazel("build", target)
        plan = _plan(first)
        total, ropes = len(_ids(plan, "llama3_trn1")), len(_ids(plan, "llama3_trn1", "rope-"))
        yield Row("cold build", cold.emits, cold.compiles, total, total, cold.seconds)
        yield row("nothing", 0, 0)

        emitters = [p for p in sorted((first.path / "kernels").glob("*.py")) if "@emitter" in p.read_text()]
        for module in emitters:
            first.append(f"kernels/{module.name}", "\n# A comment.\n")
        yield row("a comment in every emitter", total, 0)

        first.edit("kernels/rope.py", NUMERIC[0], NUMERIC[1])
        yield row("a numeric change in rope", ropes, ropes)

        text = (first.path / "manifests/llama3.yaml").read_text()
        (first.path / "manifests/llama3.yaml").write_text(text + ADDED)
        yield row("one kernel added to the YAML", 1, 1)

        new = _second_manifest(first)
        yield row("a second manifest that shares half its kernels", new, new, target, "//manifests:second_trn1")

        yield row("another target", 0, total + 1, "//manifests:llama3_inf2")

        moved = stack.enter_context(checkouts.lend("elsewhere/moved", source=first.path, flags=flags))
        result = moved.bazel("build", target, "//manifests:llama3_inf2", "//manifests:second_trn1")
        hits = result.cached.get("NeuronEmit", 0), result.cached.get("NeuronCompile", 0)
        if 0 in hits:
            raise scratch.BuildFailed(f"the moved checkout took {hits} results from the disk cache\n{result.output}")
        yield Row("a moved checkout with a shared disk cache", result.emits, result.compiles, 0, 0, result.seconds)


def _plan(checkout: scratch.Checkout) -> dict[str, Any]:
    """Returns the plan of the checkout's build."""
    shown = checkout.bazel("query", "--output=location", "@neuron_kernels//:plan.json").output
    line = next(line for line in shown.splitlines() if "plan.json:" in line)
    plan: dict[str, Any] = json.loads(Path(line.partition(":")[0]).read_text())
    return plan


def _ids(plan: dict[str, Any], bundle: str, prefix: str = "") -> list[str]:
    """Returns the ids of a bundle's kernels that begin with `prefix`."""
    kernels = next(b["kernels"] for b in plan["bundles"] if f"{b['name']}_{b['target']}" == bundle)
    return [k for k in kernels if k.startswith(prefix)]


def _second_manifest(checkout: scratch.Checkout) -> int:
    """Adds a manifest; half of its kernels are llama3's, the others are its own. Returns the size of a half."""
    plan = _plan(checkout)
    chosen = set(_ids(plan, "llama3_trn1")[:20])
    specs = [k["spec"] for k in plan["kernels"] if k["id"] in chosen]
    shared = [{name: value for name, value in spec.items() if value is not None} for spec in specs]
    own = [
        {"op": "mul", "inputs": [f"({n},1,1,1)/f32"] * 2, "output": f"({n},1,1,1)/f32"}
        for n in range(7, 7 + len(shared))
    ]
    # YAML reads JSON.
    manifest = {"format": 1, "name": "second", "targets": ["trn1"], "kernels": shared + own}
    (checkout.path / "manifests/second.yaml").write_text(json.dumps(manifest, indent=1))
    line = 'neuron.kernels(manifest = ["//manifests:llama3.yaml"])'
    checkout.edit("MODULE.bazel", line, f"{line}\n{line.replace('llama3', 'second')}")
    checkout.append("manifests/BUILD.bazel", '\nneuron_manifest(name = "second")\n')
    return len(shared)


def measure(manifest: str | None) -> Iterator[figures.Figure]:
    """Yields two counts and the seconds for each row, compared with the cold build's.

    Then yields the number of kernels that each way to build compiled after each change that leaves HLO unchanged.
    """
    with scratch.checkouts() as checkouts:
        yield from _measure(checkouts, manifest)


def _measure(checkouts: scratch.Checkouts, manifest: str | None) -> Iterator[figures.Figure]:
    cold: Row | None = None
    for r in run(checkouts, manifest):
        cold = cold or r
        peers = [figures.Peer("cold build", n) for n in (cold.emits, cold.compiles, cold.seconds)]
        yield figures.exactly(f"{r.change}: emits", r.emits, r.want_emits, peers[0])
        yield figures.exactly(f"{r.change}: compiles", r.compiles, r.want_compiles, peers[1])
        yield figures.Figure(f"{r.change}", r.seconds, "s", peer=peers[2])
    for way in unchanged_hlo.WAYS:
        for compiler in unchanged_hlo.COMPILERS:
            for u in unchanged_hlo.run(way, compiler, checkouts):
                what = f"{way}, {compiler}: {u.change}"
                peer = figures.Peer("kernels", unchanged_hlo.KERNELS)
                yield figures.exactly(f"{what}: compiles", u.counts.compiles, u.want_compiles, peer)
                if u.counts.runs is not None and u.want_runs != u.want_compiles:
                    yield figures.exactly(f"{what}: runs of the compiler", u.counts.runs, u.want_runs, peer)


def main() -> int:
    args = figures.arguments(__doc__).parse_args()
    return figures.report(args, lambda: measure(SMALL if args.quick else None))


if __name__ == "__main__":
    sys.exit(main())
