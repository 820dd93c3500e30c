"""Bazel targets that pages name, such as //tools/lint or //backend/python:wheel, are declared in their packages."""

from __future__ import annotations

import re
from pathlib import Path

from kernelgen.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LABEL = re.compile(r"(?<![\w:/@.)])//([a-z][\w/-]*\w)(?::([\w.+-]*\w))?(?![\w/])")
OF_A_MANIFEST = re.compile(rf"(\w+)_({'|'.join(TARGETS)})(?:\.(?:embed|pack|report|tree))?")
OF_READERS = ("models", "my_kernels", "visibility")
"""Packages of a reader's repository, and Bazel's own."""
AS_PACKAGES = ("manifests", "manifests/models")
"""Packages that pages name as such; their targets are the manifests'."""


def declared(root: Path, package: str, name: str) -> bool:
    """Whether a package declares a target: its BUILD file has the name in quotes, or a manifest in its folder defines it."""
    made = OF_A_MANIFEST.fullmatch(name)
    if package.partition("/")[0] == "manifests" and made:
        return made[1] == "all" or (root / package / f"{made[1]}.yaml").is_file()
    if package in OF_READERS:
        return True
    build = root / package / "BUILD.bazel"
    return build.is_file() and (
        name == "all" or (package in AS_PACKAGES and package.endswith(name)) or f'"{name}"' in build.read_text()
    )


def undeclared(root: Path, text: str) -> list[str]:
    """Returns the labels of a text that no package declares."""
    found = [(match[0], match[1], match[2] or match[1].rpartition("/")[2]) for match in LABEL.finditer(text)]
    return [label for label, package, name in found if not declared(root, package, name)]


def test_targets_that_pages_name_are_declared() -> None:
    # Under Bazel, a package whose BUILD.bazel is not among the data of //tests:docs counts as absent.
    assert [(page.name, wrong) for page in PAGES if (wrong := undeclared(ROOT, page.read_text()))] == []
