"""tools/release: a release requires one version, a named publisher, and a clean checkout of its tag."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kernelgen

from .conftest import ROOT

RELEASE = runpy.run_path(str(ROOT / "tools" / "release" / "release.py"))
METADATA: str = RELEASE["METADATA"]
PUBLISHED = {
    "homepage": "https://github.com/someone/neuron-kernelgen",
    "maintainers": [{"email": "someone@example.com", "github": "someone", "name": "Some One"}],
    "repository": ["github:someone/neuron-kernelgen"],
    "versions": [],
    "yanked_versions": {},
}


def test_one_version_everywhere() -> None:
    found = RELEASE["versions"](ROOT)
    assert set(found.values()) == {kernelgen.__version__}
    assert list(RELEASE["wrong_versions"](found)) == []
    (problem,) = RELEASE["wrong_versions"](found | {"MODULE.bazel": "9.9.9", "CHANGELOG.md": ""})
    assert "MODULE.bazel has 9.9.9" in problem and "CHANGELOG.md has none" in problem


def test_this_repository_names_no_publisher_and_cannot_be_released() -> None:
    wrong = "\n".join(RELEASE["wrong_publisher"](json.loads((ROOT / METADATA).read_text())))
    assert "homepage has the placeholder OWNER" in wrong and "repository has the placeholder OWNER" in wrong
    assert "maintainers is empty" in wrong


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, ""),
        ({"homepage": ""}, "homepage is empty"),
        ({"repository": ["github:OWNER/neuron-kernelgen"]}, "repository has the placeholder OWNER"),
        ({"repository": []}, "repository is empty"),
        ({"maintainers": [{"name": "Some One"}]}, "maintainer 1 has no email, github"),
    ],
)
def test_metadata_names_the_publisher(changed: dict[str, Any], problem: str) -> None:
    said = "\n".join(RELEASE["wrong_publisher"](PUBLISHED | changed))
    assert problem in said and bool(said) == bool(problem)


def test_only_a_clean_checkout_of_the_tag_is_released(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    for name in [*RELEASE["VERSIONS"], METADATA]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / METADATA).write_text(json.dumps(PUBLISHED))
    tag = f"v{kernelgen.__version__}"
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    assert RELEASE["problems"](tmp_path) == [f"the commit has no tag {tag}: git tag {tag}"]
    git("tag", tag)
    assert RELEASE["problems"](tmp_path) == []
    (tmp_path / "new").touch()
    assert RELEASE["problems"](tmp_path) == ["the checkout has changes that are not committed"]
