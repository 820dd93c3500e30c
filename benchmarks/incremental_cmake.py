"""Counts what a CMake build with Ninja repeats after a change, against the expected counts.

    python3 benchmarks/incremental_cmake.py

It works in a scratch copy of this checkout, with a manifest of 128 kernels. For each change, it prints how many kernels
were emitted, how many NEFFs were compiled, and the expected numbers; then the seconds of Ninja with nothing to do. Exit
status 1 if a count is wrong, or if that takes more than 100 ms.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cmake_project
import figures

KERNELS = 128
NULL_SECONDS = 0.1
"""The limit of Ninja's seconds with nothing to do."""

NUMERIC = ("np.float32(eps)", "np.float32(1.5 * eps)")
"""A change of the norms' computation."""

_OPS = ("relu", "silu", "gelu", "add", "mul", "rms_norm", "soft_max", "reshape")


@dataclass(frozen=True)
class Row:
    """One change: the numbers of kernels emitted and NEFFs compiled, and the expected numbers."""

    change: str
    emits: int
    compiles: int
    want_emits: int
    want_compiles: int
    seconds: float

    @property
    def right(self) -> bool:
        return (self.emits, self.compiles) == (self.want_emits, self.want_compiles)


def manifest(count: int) -> str:
    """Returns a manifest of `count` kernels, with the same number of each op; YAML reads JSON."""
    kernels = []
    for number in range(count):
        op, width = _OPS[number % len(_OPS)], 32 + number // len(_OPS)
        tensor = f"({width},4,1,1)/f32"
        kernel: dict[str, object] = {"op": op, "inputs": [tensor], "output": tensor}
        if op in ("add", "mul"):
            kernel["inputs"] = [tensor, f"({width},1,1,1)/f32"]
        elif op == "rms_norm":
            kernel["params"] = {"eps": 1e-5}
        elif op == "reshape":
            kernel["output"] = f"(4,{width},1,1)/f32"
        kernels.append(kernel)
    return json.dumps({"format": 1, "name": "many", "targets": ["trn1", "inf2"], "kernels": kernels}, indent=1)


def prepare(folder: Path, count: int, generator: str = "Ninja") -> tuple[Path, cmake_project.Project]:
    """Returns a scratch checkout and a configured project of `count` kernels that uses it."""
    root = cmake_project.copy(folder / "kernelgen")
    project = cmake_project.Project(folder / "project", folder / "build", generator)
    cmake_project.write(
        project.source,
        [
            f'include("{root}/rules/cmake/NeuronKernels.cmake")',
            "set(TARGETS trn1 CACHE STRING targets)",
            "add_neuron_kernels(many_kernels MANIFEST many.yaml TARGETS ${TARGETS} COMPILER simulator FORM PACK)",
        ],
    )
    (project.source / "many.yaml").write_text(manifest(count))
    project.configure()
    return root, project


def changes(root: Path, project: cmake_project.Project, count: int) -> Iterator[Row]:
    """Yields a row per change of a project that is configured and not yet built."""
    norms = len([n for n in range(count) if _OPS[n % len(_OPS)] == "rms_norm"])

    def row(change: str, want_emits: int, want_compiles: int) -> Row:
        result = project.make()
        return Row(change, result.emits, len(result.compiles), want_emits, want_compiles, result.seconds)

    yield row("cold build", count, count)
    yield row("nothing", 0, 0)

    for module in sorted((root / "kernels").glob("*.py")):
        module.write_text(module.read_text() + "\n# A comment.\n")
    yield row("a comment in every emitter", count, 0)
    yield row("nothing after that", 0, 0)

    norm = root / "kernels" / "norm.py"
    text = norm.read_text()
    if NUMERIC[0] not in text:
        raise ValueError(f"{norm} does not contain {NUMERIC[0]!r}")
    norm.write_text(text.replace(*NUMERIC))
    yield row("a numeric change in the norms", norms, norms)

    (project.source / "many.yaml").write_text(manifest(count + 1))
    yield row("one kernel added to the YAML", 1, 1)

    project.configure("-DTARGETS=trn1;inf2")
    yield row("another target", 0, count + 1)


def measure(kernels: int) -> Iterator[figures.Figure]:
    """Yields two counts and the seconds for each change, compared with the cold build's; then the cost of a null build."""
    cold: Row | None = None
    with tempfile.TemporaryDirectory(prefix="neuron-kernelgen-") as folder:
        root, project = prepare(Path(folder), kernels)
        for r in changes(root, project, kernels):
            cold = cold or r
            peers = [figures.Peer("cold build", n) for n in (cold.emits, cold.compiles, cold.seconds)]
            yield figures.exactly(f"{r.change}: emits", r.emits, r.want_emits, peers[0])
            yield figures.exactly(f"{r.change}: compiles", r.compiles, r.want_compiles, peers[1])
            yield figures.Figure(r.change, r.seconds, "s", peer=peers[2])
        runs = [project.ninja() for _ in range(10)]
        if not all("no work to do" in output for output, _ in runs):
            raise SystemExit(f"Ninja found something to do:\n{runs[0][0]}")
        # Other work on the machine can only add to the time.
        best = min(seconds for _, seconds in runs)
        yield figures.Figure(
            "Ninja with nothing to do, best of 10",
            best,
            "s",
            kernels,
            figures.Peer("cold build", cold.seconds if cold else 0.0),
            limit=figures.Limit("value", at_most=NULL_SECONDS),
        )


def main() -> int:
    args = figures.arguments(__doc__).parse_args()
    return figures.report(args, lambda: measure(16 if args.quick else KERNELS))


if __name__ == "__main__":
    sys.exit(main())
