"""The runner of AWS's test suites, on small suites of the same form: right tests pass, and failures are reported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).resolve().parents[2] / "benchmarks" / "nki_suites.py"

OLDER = """
import unittest
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def doubled(a):
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(result, nl.load(a) * 2)
    return result

class TestDoubled(unittest.TestCase):
    def test_right(self):
        a = np.ones((8, 16), np.float32)
        np.testing.assert_array_equal(nki.simulate_kernel(doubled, a), 2 * a)

    def test_wrong(self):
        a = np.ones((8, 16), np.float32)
        np.testing.assert_array_equal(nki.simulate_kernel(doubled, a), 3 * a)
"""

LIBRARY = """
import numpy as np
import pytest
import nki
import nki.isa as nisa
import nki.language as nl
from nki_cpu_simulator.nki import cpu_simulate
from .utils.test_orchestrator import Orchestrator

@nki.jit
def half_each(x):
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((x.shape[0] // 2, x.shape[1]), x.dtype, buffer=nl.sbuf)
    rows = nl.ds(nl.program_id(0) * (x.shape[0] // 2), x.shape[0] // 2)
    nisa.dma_copy(dst=tile, src=x[rows])
    nisa.tensor_scalar(tile, tile, nl.add, 1.0)
    nisa.dma_copy(dst=result[rows], src=tile)
    return result

@pytest.mark.parametrize("columns", [4, 8, 16])
def test_on_two_cores(columns):
    x = np.zeros((8, columns), np.float32)
    np.testing.assert_array_equal(Orchestrator().run(cpu_simulate(half_each)[2], x=x), x + 1)

def test_endless():
    while True:
        pass
"""

ORCHESTRATOR = """
class Orchestrator:
    def run(self, kernel, **inputs):
        result = kernel(**inputs)
        return result if not self._compiled_kernel else None
"""

NUMPY = """
import numpy as np
import pytest
from nkipy.core import tensor_apis
from nkipy.core.trace import NKIPyKernel
from nkipy.runtime.execute import baremetal_run_traced_kernel
from nkigen.trace import trace
from harness import run_kernel_test

def change(a, b):
    a[0] = b[1]
    return tensor_apis.softmax(a) + b

def test_changed_parameter():
    a, b = np.ones((2, 3), np.float32), np.full((2, 3), 5, np.float32)
    found = baremetal_run_traced_kernel(NKIPyKernel.trace(change), a, b)
    np.testing.assert_allclose(found, np.full((2, 3), 5 + 1 / 3), rtol=1e-6)
    np.testing.assert_array_equal(a, [[5] * 3, [1] * 3])

def test_error_of_numpy():
    with pytest.raises(IndexError):
        NKIPyKernel.trace(lambda a: a[7]).specialize(np.ones(3, np.float32))

@trace(input_specs=[((4, 6), "f32")])
def squares(x):
    return np.sum(np.square(x), axis=1)

def test_traced():
    run_kernel_test(squares)

def test_traced_otherwise():
    run_kernel_test(squares, reference_output=np.zeros(4, np.float32))
"""


XDIST = """
class Hooks:
    def pytest_configure_node(self, node):
        pass

def pytest_addhooks(pluginmanager):
    pluginmanager.add_hookspecs(Hooks)
"""


def run(folder: Path, *arguments: str, installed: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the runner; `installed` are folders of additional packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, installed), *filter(None, sys.path)])}
    command = [sys.executable, str(RUNNER), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)


def outcomes(text: str) -> dict[str, str]:
    """Returns the outcome of each test, by its name with parameters."""
    return {name: word for word, name in re.findall(r"^(PASSED|FAILED|ERROR) \S*::(\S+)", text, re.MULTILINE)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The outcome of the tests of three suites, run together."""
    folder = tmp_path_factory.mktemp("checkout")
    for name, text in {
        "older/test_doubled.py": OLDER,
        "test/__init__.py": "",
        "test/utils/__init__.py": "",
        "test/utils/test_orchestrator.py": ORCHESTRATOR,
        "test/test_library.py": LIBRARY,
        "unit/test_numpy.py": NUMPY,
    }.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    result = run(folder, "older", "test/test_library.py", "unit", "-rA", "--each", "2", "--seconds", "3")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "AssertionError" in result.stdout
    assert "the test takes more than 3 CPU seconds" in result.stdout
    return outcomes(result.stdout)


def test_a_suite_of_the_older_generation_is_judged(found: dict[str, str]) -> None:
    assert (found["test_right"], found["test_wrong"]) == ("PASSED", "FAILED")


def test_a_suite_that_simulates_cores_goes_on_without_a_compiled_kernel(found: dict[str, str]) -> None:
    assert {n: w for n, w in found.items() if n.startswith("test_on")} == dict.fromkeys(
        ("test_on_two_cores[4]", "test_on_two_cores[8]"), "PASSED"
    )
    assert found["test_endless"] == "FAILED"


def test_a_suite_of_kernels_in_numpy_is_judged(found: dict[str, str]) -> None:
    names = ("test_changed_parameter", "test_error_of_numpy", "test_traced", "test_traced_otherwise")
    assert [found[n] for n in names] == ["PASSED", "PASSED", "PASSED", "FAILED"]


def test_what_is_installed_of_nki_and_of_pytest_xdist_changes_nothing(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    (packages / "xdist-3.0.dist-info").mkdir(parents=True)
    (packages / "xdist-3.0.dist-info" / "entry_points.txt").write_text("[pytest11]\nxdist = plugin_of_xdist\n")
    (packages / "xdist-3.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: xdist\nVersion: 3.0\n")
    (packages / "plugin_of_xdist.py").write_text(XDIST)
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "conftest.py").write_text("def pytest_configure_node(node):\n    pass\n")
    (suite / "test_doubled.py").write_text(OLDER)
    nki = Path(__file__).resolve().parents[1] / "data" / "fake_nki"
    result = run(suite, "test_doubled.py", "-rA", installed=(packages, nki))
    assert outcomes(result.stdout) == {"test_right": "PASSED", "test_wrong": "FAILED"}, result.stdout + result.stderr


def test_no_folder_is_a_mistake(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode == 2
    assert "CHECKOUT" in result.stderr
