"""`python -m pytest` in a checkout, without Bazel: tests that need no programs pass, and all others are collected."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COLLECT = ("--collect-only", "--assert=plain")
"""Asks only for the names of tests; rewriting assertions takes half the time of collecting them."""

# When Bazel runs a test, this file is a link into the checkout.
CHECKOUT = Path(__file__).resolve().parents[2]


PATHS = """
import sys

def pytest_collection_finish():
    print(*(f"path {path}" for path in dict.fromkeys(sys.path)), sep="\\n")
"""
"""A plug-in that prints where tests import modules from."""


def pytest_in_checkout(*arguments: str, pythonpath: Path | None = None) -> str:
    dropped = (
        "BUILD_",
        "GGML_",
        "JAVA_",
        "KERNELGEN_TEST_TARGET",
        "LLAMA_",
        "NEURON_",
        "PYTEST_",
        "PYTHON",
        "RUNFILES",
        "TEST_",
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)} | {"PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"PYTHONPATH": str(pythonpath)} if pythonpath else {}
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the names of all tests, and the lines of `PATHS`."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "printed_paths.py").write_text(PATHS)
    return pytest_in_checkout(*COLLECT, "-p", "printed_paths", pythonpath=folder).splitlines()


@pytest.fixture
def collected(collection: list[str]) -> list[str]:
    """Returns the names of all tests."""
    return [line for line in collection if line.startswith("tests/")]


def folders(tests: list[str]) -> set[str]:
    return {test.split("/")[1] for test in tests}


def test_all_tests_are_collected_and_the_quick_ones_are_distinguished(collected: list[str]) -> None:
    quick = folders([line for line in pytest_in_checkout(*COLLECT, "-m", "not slow").splitlines() if "::" in line])
    every = folders(collected)
    assert {"bazel", "ggml_neuron", "hlo", "llama", "manifest", "model"} <= every
    assert {"hlo", "manifest"} <= quick < every
    assert not quick & {"bazel", "ggml_neuron", "llama", "model"}


def test_modules_that_tests_import_have_unique_names(collection: list[str]) -> None:
    paths = [Path(line.removeprefix("path ")) for line in collection if line.startswith("path ")]
    folders = [path for path in paths if path.is_relative_to(CHECKOUT) and ".venv" not in path.parts]
    assert {CHECKOUT / "tests/kernels", CHECKOUT / "tools/llama_cpp"} <= {*folders}
    modules = [
        file for folder in folders for file in folder.glob("*.py") if not file.name.startswith(("test_", "conftest."))
    ]
    assert [file for file in modules if [other.name for other in modules].count(file.name) > 1] == []


def test_each_target_has_its_share_of_the_tests_that_run_kernels(collected: list[str]) -> None:
    def targets(tests: list[str]) -> set[str]:
        files = {(test.split("::")[0], *re.findall(r"\[(trn1|trn2|inf2)\b", test)) for test in tests}
        chosen = [file for file in files if len(file) == 2]
        assert len({name for name, _ in chosen}) == len(chosen)  # each file has one target
        assert len(chosen) > 20
        return {target for _, target in chosen}

    of = ("tests/ggml_neuron", "tests/llama", "tests/simulator")
    assert targets([test for test in collected if test.startswith(of)]) == {"trn1", "trn2", "inf2"}
    assert targets(pytest_in_checkout(*COLLECT, *of, "--neuron-target=inf2").splitlines()) == {"inf2"}


def test_processes_that_tests_start_find_kernelgen() -> None:
    files = ("tests/hlo/test_determinism.py", "tests/hlo/test_kernel_libraries.py")
    said = pytest_in_checkout(*files, "-k", "processes or scanning_imports")
    assert re.search("^[2-9] passed", said, re.MULTILINE), said


def test_what_needs_programs_is_skipped_with_a_reason() -> None:
    said = pytest_in_checkout("tests/ggml_neuron/test_cores.py", "-rs")
    assert "run this through Bazel, or name what is built in GGML_NEURON_TEST_PROGRAMS" in said
    assert " passed" not in said
