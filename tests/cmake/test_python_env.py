"""The Python environment of the build steps, which CMake and Bazel make by the same script."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .conftest import ROOT


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A lock file of one package, whose wheel is in the folder `wheels`."""
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "wheels/tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    file = tmp_path / "requirements.txt"
    file.write_text(f"tiny==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    return file


def make(lock: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with hostile settings of pip, no home folder, and the folder `fallback`."""
    settings = lock.with_name("pip.conf")
    settings.write_text("[global]\nconstraint = /nonexistent\n[install]\nuser = true\n")
    environment = {
        "HOME": "/dev/null/home",
        "PATH": os.environ["PATH"],
        "PIP_CONFIG_FILE": str(settings),
        "PIP_FIND_LINKS": str(lock.with_name("wheels")),
        "PIP_NO_INDEX": "1",
        "PIP_TARGET": str(lock.with_name("target")),
        "PIP_USER": "1",
    }
    script = ROOT / "rules/private/repositories/python_env.py"
    return subprocess.run(
        [sys.executable, script, "--lock", lock, "--fallback", lock.with_name("fallback")],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_settings_of_pip_and_a_missing_home_reach_no_environment(lock: Path) -> None:
    done = make(lock)
    assert done.returncode == 0, done.stderr
    path = Path(json.loads(done.stdout)["path"])
    assert path.parent == lock.with_name("fallback")
    assert [*path.glob("lib/python*/site-packages/tiny.py")] and (path / "complete").exists()
    assert not lock.with_name("target").exists()


def test_incomplete_environment_is_not_kept(lock: Path) -> None:
    """pip succeeds and installs nothing where a marker leaves the package out."""
    lock.write_text(lock.read_text().replace("==1.0", '==1.0 ; python_version < "3"'))
    done = make(lock, NEURON_KERNELGEN_CACHE=str(lock.with_name("cache")))
    assert done.returncode == 1 and "tiny==1.0 (not installed)" in done.stderr
    assert [*lock.with_name("cache").rglob("*")] == [lock.with_name("cache") / "python"]
