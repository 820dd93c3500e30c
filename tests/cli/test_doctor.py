"""`kernelgen doctor` reports what is installed and what is missing, and fails only if a build's requirement is missing."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelgen.cli import doctor

from .conftest import ROOT, Done

Run = Callable[..., Done]


def report(done: Done) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(done.out)}


def test_the_dependencies_are_those_of_requirements_in() -> None:
    lines = (ROOT / "requirements.in").read_text().splitlines()
    wanted = dict(line.split(">=") for line in lines if line and not line.startswith("#"))
    assert dict(doctor.DEPENDENCIES) == wanted


def test_the_dependencies_are_locked() -> None:
    lock = (ROOT / "requirements.txt").read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE))
    for name, minimum in doctor.DEPENDENCIES.items():
        assert doctor._version(locked[name]) >= doctor._version(minimum)


def test_this_machine_can_build(kernelgen: Run) -> None:
    done = kernelgen("doctor")
    assert done.code == 0, done.out
    assert done.out.endswith("\nkernelgen can build kernels here\n")
    assert re.search(r"^ok +jax +\d+\.\d+", done.out, re.MULTILINE)


def test_a_missing_dependency_fails_with_its_remedy(kernelgen: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "gguf":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1" if name == "rich" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    done = kernelgen("doctor")
    assert done.code == 1
    assert re.search(r"^MISSING +gguf +pip install 'gguf>=", done.out, re.MULTILINE)
    assert re.search(r"^MISSING +rich +0\.1 is too old: pip install", done.out, re.MULTILINE)
    assert done.out.endswith("\nmissing: gguf, rich\n")


def test_what_only_one_way_of_working_needs_is_absent_and_no_failure(
    kernelgen: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("NEURON_SDK", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    done = kernelgen("doctor", "--format", "json")
    checks = report(done)
    assert done.code == 0
    for name in ("neuronx-cc", "bazel", "cmake", "ninja", "C++ compiler"):
        assert checks[name]["status"] == "absent"
        assert checks[name]["remedy"]


def test_neuronx_cc_is_found_in_neuron_sdk(kernelgen: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "neuronx-cc"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "NeuronX Compiler version 2.24.5133.0+58f8de22"\necho "Python version 3.11"\n')
    program.chmod(0o755)
    monkeypatch.setenv("NEURON_SDK", str(tmp_path))
    checks = report(kernelgen("doctor", "--format", "json"))
    assert checks["neuronx-cc"]["found"] == "neuronx-cc 2.24.5133.0+58f8de22"


def test_a_neuron_sdk_without_the_compiler_is_reported(
    kernelgen: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEURON_SDK", str(tmp_path))
    checks = report(kernelgen("doctor", "--format", "json"))
    assert checks["neuronx-cc"]["found"] is None
    assert f"NEURON_SDK is {tmp_path}" in checks["neuronx-cc"]["remedy"]


def test_user_without_home_folder_has_no_cache(kernelgen: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "NEURON_KERNELGEN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert "no home folder" in report(kernelgen("doctor", "--format", "json"))["cache folder"]["remedy"]


def test_a_cache_that_cannot_be_written(kernelgen: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_KERNELGEN_CACHE", "/dev/null/cache")
    checks = report(kernelgen("doctor", "--format", "json"))
    assert checks["cache folder"]["status"] == "absent"
