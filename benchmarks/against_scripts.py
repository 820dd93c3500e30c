"""Compares the cost of builds, in s and compiles, with a shell loop and with a generator script, as people use today.

    ./bazelw run //benchmarks:against_scripts [-- --kernels N] [--without-bazel]

Four ways build the same NEFFs of the same kernels, from the same sources, with the simulator:

* a shell loop: one process per kernel, one after another;
* a generator: one process for all kernels, one after another, without a cache;
* `kernelgen build`;
* `bazel build`.

Each way builds five times: cold; with nothing changed; with one kernel changed (the computation of rope; there is one
rope); with a comment added to every emitter; and on a second machine, which has only the shared cache of the first. The
loop and the generator ignore existing files and always build everything. So they run twice, and the second run stands
for the four cases that are not cold.

The kernels are a sample of Llama-3-8B's. Exit status 1 if the ways have different bytes in the end, or if a build
compiles a kernel that it should not: with a compiler that takes minutes, the number of compiles decides.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cmake_project
import figures
import scratch
import usage

KERNELS = 48
QUICK = 6
CASES = ("cold", "nothing changed", "one kernel changed", "a comment in every emitter", "a second machine")
CHANGE = ("np.float32(attn_factor)", "np.float32(1.5 * attn_factor)")
"""The edited text in rope, and its replacement."""

LOOP, GENERATOR, BUILD, BAZEL = "shell loop", "generator", "kernelgen build", "bazel build"


@dataclass(frozen=True)
class Timed:
    """One way in one case.

    Attributes:
        seconds: wall time.
        compiles: the number of compiled kernels.
        want: the expected number.
    """

    seconds: float
    compiles: int
    want: int


def environment(copy: Path) -> dict[str, str]:
    """Returns an environment in which Python finds a copy's sources, with only the given caches."""
    return {**cmake_project.environment(), "PYTHONPATH": str(copy / "tools"), "PYTHONDONTWRITEBYTECODE": "1"}


def plan(copy: Path, manifest: Path) -> dict[str, Any]:
    """Returns a manifest's plan for trn1."""
    words = [sys.executable, "-P", "-m", "kernelgen", "plan", "--format=json", "--target=trn1", manifest]
    value: dict[str, Any] = json.loads(usage.run(words, env=environment(copy)).output)
    return value


def choose(kernels: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Returns `count` kernels spread over those of a plan; exactly one of them is a rope.

    Raises:
        ValueError: the manifest has too few kernels, or no rope.
    """
    ropes = [k for k in kernels if k["spec"]["op"] == "rope"]
    others = [k for k in kernels if k["emitters"] != [["kernelgen", "rope"]]]
    if not ropes or count < 2 or len(others) < count - 1:
        raise ValueError(f"{len(others)} kernels and {len(ropes)} ropes: not enough to choose {count}")
    return [ropes[0], *(others[i * len(others) // (count - 1)] for i in range(count - 1))]


def manifest(chosen: list[dict[str, Any]]) -> str:
    """Returns a manifest `llama3` of these kernels; YAML reads JSON."""
    kernels = [{k: v for k, v in kernel["spec"].items() if v is not None} for kernel in chosen]
    return json.dumps({"format": 1, "name": "llama3", "targets": ["trn1", "inf2"], "kernels": kernels}, indent=1)


def comment(copy: Path) -> None:
    """Adds a comment to every emitter."""
    for module in sorted((copy / "kernels").glob("*.py")):
        module.write_text(module.read_text() + "\n# A comment.\n")


def change(copy: Path) -> None:
    """Changes the computation of rope."""
    module = copy / "kernels/rope.py"
    text = module.read_text()
    if CHANGE[0] not in text:
        raise ValueError(f"{module} does not contain {CHANGE[0]!r}")
    module.write_text(text.replace(*CHANGE))


def digests(files: Iterator[Path]) -> dict[str, bytes]:
    """Returns the NEFFs by kernel."""
    return {file.name.partition(".")[0]: file.read_bytes() for file in files}


def sequential(copy: Path, folder: Path, text: str) -> Iterator[tuple[str, list[Timed], dict[str, bytes]]]:
    """Yields the loop and the generator: (way, cold and repeated build, NEFFs)."""
    path = folder / "llama3.yaml"
    path.write_text(text)
    planned = plan(copy, path)
    (config,) = planned["configs"].values()
    lines = [
        json.dumps(
            {
                "spec": k["spec"],
                "library": "kernelgen",
                "emitter": str(copy / "kernels" / f"{k['emitters'][0][1]}.py"),
                "config": config,
            }
        )
        for k in planned["kernels"]
    ]
    script = Path(__file__).parent / "serial_generator.py"
    for way in (LOOP, GENERATOR):
        output = folder / way.replace(" ", "-")
        groups = [[line] for line in lines] if way == LOOP else [lines]
        files = []
        for number, group in enumerate(groups):
            files.append(folder / f"{number}.jsonl")
            files[-1].write_text("\n".join(group) + "\n")
        runs = []
        for _ in range(2):
            used = [usage.run([sys.executable, "-P", script, file, output], env=environment(copy)) for file in files]
            runs.append(Timed(sum(u.seconds for u in used), len(lines), len(lines)))
        yield way, runs, digests(output.glob("*.neff"))


def with_kernelgen(folder: Path, text: str) -> Iterator[tuple[Timed, dict[str, bytes]]]:
    """Yields `kernelgen build` in each of the `CASES`: (time and count, NEFFs)."""
    shared = folder / "shared"

    def machine(name: str, source: Path | None = None) -> Path:
        """Copies the checkout to a new machine's folder, or another machine's folder if `source` is given."""
        root = folder / name
        if source is None:
            cmake_project.copy(root / "kernelgen")
            (root / "llama3.yaml").write_text(text)
        else:
            shutil.copytree(source / "kernelgen", root / "kernelgen")
            shutil.copy(source / "llama3.yaml", root)
        return root

    def build(root: Path, want: int) -> tuple[Timed, dict[str, bytes]]:
        words = [sys.executable, "-P", "-m", "kernelgen", "build", root / "llama3.yaml", "--target=trn1"]
        words += ["--compiler=simulator", f"--cache={root / 'cache'}", f"--shared-cache={shared}", "-o", root / "out"]
        used = usage.run(words, env=environment(root / "kernelgen"))
        counted = re.search(r"\((\d+) compiled", used.output)
        if not counted:
            raise SystemExit(f"kernelgen build did not say what it compiled:\n{used.output}")
        neffs = digests((root / "out/llama3_trn1").rglob("*.neff"))
        return Timed(used.seconds, int(counted[1]), want), neffs

    first = machine("first")
    total = len(json.loads(text)["kernels"])
    yield build(first, total)
    yield build(first, 0)
    change(first / "kernelgen")
    yield build(first, 1)
    comment(first / "kernelgen")
    yield build(first, 0)
    yield build(machine("second", first), 0)


def with_bazel(text: str) -> Iterator[tuple[Timed, dict[str, bytes]]]:
    """Yields `bazel build` in each of the `CASES`: (time and count, NEFFs)."""
    target = "//manifests:llama3_trn1"
    with scratch.checkout() as first:
        first.flags = [f"--disk_cache={first.path.parent / 'disk-cache'}"]
        (first.path / "manifests/llama3.yaml").write_text(text)

        def build(checkout: scratch.Checkout, want: int) -> tuple[Timed, dict[str, bytes]]:
            result = checkout.bazel("build", target)
            neffs = digests((checkout.path / "bazel-bin").resolve().rglob("*.neff"))
            return Timed(result.seconds, result.compiles, want), neffs

        yield build(first, len(json.loads(text)["kernels"]))
        yield build(first, 0)
        change(first.path)
        yield build(first, 1)
        comment(first.path)
        yield build(first, 0)
        first.bazel("shutdown")
        second = scratch.Checkout(first.path.parent / "second/project", first.path.parent / "second/out", first.flags)
        shutil.copytree(first.path, second.path, ignore=shutil.ignore_patterns("bazel-*"), symlinks=True)
        try:
            yield build(second, 0)
        finally:
            second.bazel("shutdown", expect=None)


def judge(times: dict[str, list[Timed]]) -> Iterator[figures.Figure]:
    """Yields each case of each way, against the loop and the generator, whose times are cold and repeated."""
    for at, case in enumerate(CASES):
        for way, timed in times.items():
            is_peer = way in (LOOP, GENERATOR)
            t = timed[min(at, 1)] if is_peer else timed[at]
            for other in (LOOP, GENERATOR):
                if is_peer and other != LOOP:
                    continue
                peer = figures.Peer(other, times[other][min(at, 1)].seconds) if way != other else None
                what = f"{way}: {case}"
                direction: figures.Direction = "peer / value"
                yield figures.Figure(what, t.seconds, "s", timed[0].want, peer, direction)
            if not is_peer:
                compiles = figures.Peer(LOOP, times[LOOP][0].want)
                yield figures.exactly(f"{way}: {case}: compiles", t.compiles, t.want, compiles)


def measure(count: int, *, bazel: bool = True) -> Iterator[figures.Figure]:
    with tempfile.TemporaryDirectory(prefix="neuron-kernelgen-") as name:
        folder = Path(name)
        copy = cmake_project.copy(folder / "kernelgen")
        chosen = choose(plan(copy, copy / "manifests/llama3.yaml")["kernels"], count)
        text = manifest(chosen)
        times: dict[str, list[Timed]] = {}
        neffs: dict[str, dict[str, bytes]] = {}
        for way, runs, made in sequential(copy, folder, text):
            times[way], neffs[way] = runs, made
        ways = {BUILD: lambda: with_kernelgen(folder, text), BAZEL: lambda: with_bazel(text)}
        for way, run in ways.items():
            if way == BAZEL and not bazel:
                continue
            times[way] = []
            for timed, made in run():
                times[way].append(timed)
                neffs.setdefault(way, made)  # of the cold build: later cases change the sources
    yield from judge(times)
    for way, made in neffs.items():
        same = sum(made.get(kernel) == neff for kernel, neff in neffs[LOOP].items())
        yield figures.exactly(f"{way}: NEFFs equal to the shell loop's", same, count, figures.Peer(LOOP, count))


def main() -> int:
    parser = figures.arguments(__doc__)
    parser.add_argument("--kernels", type=int, help=f"The number of kernels; {KERNELS} by default.")
    parser.add_argument("--without-bazel", action="store_true", help="Leave out `bazel build`.")
    args = parser.parse_args()
    count = args.kernels or (QUICK if args.quick else KERNELS)
    return figures.report(args, lambda: measure(count, bazel=not args.without_bazel))


if __name__ == "__main__":
    sys.exit(main())
