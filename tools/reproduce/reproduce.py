"""Builds everything twice under different conditions and compares the results byte by byte: `./bazelw run //tools/reproduce`.

The two builds differ in the folder of the checkout, the output folder, the number of jobs, the user name, the time
zone, the locale, the umask and Python's hash seed. With Bazel, the execution logs are compared too: a cache would not
share an action whose command, environment or inputs differ, even if its outputs agree.

The program compares three pairs: Bazel with Bazel, `kernelgen build` with itself, and `kernelgen build` with Bazel.
Exit status 1 if anything differs, with the first differing files and actions; 2 if a build fails.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import kernelgen
import scratch

ROOT = Path(__file__).resolve().parents[2]

SHOWN = 10
"""The number of differences to print; the others are only counted."""


@dataclass(frozen=True)
class Conditions:
    """The conditions of one of the two builds."""

    folder: str
    jobs: int
    umask: int
    env: Mapping[str, str]


CONDITIONS = (
    Conditions(
        "a",
        1,
        0o022,
        {
            "PYTHONHASHSEED": "1",
            "TZ": "UTC",
            "USER": "alice",
            "LOGNAME": "alice",
            "LC_ALL": "C",
            "SOURCE_DATE_EPOCH": "0",
        },
    ),
    Conditions(
        "another folder, deeper/and with spaces",
        3,
        0o077,
        {"PYTHONHASHSEED": "4242", "TZ": "Asia/Kathmandu", "USER": "bob", "LOGNAME": "bob", "LC_ALL": "C.UTF-8"},
    ),
)


@dataclass
class Comparison:
    """The comparison of two builds.

    Attributes:
        title: the names of the two builds.
        compared: the numbers of files and actions, by kind.
        differences: one line per difference.
    """

    title: str
    compared: dict[str, int] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    def files(self, kind: str, first: Mapping[str, str], second: Mapping[str, str]) -> None:
        """Compares digests by name; a file that only one build has is a difference."""
        self.compared[kind] = self.compared.get(kind, 0) + len(first)
        if not first:
            self.differences.append(f"no {kind} at all")
        for name in sorted(first.keys() | second.keys()):
            if name not in first or name not in second:
                self.differences.append(
                    f"{kind} {name} is in the {'second' if name not in first else 'first'} build only"
                )
            elif first[name] != second[name]:
                self.differences.append(f"{kind} {name} differs")

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.compared.items())
        if not self.differences:
            return f"{self.title}: the same ({counts})"
        shown = "".join(f"\n  {line}" for line in self.differences[:SHOWN])
        rest = len(self.differences) - SHOWN
        return f"{self.title}: {len(self.differences)} differences in {counts}{shown}" + (
            f"\n  and {rest} more" if rest > 0 else ""
        )


def kind_of(path: Path) -> str | None:
    """Returns the kind of a built file; None if it is not a product."""
    for suffix, kind in ((".hlo.pb", "HLOs"), (".neff", "NEFFs"), (".kernels.gguf", "packs")):
        if path.name.endswith(suffix):
            return kind
    return "indexes" if path.name == "index.json" else None


def digests(files: Iterator[tuple[str, Path]]) -> dict[str, dict[str, str]]:
    """Returns the SHA-256 of files by kind and name."""
    found: dict[str, dict[str, str]] = {}
    for name, path in files:
        if kind := kind_of(path):
            found.setdefault(kind, {})[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def under(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the files below a folder by their path in it, without kernelgen's state for its next run."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and ".kernelgen" not in path.parts:
            yield str(path.relative_to(folder)), path


def actions(log: Path) -> dict[str, str]:
    """Returns a digest of each action and its outputs, by the outputs' names.

    It leaves out whether and how long the action ran, and its strategy.
    """
    found: dict[str, str] = {}
    for spawn in scratch.spawns(log):
        kept = {
            key: spawn.get(key)
            for key in ("mnemonic", "commandArgs", "environmentVariables", "inputs", "platform", "actualOutputs")
        }
        name = f"{spawn['mnemonic']} {' '.join(map(str, spawn.get('listedOutputs', [])))}"  # type: ignore[arg-type]
        found[name] = hashlib.sha256(repr(kept).encode()).hexdigest()
    return found


def bazel(
    conditions: Conditions, targets: Sequence[str], folder: Path
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Builds in a scratch checkout; returns the products' digests and the actions."""
    root = folder / "bazel" / conditions.folder
    root.mkdir(parents=True)
    before = os.umask(conditions.umask)
    try:
        checkout = scratch.Checkout(
            scratch.copy(root / "project"),
            root.parent / f"out{conditions.jobs}",
            env=conditions.env,
            startup=["--max_idle_secs=60", *scratch.SMALL_SERVER],
        )
        try:
            # One checkout, and its output root with Bazel's symlink forest, are in a folder with spaces.
            result = checkout.bazel("build", f"--jobs={conditions.jobs}", *targets)
            if not result.emits:
                raise scratch.BuildFailed("nothing was emitted: the build was not from scratch")
            out = next((checkout.output_root).glob("*/execroot/*/bazel-out"))
            products = digests(
                (str(path.relative_to(out)), path) for _, path in under(out) if ".runfiles" not in str(path)
            )
            return products, actions(checkout.output_root / "execution.json")
        finally:
            checkout.bazel("shutdown", expect=None)
            subprocess.run(["chmod", "-R", "u+w", checkout.output_root], check=False)
    finally:
        os.umask(before)


def command_line(
    conditions: Conditions, manifests: Sequence[str], folder: Path, kernels: Path | None
) -> dict[str, dict[str, str]]:
    """Builds with `kernelgen build`, with the emitters in `kernels` if given; returns the products' digests."""
    out = folder / "kernelgen" / conditions.folder
    out.mkdir(parents=True)
    env = os.environ | dict(conditions.env) | {"PYTHONPATH": str(Path(kernelgen.__file__).parents[1])}
    # With a cache, a file would only be compared with itself.
    env |= {"NEURON_KERNELGEN_NEFF_CACHE": "off", "NEURON_KERNELGEN_SHARED_CACHE": "off"}
    own = [f"--kernels={kernels}"] if kernels else []
    words = ["--target=trn1", "--compiler=simulator", f"-j{conditions.jobs}", "-o", "out", *own]
    done = subprocess.run(
        [sys.executable, "-m", "kernelgen", "build", *manifests, *words],
        cwd=out,
        env=env,
        umask=conditions.umask,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise scratch.BuildFailed(f"kernelgen build ended with status {done.returncode}:\n{done.stdout[-3000:]}")
    return digests(under(out / "out"))


def by_kernel(products: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Returns HLOs, NEFFs and packs by file name alone, since the two ways use different folders."""
    return {
        kind: {
            Path(name).name.replace(".trn1.neff", ".neff"): digest for name, digest in products.get(kind, {}).items()
        }
        for kind in ("HLOs", "NEFFs", "packs")
    }


def compare(manifests: Sequence[str], *, with_bazel: bool = True, kernels: Path | None = None) -> list[Comparison]:
    """Returns the comparisons.

    Args:
        manifests: names in manifests/.
        with_bazel: whether Bazel builds too.
        kernels: a folder with emitters that `kernelgen build` prefers.
    """
    files = [str(ROOT / "manifests" / f"{name}.yaml") for name in manifests]
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="reproduce-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        first, second = (command_line(c, files, folder, kernels) for c in CONDITIONS)
        own = Comparison("kernelgen build, twice")
        for kind in sorted(first.keys() | second.keys()):
            own.files(kind, first.get(kind, {}), second.get(kind, {}))
        found.append(own)
        if with_bazel:
            targets = [f"//manifests:{name}_{target}" for name in manifests for target in ("trn1", "trn1.tree")]
            (one, log_one), (two, log_two) = (bazel(c, targets, folder) for c in CONDITIONS)
            pair = Comparison("bazel build, twice")
            for kind in sorted(one.keys() | two.keys()):
                pair.files(kind, one.get(kind, {}), two.get(kind, {}))
            pair.files("actions", log_one, log_two)
            found.append(pair)
            cross = Comparison("kernelgen build and bazel build")
            ours, theirs = by_kernel(first), by_kernel(one)
            for kind, names in theirs.items():
                # Intermediate files that only one of the two keeps are not products.
                cross.files(kind, names, {name: ours[kind].get(name, "") for name in names})
            found.append(cross)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifests", nargs="*", default=["basic", "llama3"], help="names in manifests/; all by default")
    parser.add_argument("--no-bazel", action="store_true", help="build only with `kernelgen build`")
    args = parser.parse_args()
    try:
        found = compare(args.manifests, with_bazel=not args.no_bazel)
    except scratch.BuildFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for comparison in found:
        print(comparison)
    return 1 if any(comparison.differences for comparison in found) else 0


if __name__ == "__main__":
    sys.exit(main())
