"""`pip install .`: the wheel has everything that a checkout has, and works with no checkout beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from .conftest import ROOT

PACKAGE = ROOT / "tools" / "kernelgen"
PACKAGES = (PACKAGE, ROOT / "tools" / "nki_interpreter")


def test_the_lists_in_pyproject_are_those_of_the_folders() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent.relative_to(ROOT / "tools") for package in PACKAGES for p in package.rglob("*.py")}
    assert set(setuptools["packages"]) == {".".join(f.parts) for f in folders} | {"kernelgen.kernels"}
    data = {p for p in PACKAGE.rglob("*") if p.suffix in (".j2", ".json")}
    assert data
    covered = {
        path
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for path in (ROOT / "tools" / package.replace(".", "/")).glob(pattern)
    }
    assert covered == data


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_locks_have_hashes_and_nothing_of_the_machine_that_wrote_them(name: str) -> None:
    text = (ROOT / name).read_text()
    requirements = re.findall(r"^\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+$", text, re.MULTILINE)
    assert len(requirements) == len(re.findall("==", text)) > 0
    for line in text.splitlines():
        assert re.fullmatch(r"[a-z0-9-]+==\S+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?|    # .*|(# .*)?", line), line
    assert "://" not in text and not re.search(r"(^|\s)/\w", text)


def test_the_dev_lock_agrees_with_the_lock() -> None:
    def pins(name: str) -> dict[str, str]:
        return dict(re.findall(r"^(\S+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE))

    runtime, development = pins("requirements.txt"), pins("requirements-dev.txt")
    for name in runtime.keys() & development.keys():
        assert runtime[name] == development[name]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("tools/kernelgen", "tools/nki_interpreter", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "requirements.in", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(site: Path, *arguments: str | Path) -> str:
    kept = [p for p in sys.path if p and Path(p).resolve() != PACKAGE.parent.resolve()]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kernelgen", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *kept])},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_names_its_program_and_dependencies(site: Path) -> None:
    (info,) = site.glob("*.dist-info")
    assert "kernelgen = kernelgen.cli:main" in (info / "entry_points.txt").read_text()
    metadata = (info / "METADATA").read_text()
    wanted = [line for line in (ROOT / "requirements.in").read_text().splitlines() if not line.startswith("#")]
    assert re.findall(r"^Requires-Dist: ([^;\n]*)$", metadata, re.MULTILINE) == wanted
    assert re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE) == ["gs", "s3"]
    assert "Requires-Python: >=3.11" in metadata


def test_the_installed_program_builds(site: Path, basic: Path, tmp_path: Path) -> None:
    out = run(site, "build", basic, "--target", "trn1", "--only", "relu", "-o", tmp_path, "--compiler", "simulator")
    assert "1 built" in out


def test_the_installed_program_has_its_templates(site: Path, basic: Path, tmp_path: Path) -> None:
    for system in ("bazel", "cmake"):
        run(site, "generate", system, basic, "-o", tmp_path / system)
        assert any((tmp_path / system).iterdir())


def test_the_installed_program_sees_its_own_emitters(site: Path) -> None:
    assert "kernelgen/rope.py" in run(site, "list", "--ops")
    assert (site / "kernelgen/kernels/rope.py").is_file()
