"""Kernels that a manifest names by their source, of every language, for two targets: built once, and again where they change."""

from __future__ import annotations

import shutil
import sysconfig
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ROOT, cmake_project

pytestmark = pytest.mark.long


def test_an_edit_builds_what_it_changes_and_a_comment_compiles_nothing(
    project: Callable[..., cmake_project.Project],
) -> None:
    made = project("add_neuron_kernels(k MANIFEST sources.yaml COMPILER simulator FORM PACK)")
    shutil.copytree(ROOT / "tests" / "data" / "source_kernels", made.source, dirs_exist_ok=True)
    kernels = made.source / "kernels"

    def edit(file: Path, old: str, new: str) -> list[str]:
        """Returns the names of the kernels that are compiled after an edit."""
        text = file.read_text()
        assert text.count(old) == 1
        time.sleep(1.1)
        file.write_text(text.replace(old, new))
        return [id_.partition("-")[0] for id_ in made.make().compiles]

    made.configure()
    assert len(made.make().compiles) == 18
    assert made.make().compiles == ()
    assert edit(kernels / "in_numpy.py", "def quantize", "# A comment.\ndef quantize") == []
    assert edit(kernels / "in_nki.py", "        tile = ", "        # A comment.\n        tile = ") == []
    assert edit(kernels / "rows.py", "rows[-1:]", "rows[:1]") == ["put_rows"] * 2
    assert len(list((made.build).rglob("sources_trn?.kernels.gguf"))) == 2


def test_an_installed_nki_changes_no_kernel(project: Callable[..., cmake_project.Project], tmp_path: Path) -> None:
    made = project("add_neuron_kernels(k MANIFEST sources.yaml COMPILER simulator FORM PACK)")
    shutil.copytree(ROOT / "tests" / "data" / "source_kernels", made.source, dirs_exist_ok=True)
    venv.create(tmp_path / "python")
    (packages,) = (tmp_path / "python").glob("lib/python*/site-packages")
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    hlo = []
    for folder in ("absent", "present"):
        made.build = tmp_path / folder
        made.configure(python=str(tmp_path / "python" / "bin" / "python3"))
        assert len(made.make().compiles) == 18
        hlo.append({file.name: file.read_bytes() for file in made.build.rglob("*.hlo.pb")})
        shutil.copytree(ROOT / "tests" / "data" / "fake_nki", packages, dirs_exist_ok=True)
    assert len(hlo[0]) == 9 and hlo[0] == hlo[1]
