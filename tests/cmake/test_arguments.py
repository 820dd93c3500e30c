"""When CMake runs, a mistake in a call, in a manifest or on the machine gives a helpful message."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import SMALL, cmake_project

Make = Callable[..., cmake_project.Project]


def said(output: str) -> str:
    """Returns CMake's output in one line: CMake wraps text into paragraphs."""
    return " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("MANIFESTS small.yaml", "unknown argument 'MANIFESTS': did you mean 'MANIFEST'?"),
        ("MANIFEST small.yaml TARGTS trn1", "MANIFEST is given 'TARGTS': did you mean 'TARGETS'?"),
        ("", "MANIFEST names no file"),
        ("MANIFEST small.yaml FORM", "FORM is given no value"),
        ("MANIFEST smal.yaml", "MANIFEST smal.yaml: there is no "),
        ("MANIFEST small.yaml FORM PACKS", "FORM: unknown value 'PACKS': did you mean 'PACK'?"),
        (
            "MANIFEST small.yaml FORM pack",
            "FORM: unknown value 'pack': did you mean 'PACK'? (known: EMBED, PACK, REPORT, TREE)",
        ),
        ("MANIFEST small.yaml DATA none.txt", "DATA none.txt: there is neither a target of that name nor "),
        ("MANIFEST small.yaml COMPILER neuronxcc", "COMPILER: unknown value 'neuronxcc': did you mean 'neuronx-cc'?"),
        ("MANIFEST small.yaml COMPILER gcc", "COMPILER: unknown value 'gcc' (known: auto, neuronx-cc, simulator)"),
        (
            "MANIFEST small.yaml MEMORY_PER_COMPILE 8GB",
            "MEMORY_PER_COMPILE is an amount such as 8G or 6144M, not '8GB'",
        ),
        ("MANIFEST small.yaml KERNELS nowhere", "KERNELS nowhere: there is no "),
        ("MANIFEST small.yaml TARGETS trn11", "unknown target 'trn11': did you mean 'trn1"),
        ("MANIFEST small.yaml TARGETS trn2", "manifest 'small' is for trn1, inf2, not for trn2"),
        (
            "MANIFEST small.yaml COMPILER neuronx-cc",
            "neuronx-cc is not installed: it is neither on PATH nor is NEURON_SDK set",
        ),
    ],
)
def test_a_wrong_argument_is_an_error(project: Make, arguments: str, message: str) -> None:
    output = said(project(f"add_neuron_kernels(k {arguments})").configure(expect=1))
    assert "add_neuron_kernels(k)" in output
    assert message in output
    assert "Traceback" not in output


def test_the_name_must_be_new(project: Make) -> None:
    output = project("add_custom_target(k)", "add_neuron_kernels(k MANIFEST small.yaml)").configure(expect=1)
    assert "add_neuron_kernels(k): there is a target of that name already" in said(output)


def test_every_mistake_of_a_manifest_is_shown_in_its_place_and_nothing_else(project: Make) -> None:
    made = project("add_neuron_kernels(k MANIFEST small.yaml FORM PACK)")
    path = made.source / "small.yaml"
    path.write_text(SMALL.replace("rms_norm", "rms_nrom").replace("op: add", "op: ad"))
    output = made.configure(expect=1)
    lines = [line.strip() for line in output.splitlines()]
    assert any(line.startswith(f"{path}:5:10: error: unknown op 'ad': did you mean") for line in lines)
    assert f"{path}:7:10: error: unknown op 'rms_nrom': did you mean 'rms_norm'?" in lines
    assert "Traceback" not in output and "Usage" not in output


def test_packages_that_are_missing_are_named_with_what_to_do(project: Make, tmp_path: Path) -> None:
    # An interpreter without packages: this one, with an option that hides them.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    made = project("add_neuron_kernels(k MANIFEST small.yaml FORM PACK)")
    output = made.configure("-DNEURON_KERNELGEN_PYTHON_ENV=OFF", python=str(bare), expect=1)
    assert f"add_neuron_kernels(k): {bare} lacks packages that kernelgen needs" in said(output)
    assert re.search(r"^ +jax>=\S+ \(not installed\)$", output, re.MULTILINE)
    assert re.search(rf"^ +{re.escape(str(bare))} -m pip install -r \".+/requirements.txt\"$", output, re.MULTILINE)
    assert "-DNEURON_KERNELGEN_PYTHON_ENV=ON" in output


def test_an_interpreter_that_cannot_be_used_is_named(project: Make, tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    made = project("add_neuron_kernels(k MANIFEST small.yaml FORM PACK)")
    output = made.configure(python=str(old), expect=1)
    assert f"NEURON_KERNELGEN_PYTHON is {old}, which is not a Python 3.11 or later that runs" in said(output)


def test_the_environment_that_is_made_by_default_is_the_one_that_bazel_makes(project: Make) -> None:
    """Needs the network the first time on a machine, like Bazel."""
    made = project("add_neuron_kernels(k MANIFEST small.yaml FORM PACK)")
    output = made.configure(python=None)
    found = re.search(r"Python environment of kernelgen \(made on first use\) - (/.*)$", output, re.MULTILINE)
    if found is None:
        # The interpreter on PATH has exactly the packages of the lock.
        assert "3 kernels, 6 compiles" in output
        return
    assert (Path(found[1]) / "complete").exists()
    # The message appears once.
    assert "Python environment" not in made.configure(python=None)
