"""Another repository with its own manifest, kernel and program depends on this one, as the module registry builds it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

import scratch

smoke = pytest.mark.together("smoke")
MODULE = (scratch.CHECKOUT / "MODULE.bazel").read_text()
PRESUBMIT = yaml.safe_load((scratch.CHECKOUT / ".bcr/presubmit.yml").read_text())["bcr_test_module"]
SOURCE = json.loads((scratch.CHECKOUT / ".bcr/source.template.json").read_text())


def field(name: str) -> str:
    """Returns a field of the module in MODULE.bazel."""
    found = re.search(rf'^    {name} = "(.*)",$', MODULE, re.MULTILINE)
    assert found is not None
    return found[1]


def prefix() -> str:
    """Returns the folder inside the source archive."""
    return str(SOURCE["strip_prefix"].replace("{VERSION}", field("version")))


def git(*words: str, **environment: str) -> str:
    """Runs git in the checkout; returns its output."""
    command = ["git", "-C", str(scratch.CHECKOUT), *words]
    done = subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the unpacked source archive of the checkout's current state, made as the registry does: `git archive`
    omits files that git does not track.
    """
    if not (scratch.CHECKOUT / ".git").exists():
        return scratch.CHECKOUT
    folder = tmp_path_factory.mktemp("archive")
    # Its own index and objects: the repository stays unchanged.
    objects, index = git("rev-parse", "--path-format=absolute", "--git-path", "objects", "--git-path", "index").split(
        "\n"
    )
    shutil.copyfile(index, folder / "index")
    own = {
        "GIT_INDEX_FILE": str(folder / "index"),
        "GIT_OBJECT_DIRECTORY": str(folder),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
    }
    git("add", "--all", **own)
    tree = git("write-tree", **own)
    archive = folder / "source.tar.gz"
    git("archive", "--format=tar.gz", f"--prefix={prefix()}/", f"--output={archive}", tree, **own)
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "unpacked", filter="tar")
    return folder / "unpacked" / prefix()


@smoke
@pytest.mark.parametrize(
    "mode",
    [pytest.param([], id="bzlmod"), pytest.param(["--config=workspace"], id="workspace", marks=pytest.mark.long)],
)
def test_a_repository_that_uses_the_rules_builds_and_its_program_finds_its_kernels(
    mode: list[str], source: Path, checkouts: scratch.Checkouts
) -> None:
    with checkouts.lend("smoke", source=source, folder=PRESUBMIT["module_path"], flags=mode) as checkout:
        (task,) = PRESUBMIT["tasks"].values()
        result = checkout.bazel("test", *task["test_targets"])
        assert (result.emits, result.compiles) == (3, 3)
        assert "1 test passes" in result.output
        checkout.bazel("build", ":tiny_trn1.report")
        (page,) = (checkout.path / checkout.folder / "bazel-bin").glob("external/*/bundles/tiny_trn1.report.html")
        assert len(list(page.with_suffix(".kernels").iterdir())) == 3
        assert len(json.loads(page.with_suffix(".json").read_text())["kernels"]) == 3


def test_the_registry_finds_the_module_in_the_archive(source: Path) -> None:
    assert (source / "MODULE.bazel").read_text() == MODULE
    assert prefix() == f"{field('name')}-{field('version')}"
    assert SOURCE["url"].endswith(f"/{SOURCE['strip_prefix']}.tar.gz") and SOURCE["integrity"] == ""
    metadata = json.loads((source / ".bcr/metadata.template.json").read_text())
    assert {"homepage", "maintainers", "repository", "versions", "yanked_versions"} == metadata.keys()
    assert metadata["versions"] == []


def test_the_registry_builds_with_the_versions_of_bazel_that_the_module_takes() -> None:
    assert 'bazel_compatibility = [">=7.4.0"]' in MODULE
    assert PRESUBMIT["matrix"]["bazel"] == ["7.x", "8.x", "9.x"]
    assert re.search(
        r"you have Bazel 7\.4 to 9 on PATH", (scratch.CHECKOUT / "docs/guides/build-with-bazel.md").read_text()
    )
    (task,) = PRESUBMIT["tasks"].values()
    assert (task["platform"], task["bazel"]) == ("${{ platform }}", "${{ bazel }}")
