"""`python -m pytest` in a checkout, with nothing of Bazel's around it: what needs no programs passes, and the rest is collected."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

# When Bazel runs a test, this file is a link into the checkout.
CHECKOUT = Path(__file__).resolve().parents[2]


def pytest_in_checkout(*arguments: str) -> str:
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
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return done.stdout


def test_all_tests_are_collected_and_the_quick_ones_are_told_apart() -> None:
    found = [pytest_in_checkout("--collect-only", *more) for more in ((), ("-m", "not slow"))]
    every, quick = ({line.split("/")[1] for line in said.splitlines() if line.startswith("tests/")} for said in found)
    assert {"bazel", "ggml_neuron", "hlo", "llama", "manifest", "model"} <= every
    assert {"hlo", "manifest"} <= quick < every
    assert not quick & {"bazel", "ggml_neuron", "llama", "model"}


def test_each_target_has_its_share_of_the_tests_that_run_kernels() -> None:
    def targets(*more: str) -> set[str]:
        said = pytest_in_checkout("--collect-only", "tests/ggml_neuron", "tests/llama", "tests/simulator", *more)
        files = {(line.split("::")[0], *re.findall(r"\[(trn1|trn2|inf2)\b", line)) for line in said.splitlines()}
        chosen = [file for file in files if len(file) == 2]
        assert len({name for name, _ in chosen}) == len(chosen) > 20  # each file has one
        return {target for _, target in chosen}

    assert targets() == {"trn1", "trn2", "inf2"}
    assert targets("--neuron-target=inf2") == {"inf2"}


def test_processes_that_tests_start_find_kernelgen() -> None:
    said = pytest_in_checkout("tests/hlo", "-k", "processes or scanning_imports")
    assert re.search("^[2-9] passed", said, re.MULTILINE), said


def test_what_needs_programs_is_skipped_with_a_reason() -> None:
    said = pytest_in_checkout("tests/ggml_neuron/test_cores.py", "-rs")
    assert "run this through Bazel, or name what is built in GGML_NEURON_TEST_PROGRAMS" in said
    assert " passed" not in said
