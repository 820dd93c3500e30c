"""Builds the archives of a release, or prints what the release lacks and builds nothing.

    python3 tools/release/release.py --check      prints what is missing; exit status 1 if anything is
    python3 tools/release/release.py dist         checks, then writes the wheels and the source archive into dist/

A release needs a commit with the tag of its version and no other change, the same version in all places, and the
publisher in `.bcr/metadata.template.json`. docs/guides/release.md explains the steps.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
METADATA = ".bcr/metadata.template.json"
PLACEHOLDER = "OWNER"
"""The placeholder in the template of Bazel's registry for the account or organization that publishes."""

VERSIONS = {
    "tools/kernelgen/__init__.py": r'^__version__ = "(.+)"$',
    "tools/nki_interpreter/__init__.py": r'^__version__ = "(.+)"$',
    "MODULE.bazel": r'^    name = "neuron_kernelgen",\n    version = "(.+)",$',
    "docs/guides/build-with-bazel.md": r'name = "neuron_kernelgen", version = "(.+?)"',
    "CHANGELOG.md": r"^## (\d\S*)",
}
"""The files that contain the version: the first match in each file."""


def versions(root: Path) -> dict[str, str]:
    """Returns the version in each file, empty if it has none."""
    found = {name: re.search(pattern, (root / name).read_text(), re.MULTILINE) for name, pattern in VERSIONS.items()}
    return {name: match[1] if match else "" for name, match in found.items()}


def wrong_versions(found: dict[str, str]) -> Iterator[str]:
    """Yields the errors in the versions by file."""
    if len(set(found.values())) != 1 or not all(found.values()):
        yield "the version differs: " + ", ".join(f"{name} has {version or 'none'}" for name, version in found.items())


def wrong_publisher(metadata: dict[str, Any]) -> Iterator[str]:
    """Yields the errors in the registry's metadata, which must name the publisher and the contact for failing entries."""
    homepage, repositories = metadata.get("homepage") or "", metadata.get("repository") or []
    for key, value in (("homepage", homepage), ("repository", " ".join(repositories))):
        if not value:
            yield f"{METADATA}: {key} is empty"
        elif re.search(rf"\b{PLACEHOLDER}\b", value):
            yield f"{METADATA}: {key} has the placeholder {PLACEHOLDER}: write the GitHub account that publishes"
    maintainers = metadata.get("maintainers") or []
    if not maintainers:
        yield f"{METADATA}: maintainers is empty: write the name, email and github of each"
    for number, one in enumerate(maintainers, 1):
        lacking = [key for key in ("name", "email", "github") if not one.get(key)]
        if lacking:
            yield f"{METADATA}: maintainer {number} has no {', '.join(lacking)}"


def wrong_commit(root: Path, version: str) -> Iterator[str]:
    """Yields the errors in the checkout: it is not the tag's commit, or has changes."""
    if _git(root, "status", "--porcelain"):
        yield "the checkout has changes that are not committed"
    if f"v{version}" not in _git(root, "tag", "--points-at", "HEAD").split():
        yield f"the commit has no tag v{version}: git tag v{version}"


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], check=True, capture_output=True, text=True).stdout


def problems(root: Path) -> list[str]:
    """Returns everything that a release of a checkout lacks."""
    found = versions(root)
    metadata = json.loads((root / METADATA).read_text())
    return [
        *wrong_versions(found),
        *wrong_publisher(metadata),
        *wrong_commit(root, found["tools/kernelgen/__init__.py"]),
    ]


def make(root: Path, output: Path, version: str) -> None:
    """Writes the wheels and the source archive; the archive and kernelgen's wheel have the same bytes each time."""
    output.mkdir(parents=True, exist_ok=True)
    name = f"neuron_kernelgen-{version}"
    archive = [
        "archive",
        "--format=tar.gz",
        f"--prefix={name}/",
        f"--output={output / f'{name}.tar.gz'}",
        f"v{version}",
    ]
    for command in (
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(output), "."],
        ["./bazelw", "run", "//backend/python:wheel", "--", str(output)],
        ["git", *archive],
    ):
        subprocess.run(command, cwd=root, check=True)


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("output", type=Path, nargs="?", default=Path("dist"), help="folder for the archives (dist)")
    parser.add_argument("--check", action="store_true", help="only print what is missing")
    args = parser.parse_args()
    wrong = problems(ROOT)
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    if wrong or args.check:
        return 1 if wrong else 0
    make(ROOT, args.output.absolute(), versions(ROOT)["MODULE.bazel"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
