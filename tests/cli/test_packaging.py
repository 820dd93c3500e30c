"""`pip install .`: the wheel has all files of a checkout, and works without one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kernelgen

from .conftest import ROOT

PACKAGE = ROOT / "tools" / "kernelgen"
together = pytest.mark.together("packaging")
PACKAGES = (PACKAGE, ROOT / "tools" / "nki_interpreter")


def test_the_lists_in_pyproject_are_those_of_the_folders() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent.relative_to(ROOT / "tools") for package in PACKAGES for p in package.rglob("*.py")}
    assert set(setuptools["packages"]) == {".".join(f.parts) for f in folders} | {"kernelgen.kernels"}
    data = {p for package in PACKAGES for p in package.rglob("*") if p.suffix in (".j2", ".json", ".typed")}
    assert {package / "py.typed" for package in PACKAGES} < data
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


def copy_sources(source: Path) -> Path:
    """Copies the sources of a wheel or an sdist; returns the folder."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "commit.txt")
    for name in ("tools/kernelgen", "tools/nki_interpreter", "tools/packaging", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "requirements.in", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    return source


def build(source: Path, what: str, output: Path) -> Path:
    """Builds the `wheel` or the `sdist` of a source tree; returns its path."""
    output.mkdir(exist_ok=True)
    code = f"import sys, reproducible; print(reproducible.build_{what}(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tools/packaging", *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(output)],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns the wheel and the sdist, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("built")
    source = copy_sources(folder / "source")
    return build(source, "wheel", folder), build(source, "sdist", folder)


@pytest.fixture(scope="module")
def site(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder where pip installed the wheel."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        folder,
        built[0],
    ]
    subprocess.run(command, check=True)
    return folder


@together
def test_another_machine_builds_the_same_bytes(built: tuple[Path, Path], tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    for path in source.rglob("*"):
        path.chmod(0o700)
        os.utime(path, (1_500_000_000, 1_500_000_000))
    assert build(source, "wheel", tmp_path).read_bytes() == built[0].read_bytes()
    assert build(source, "sdist", tmp_path).read_bytes() == built[1].read_bytes()


@together
def test_an_sdist_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert build(source, "wheel", tmp_path / "wheel").read_bytes() == built[0].read_bytes()


def test_the_commit_is_in_what_a_checkout_builds(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    (source / ".gitignore").write_text("*.egg-info\nbuild\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], cwd=source, check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], cwd=source, check=True, capture_output=True, text=True).stdout
    sdist = build(source, "sdist", tmp_path / "sdist")
    assert subprocess.run([*git, "status", "--short"], cwd=source, check=True, capture_output=True).stdout == b""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build(unpacked, "wheel", tmp_path / "wheel")) as wheel:
        assert wheel.read("kernelgen/commit.txt").decode() == f"{head[:12]}\n"


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


@together
def test_the_wheel_names_its_program_and_dependencies(site: Path) -> None:
    (info,) = site.glob("*.dist-info")
    assert "kernelgen = kernelgen.cli:main" in (info / "entry_points.txt").read_text()
    metadata = (info / "METADATA").read_text()
    wanted = [line for line in (ROOT / "requirements.in").read_text().splitlines() if not line.startswith("#")]
    assert re.findall(r"^Requires-Dist: ([^;\n]*)$", metadata, re.MULTILINE) == wanted
    assert re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE) == ["gs", "s3"]
    assert "Requires-Python: >=3.11" in metadata


@together
def test_the_installed_program_builds(site: Path, basic: Path, tmp_path: Path) -> None:
    out = run(site, "build", basic, "--target", "trn1", "--only", "relu", "-o", tmp_path, "--compiler", "simulator")
    assert "1 built" in out


@together
def test_the_installed_program_runs_a_kernel(site: Path, basic: Path) -> None:
    assert run(site, "run", "relu", "--manifest", basic).startswith("output0: float32[1, 1, 64, 1024]")
    assert (site / "bin" / "kernelgen").is_file()
    assert run(site, "--version").startswith(f"kernelgen {kernelgen.__version__} (commit unknown)\n")


@together
def test_the_installed_packages_say_that_they_are_typed(site: Path) -> None:
    assert (site / "kernelgen/py.typed").is_file() and (site / "nki_interpreter/py.typed").is_file()


@together
def test_the_installed_program_has_its_templates(site: Path, basic: Path, tmp_path: Path) -> None:
    for system in ("bazel", "cmake"):
        run(site, "generate", system, basic, "-o", tmp_path / system)
        assert any((tmp_path / system).iterdir())


@together
def test_the_installed_program_sees_its_own_emitters(site: Path) -> None:
    assert "kernelgen/rope.py" in run(site, "list", "--ops")
    assert (site / "kernelgen/kernels/rope.py").is_file()
