"""add_neuron_kernels() builds the same as `kernelgen build`, and a change rebuilds only what depends on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ROOT, SMALL, cmake_project

import incremental_cmake  # isort: skip  # benchmarks/incremental_cmake.py, which conftest makes importable

Make = Callable[..., cmake_project.Project]

MAIN = """\
#include <neuron_kernels/small_inf2.h>
#include <neuron_kernels/small_trn1.h>
#include <cstdio>

int main() {
    for (const neuron_kernels_table * table : { &neuron_kernels_small_trn1, &neuron_kernels_small_inf2 }) {
        char             message[NEURON_KERNELS_MESSAGE_SIZE];
        neuron_kernels * bundle;
        if (neuron_kernels_open_embedded(table, &bundle, message, sizeof(message)) != NEURON_KERNELS_OK) {
            std::puts(message);
            return 1;
        }
        neuron_kernels_tensor inputs[2] = { { 0, { 64, 4, 1, 1 }, {} }, { 0, { 64, 1, 1, 1 }, {} } };
        neuron_kernels_set_dense(&inputs[0]);
        neuron_kernels_set_dense(&inputs[1]);
        const int32_t found =
            neuron_kernels_find(bundle, "ADD", nullptr, inputs, 2, &inputs[0], NEURON_KERNELS_NO_ALIAS);
        const int32_t missed =
            neuron_kernels_find(bundle, "SUB", nullptr, inputs, 2, &inputs[0], NEURON_KERNELS_NO_ALIAS);
        std::printf("%s %zu %s %d\\n", neuron_kernels_metadata(bundle, "target"), neuron_kernels_count(bundle),
                    neuron_kernels_id(bundle, found), missed == NEURON_KERNELS_NOT_FOUND);
        std::puts(neuron_kernels_id(bundle, neuron_kernels_find_name(bundle, "doubled")));
    }
}
""".replace("#include <cstdio>\n", "#include <cstdio>\n#include <initializer_list>\n")

NAMED = '  - {source: "own/doubled.py:doubled", inputs: ["f32[3,2,5]"], outputs: ["f32[3,2,5]"]}\n'
"""A kernel that no op names, for the manifest."""
DOUBLED = """\
import numpy as np

from kernelgen.languages.numpy import knob


def doubled(x):
    return knob(np.add(x, x), mem_space="Hbm")
"""

GENERATORS = pytest.mark.parametrize("generator", ["Ninja", pytest.param("Unix Makefiles", marks=pytest.mark.long)])


def kernelgen(*arguments: object) -> None:
    """Runs the command line of this checkout."""
    subprocess.run(
        [sys.executable, "-P", "-m", "kernelgen", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), *filter(None, sys.path)])},
        check=True,
        capture_output=True,
    )


@GENERATORS
def test_a_program_finds_kernels_that_are_the_same_bytes_as_kernelgen_build_makes(
    project: Make, generator: str, tmp_path: Path
) -> None:
    made = project(
        "add_neuron_kernels(small_kernels MANIFEST small.yaml COMPILER simulator FORM EMBED PACK REPORT TREE MEMORY_PER_COMPILE 2G)",
        "add_executable(main main.cc)",
        "target_link_libraries(main PRIVATE NeuronKernels::small_kernels)",
        'file(GENERATE OUTPUT packs CONTENT "$<TARGET_PROPERTY:small_kernels,NEURON_KERNELS_PACKS>")',
        generator=generator,
        languages="CXX",
    )
    (made.source / "main.cc").write_text(MAIN)
    (made.source / "small.yaml").write_text(SMALL + NAMED)
    (made.source / "own").mkdir()
    (made.source / "own" / "doubled.py").write_text(DOUBLED)
    made.configure()
    made.make()
    printed = cmake_project.run(made.build / "main").splitlines()
    assert [line.split(" add-64x4-f32-")[0] for line in printed[::2]] == ["trn1 4", "inf2 4"]
    assert all(line.endswith(" 1") for line in printed[::2])
    assert all(line.startswith("doubled-3x2x5-f32-") for line in printed[1::2])

    # The same manifest under another path; packs and trees contain no path.
    manifest = tmp_path / "elsewhere" / "small.yaml"
    shutil.copytree(made.source / "own", manifest.parent / "own")
    manifest.write_text(SMALL + NAMED)
    kernelgen("build", manifest, "--compiler", "simulator", "-o", tmp_path / "direct")
    packs = [Path(p) for p in (made.build / "packs").read_text().split(";")]
    assert [p.name for p in packs] == ["small_inf2.kernels.gguf", "small_trn1.kernels.gguf"]
    for pack in packs:
        assert pack.read_bytes() == (tmp_path / "direct" / pack.name).read_bytes()
        assert b'{"knobs":[{"array":"float32[3, 2, 5]","knob":{"mem_space":"Hbm"}' in pack.read_bytes()
    for bundle in ("small_trn1", "small_inf2"):
        trees = packs[0].parent / "tree" / bundle, tmp_path / "direct" / bundle
        report = json.loads((packs[0].parent / f"{bundle}.report.json").read_text())
        kinds = sorted(kernel["kind"] for kernel in report["kernels"])
        assert kinds == ["add", "doubled", "relu", "rms_norm"] and report["without_hlo"] == []
        contents = [{f.relative_to(t): f.read_bytes() for f in t.rglob("*") if f.is_file()} for t in trees]
        assert contents[0] == contents[1] and len(contents[0]) == 9

    # If the build tool finds nothing to do, the files' times are in the right order.
    assert made.make().commands == ()
    if generator == "Ninja":
        assert "no work to do" in made.ninja()[0]


@pytest.mark.skipif("RUNFILES_DIR" not in os.environ, reason="compares with what Bazel built, and runs without Bazel")
@pytest.mark.skipif(
    bool(os.environ.get("NEURON_SDK") or shutil.which("neuronx-cc")),
    reason="neuronx-cc's bytes may differ from run to run",
)
def test_the_pack_is_the_one_that_bazel_builds(project: Make, tmp_path: Path) -> None:
    [built] = Path(os.environ["RUNFILES_DIR"]).glob("*/bundles/basic_trn1.kernels.gguf")
    made = project("add_neuron_kernels(k MANIFEST basic.yaml TARGETS trn1 COMPILER simulator FORM PACK)")
    shutil.copy(ROOT / "manifests" / "basic.yaml", made.source)
    made.configure()
    made.make()
    assert (made.build / "neuron_kernels" / "k" / built.name).read_bytes() == built.read_bytes()


@GENERATORS
def test_every_change_runs_exactly_the_commands_it_must(tmp_path: Path, generator: str) -> None:
    root, project = incremental_cmake.prepare(tmp_path, 8, generator)
    rows = list(incremental_cmake.changes(root, project, 8))
    assert [(r.change, r.emits, r.compiles) for r in rows if not r.right] == []
    assert len(rows) == 7
    # A kernel removed from the manifest removes nothing else.
    (project.source / "many.yaml").write_text(incremental_cmake.manifest(8))
    result = project.make()
    assert result.compiles == ()
    assert sorted(c for c in result.commands if c.startswith("Packing")) == ["Packing many_inf2", "Packing many_trn1"]
    packs = sorted((project.build / "neuron_kernels" / "many_kernels").glob("*.gguf"))
    assert len(packs) == 2

    # A build folder can't be moved, but another one gives the same bytes.
    other = cmake_project.Project(tmp_path / "moved" / "project", tmp_path / "moved" / "build", generator)
    shutil.copytree(project.source, other.source)
    other.configure("-DTARGETS=trn1;inf2")
    other.make()
    for pack in packs:
        assert (other.build / pack.relative_to(project.build)).read_bytes() == pack.read_bytes()


@GENERATORS
def test_a_kernel_that_fails_is_an_error_until_it_is_mended(project: Make, tmp_path: Path, generator: str) -> None:
    library = tmp_path / "mine"
    library.mkdir()
    good = 'from kernelgen.emitters import emitter\n\n\n@emitter("relu")\ndef relu(x, *, out):\n    return {}\n'
    (library / "own.py").write_text(good.format("x.reshape(3)"))
    made = project(
        f'add_neuron_kernels(k MANIFEST small.yaml TARGETS trn1 FORM PACK KERNELS "{library}")', generator=generator
    )
    made.configure()
    result = made.make("--", "-k", *(["0"] if generator == "Ninja" else []), expect=None)
    assert "own.py" in result.output and "relu-64x4-f32" in result.output
    assert not list(made.build.rglob("*.gguf"))
    (library / "own.py").write_text(good.format("x * 2"))
    result = made.make()
    assert [id_.partition("-")[0] for id_ in result.compiles][-1:] in (["relu"], ["rms_norm"])
    assert list(made.build.rglob("*.gguf"))
    # A new module is noticed.
    (library / "more.py").write_text(good.format("x * 3").replace("relu", "silu"))
    text = SMALL + '  - {op: silu, inputs: ["(64,4,1,1)/f32"], output: "(64,4,1,1)/f32"}\n'
    (made.source / "small.yaml").write_text(text)
    result = made.make()
    assert [id_.partition("-")[0] for id_ in result.compiles] == ["silu"]
    assert any(c.startswith("Emitting silu-64x4-f32-") for c in result.commands)
    plan = json.loads((made.build / "neuron_kernels" / "k" / "plan.json").read_text())
    assert {library for k in plan["kernels"] for library, _ in k["emitters"]} == {"kernelgen", "mine"}


@GENERATORS
def test_edited_data_file_builds_its_kernels(project: Make, tmp_path: Path, generator: str) -> None:
    library = tmp_path / "mine"
    library.mkdir()
    (library / "own.py").write_text(
        "import pathlib\nfrom kernelgen.emitters import emitter\n\n"
        "FACTOR = float(pathlib.Path(__file__).with_name('factor.txt').read_text())\n\n\n"
        '@emitter("relu")\ndef relu(x):\n    return x * FACTOR\n'
    )
    (library / "factor.txt").write_text("2")
    made = project(
        f'add_neuron_kernels(k MANIFEST small.yaml TARGETS trn1 FORM PACK KERNELS "{library}" DATA "{library}/factor.txt")',
        generator=generator,
    )
    made.configure()
    assert len(made.make().compiles) == 3
    assert made.make().compiles == ()
    if generator != "Ninja":
        time.sleep(1.1)  # make compares seconds on some file systems
    (library / "factor.txt").write_text("3")
    assert [id_.partition("-")[0] for id_ in made.make().compiles] == ["relu"]
    assert made.make().compiles == ()


def test_edited_generator_plans_again_in_a_folder_with_brackets(project: Make, checkout: Path) -> None:
    made = project("add_neuron_kernels(k MANIFEST small.yaml TARGETS trn1 FORM PACK)")
    made.configure()
    inputs = made.ninja("-t", "query", "build.ninja")[0].splitlines()
    assert "[" in str(checkout) and f"    {checkout}/tools/kernelgen/plan.py" in [
        line.replace("| ", "") for line in inputs
    ]


def test_a_manifest_that_breaks_stops_the_build_until_it_is_mended(project: Make) -> None:
    made = project("add_neuron_kernels(k MANIFEST small.yaml TARGETS trn1 FORM PACK)")
    made.configure()
    made.make()
    path = made.source / "small.yaml"
    path.write_text(SMALL.replace("relu", "rleu"))
    output = made.make(expect=None).output
    assert f"{path}:6:10: error: unknown op 'rleu': did you mean 'relu'?" in output
    path.write_text(SMALL)
    assert made.make().compiles == ()


def test_the_real_compiler_is_called_once_for_a_neff_and_not_again_for_having_moved(
    project: Make, sdk: Callable[..., Path], tmp_path: Path
) -> None:
    made = project(
        "add_neuron_kernels(k MANIFEST small.yaml TARGETS trn1 FORM PACK MEMORY_PER_COMPILE 600G)",
        generator="Unix Makefiles",
    )
    output = made.configure(f"-DNEURON_SDK={sdk('first')}")
    assert "3 compiles with neuronx-cc 2." in output
    assert len(made.make().compiles) == 3
    second = sdk("second", exit=1, output="none")
    made.configure(f"-DNEURON_SDK={second}")
    assert made.make().compiles == ()
    # Another version is another compiler; a failure prints how to repeat it, and is repeated.
    sdk("second", version="NeuronX Compiler version 9.9.9+abc\n", exit=1, output="none", print="no such instruction")
    made.configure(f"-DNEURON_SDK={second}")
    for _ in range(2):
        result = made.make(expect=None)
        assert "no such instruction" in result.output and ".failed" in result.output
    sdk("second", version="NeuronX Compiler version 9.9.9+abc\n")
    assert len(made.make().compiles) == 3


@pytest.mark.long
def test_build_folders_share_what_is_compiled(project: Make, sdk: Callable[..., Path], tmp_path: Path) -> None:
    made = project("add_neuron_kernels(k MANIFEST small.yaml TARGETS trn1 FORM PACK)")
    cache = tmp_path / "cache"
    made.configure(f"-DNEURON_SDK={sdk('good')}", f"-DNEURON_KERNELGEN_NEFF_CACHE={cache}")
    assert "small_trn1: 3 kernels: 3 compiled, 0 from the cache, 0 up to date" in made.make().output
    assert len(list(cache.glob("*.json"))) == 3
    [pack] = made.build.rglob("*.gguf")
    # It has the same version, so it is not called.
    broken = sdk("broken", exit=1, output="none")
    other = cmake_project.Project(made.source, tmp_path / "other")
    other.configure(f"-DNEURON_SDK={broken}", f"-DNEURON_KERNELGEN_NEFF_CACHE={cache}")
    assert "small_trn1: 3 kernels: 0 compiled, 3 from the cache, 0 up to date" in other.make().output
    assert (other.build / pack.relative_to(made.build)).read_bytes() == pack.read_bytes()


def test_compiles_share_a_pool_that_the_machines_memory_sizes(project: Make) -> None:
    made = project(
        "add_neuron_kernels(a MANIFEST small.yaml FORM PACK)",
        "add_neuron_kernels(b MANIFEST small.yaml FORM PACK TARGETS trn1)",
    )
    made.configure()
    rules = (made.build / "CMakeFiles" / "rules.ninja").read_text() + (made.build / "build.ninja").read_text()
    depths = [
        line for line in rules.replace("\n  depth = ", " ").splitlines() if line.startswith("pool neuron_kernels")
    ]
    assert len(depths) == 1
    assert 1 <= int(depths[0].rpartition(" ")[2]) <= len(os.sched_getaffinity(0))
    assert rules.count("pool = neuron_kernels_compile") == 6 + 3


def test_what_is_excluded_from_all_is_built_when_it_is_named(project: Make) -> None:
    made = project("add_neuron_kernels(k MANIFEST small.yaml TARGETS trn1 FORM PACK EXCLUDE_FROM_ALL)")
    made.configure()
    assert made.make().commands == ()
    assert len(made.make("--target", "k.kernels").compiles) == 3
