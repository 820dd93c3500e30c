"""Kernels are loaded from their files, and called through the protocol of languages."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from kernelgen import languages
from kernelgen.errors import KernelgenError
from kernelgen.languages import Call
from kernelgen.languages.nki import inline
from nki_interpreter import kernel, loading
from nki_interpreter.errors import LoadError, NkiError

FIRST = """
import neuronxcc.nki.language as nl

def double(x, result):
    nl.store(result, nl.load(x) * 2)
"""
GRID = """
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def programs(x, factor):
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    rows = nl.ds(nl.program_id(0) * 4, 4)
    tile = nl.ndarray((4, x.shape[1]), x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x[rows])
    nisa.tensor_scalar(tile, tile, nl.multiply, factor, op1=nl.add, operand1=float(nl.program_id(0)))
    nisa.dma_copy(dst=result[rows], src=tile)
    return result

@nki.jit
def swaps(x):
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    me = nl.program_id(0)
    mine, other = (nl.ndarray((4, x.shape[1]), x.dtype, buffer=nl.sbuf) for _ in range(2))
    nisa.dma_copy(dst=mine, src=x[nl.ds(4 * me, 4)])
    nisa.sendrecv(mine, other, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=0)
    nisa.dma_copy(dst=result[nl.ds(4 * me, 4)], src=other)
    return result

def updates(x):
    tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(tile, tile, nl.add, 1.0)
    nisa.dma_copy(dst=x, src=tile)

def too_wide(x):
    return nl.ndarray((129, 8), x.dtype, buffer=nl.sbuf)

def launches(x, factor):
    return programs[2](x, factor)

def launches_twice(x):
    return programs[2](programs[2](x, 2.0), 3.0)

def launches_that_swap(x):
    return swaps[2](x)
"""
X = np.arange(64, dtype=np.float32).reshape(8, 8)
NKI = languages.get("nki")


def load(tmp_path: Path, text: str, name: str):
    file = tmp_path / "kernels.py"
    file.write_text(text)
    return getattr(loading.load_file(file), name)


def call(function, *arrays, **options):
    notes = {}

    def run(*traced):
        returned = NKI.call(function, Call(traced, **options))
        notes.update(returned.notes)
        return returned.results, returned.updated

    results, updated = jax.jit(run)(*arrays)
    return results, updated


def test_nothing_is_left_after_loading(tmp_path):
    before = set(sys.modules)
    load(tmp_path, GRID, "programs")
    load(tmp_path, FIRST, "double")
    assert not {n for n in sys.modules if n.split(".")[0] in loading.PACKAGES}
    assert {n.split(".")[0] for n in set(sys.modules) - before} <= {"kernelgen"} | {
        n.split(".")[0] for n in sys.modules if n.startswith("_kernelgen_nki_")
    }
    with pytest.raises(ImportError):
        __import__("nki.language")


def test_the_language_sets_the_environment_while_a_file_is_imported(tmp_path):
    import os

    with NKI.loading(tmp_path / "kernels.py", {"NKI_TEST_SWITCH": "1"}, "interpreted"):
        assert os.environ["NKI_TEST_SWITCH"] == "1"
        assert __import__("nki.language").language.tile_size.pmax == 128
    assert "NKI_TEST_SWITCH" not in os.environ


def test_an_error_in_a_file_has_its_line(tmp_path):
    with pytest.raises(LoadError, match=r"kernels\.py:3: can't import the kernels of kernels\.py"):
        load(tmp_path, "import nki\n\nimport no_such_module_anywhere\n", "x")


def test_a_kernel_of_the_first_generation_writes_its_parameters(tmp_path):
    double = load(tmp_path, FIRST, "double")
    results, updated = call(double, X, results=(((8, 8), "float32"),))
    np.testing.assert_array_equal(results[0], X * 2)
    assert not updated


@pytest.mark.parametrize("package", ["neuronxcc.nki", "nki"])
def test_a_tensor_is_an_annotation_of_both_generations(tmp_path, package):
    text = f"""
import {package} as nki
import {package}.language as nl
import {package}.tensor

@nki.jit
def twice(x: nki.tensor, y: nki.tensor[[8, 8], nl.float32] = None, z: "nki.tensor" = None) -> nki.tensor:
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(result, nl.multiply(nl.load(x), 2))
    return result
"""
    (result,), _ = call(load(tmp_path, text, "twice"), X)
    np.testing.assert_array_equal(result, X * 2)


def test_a_constant_may_be_a_file(tmp_path):
    with loading.interpreter():
        import nki.isa as nisa
        import nki.language as nl

        def table(x, file):
            result = nl.ndarray((4, 3), nl.float32, buffer=nl.shared_hbm)
            nisa.dma_copy(dst=result, src=nl.shared_constant(file))
            return result

    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.save(tmp_path / "values.npy", values)
    (found,) = inline(table, np.ones((4, 3), np.float32), file=str(tmp_path / "values.npy"))
    np.testing.assert_array_equal(found, values)


def test_buffers_are_named_by_place_and_dtypes_by_nki_itself():
    with loading.interpreter():
        import nki.isa as nisa
        import nki.language as nl

        import nki

        def copied(x):
            tile = nl.ndarray(x.shape, x.dtype, nl.sbuf)
            nisa.dma_copy(dst=tile, src=x)
            result = nl.zeros(x.shape, nki.dtype.float32, nl.shared_hbm)
            nisa.dma_copy(dst=result, src=tile)
            return result

        assert nisa.dma_engine.gpsimd_dma is not nisa.dma_engine.dma
    x = np.ones((8, 4), np.float16)
    (found,) = inline(copied, x)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, x)


def test_the_programs_of_a_grid_write_one_result(tmp_path):
    programs = load(tmp_path, GRID, "programs")
    (result,), _ = call(programs, X, keywords={"factor": 3.0}, grid=(2,))
    np.testing.assert_array_equal(result, X * 3 + np.arange(8)[:, None] // 4)


def test_programs_exchange_tiles(tmp_path):
    (result,), _ = call(load(tmp_path, GRID, "swaps"), X, grid=(2,))
    np.testing.assert_array_equal(result, np.roll(X, 4, 0))


def test_an_argument_that_is_written_is_updated(tmp_path):
    results, updated = call(load(tmp_path, GRID, "updates"), X)
    assert not results
    np.testing.assert_array_equal(updated[0], X + 1)


def test_a_broken_rule_is_located_in_the_kernels_file(tmp_path):
    function = load(tmp_path, GRID, "too_wide")
    with pytest.raises(KernelgenError, match=r"kernels\.py:33:1: error: err_num_partition_exceed_arch_limit"):
        call(function, X)


def test_a_kernel_is_called_from_jax(tmp_path):
    programs = load(tmp_path, GRID, "programs")
    found = jax.jit(lambda x: inline(programs, x + 1, grid=(2,), factor=1.0)[0] * 2)(X)
    np.testing.assert_array_equal(found, (X + 1 + np.arange(8)[:, None] // 4) * 2)


def test_the_native_lowering_is_refused_without_its_compiler(tmp_path):
    with pytest.raises(KernelgenError, match="the lowering 'native' needs NKI's own compiler, which is not installed"):
        call(load(tmp_path, GRID, "updates"), X, lowering="native")


def test_a_kernel_that_is_launched_by_another_runs_each_program_of_its_grid(tmp_path: Path) -> None:
    path = tmp_path / "grid.py"
    path.write_text(GRID)
    rows = np.repeat([0.0, 1.0], 4)[:, None].astype(np.float32)

    def run(name: str, *static: float) -> list[np.ndarray]:
        launched = loading.load_kernel(path, name)
        recorded = kernel.record_kernel(launched, [X, *static], {})
        return [np.asarray(value) for value in jax.jit(recorded)(X)]

    np.testing.assert_array_equal(run("launches", 2.0), [X * 2 + rows])
    np.testing.assert_array_equal(run("launches_twice"), [(X * 2 + rows) * 3 + rows])
    np.testing.assert_array_equal(run("launches_that_swap"), [np.concatenate([X[4:], X[:4]])])


def test_a_kernel_of_several_programs_launches_none_with_several(tmp_path: Path) -> None:
    path = tmp_path / "grid.py"
    path.write_text(GRID)
    launched = loading.load_kernel(path, "launches")
    with pytest.raises(NkiError, match=r"a kernel of a grid \(2,\) launches another one with a grid \(2,\)"):
        kernel.record_kernel(launched[2], [X, 2.0], {})
