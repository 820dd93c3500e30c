"""Kernels in every language that a manifest names by their source, for two targets: built once, and again after an edit."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.cli.frame import run

from .conftest import ROOT, cmake_project


@pytest.mark.long
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


def test_every_kind_of_kernel_is_in_the_pack_that_kernelgen_build_writes(
    project: Callable[..., cmake_project.Project], tmp_path: Path
) -> None:
    made = project("add_neuron_kernels(k MANIFEST every.yaml TARGETS trn1 COMPILER simulator FORM PACK)")
    shutil.copytree(ROOT / "tests" / "data" / "source_kernels", made.source, dirs_exist_ok=True)
    made.configure()
    made.make()
    out = tmp_path / "out"
    assert (
        run(["build", str(made.source / "every.yaml"), "--compiler", "simulator", "--target", "trn1", "-o", str(out)])
        == 0
    )
    (pack,) = made.build.rglob("*.kernels.gguf")
    assert pack.read_bytes() == (out / pack.name).read_bytes()


@pytest.mark.parametrize("generator", ["Ninja", pytest.param("Unix Makefiles", marks=pytest.mark.long)])
def test_a_target_makes_data_before_an_emitter_reads_it(
    project: Callable[..., cmake_project.Project], tmp_path: Path, generator: str
) -> None:
    library = tmp_path / "mine"
    library.mkdir()
    (library / "own.py").write_text(
        "from pathlib import Path\n\nfrom kernelgen.emitters import emitter\n\n\n@emitter('relu')\ndef relu(x):\n"
        "    return x * float(Path(__file__).with_name('factor.txt').read_text())\n"
    )
    made = project(
        f'set(factor "{library}/factor.txt")',
        'add_custom_command(OUTPUT "${factor}" COMMAND sh -c "sleep 1; cp \\"$0\\" \\"$1\\"" factor.in "${factor}" '
        'WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" DEPENDS factor.in VERBATIM)',
        'add_custom_target(factor DEPENDS "${factor}")',
        f'add_neuron_kernels(k MANIFEST small.yaml TARGETS trn1 FORM PACK KERNELS "{library}" DATA factor "${{factor}}")',
        generator=generator,
    )
    (made.source / "factor.in").write_text("2")
    made.configure()
    assert len(made.make().compiles) == 3
    time.sleep(1.1)
    (made.source / "factor.in").write_text("3")
    assert [id_.partition("-")[0] for id_ in made.make().compiles] == ["relu"]
    assert made.make().compiles == ()
