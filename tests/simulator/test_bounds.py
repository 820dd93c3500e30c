"""Indices of gathers and scatters that are out of bounds: a device would read or write memory outside of the tensor."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import execute
from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.lowering.kernel import traced_hlo
from kernelgen.simulator import bounds
from kernelgen.spec.kernel import KernelSpec

Array = Any

TABLE = np.arange(60, dtype=np.float32).reshape(5, 4, 3)


def gather_rows(table: Array, index: Array) -> Array:
    """Gathers rows of the first axis."""
    from jax import lax

    numbers = lax.GatherDimensionNumbers((1, 2), (0,), (0,))
    return lax.gather(table, index[:, None], numbers, (1, 4, 3), mode="promise_in_bounds")


def gather_windows(table: Array, index: Array) -> Array:
    """Gathers two elements of the first axis and one of the last from (first, last), whose limits are 3 and 2."""
    from jax import lax

    numbers = lax.GatherDimensionNumbers((1, 2), (2,), (0, 2))
    return lax.gather(table, index, numbers, (2, 4, 1), mode="promise_in_bounds")


def scatter_rows(table: Array, index: Array) -> tuple[Array, Array]:
    from jax import lax

    numbers = lax.ScatterDimensionNumbers((1, 2), (0,), (0,))
    rows = np.ones((*index.shape, 4, 3), np.float32)
    return lax.scatter(table, index[:, None], rows, numbers, mode="promise_in_bounds"), table + 1


def both(table: Array, index: Array) -> Array:
    return gather_rows(scatter_rows(table, index[:1])[0], index[1:])


CASES = {
    "gather": (gather_rows, [[0], [4], [5], [-1], [1, 2, 5, 3]], [0, 0, 1, 1, 1]),
    "of u32": (gather_rows, np.array([[4], [2**32 - 1]], np.uint32), [0, 1]),
    "windows": (gather_windows, [[[3, 2]], [[4, 2]], [[3, 3]], [[0, 0], [0, -1]]], [0, 1, 1, 1]),
    "scatter": (scatter_rows, [[0, 4], [5, 0], [0, -1]], [0, 1, 1]),
    "two": (both, [[4, 4], [5, 4], [4, 5]], [0, 1, 2]),
}


@pytest.mark.parametrize("name", CASES)
def test_says_which_instruction_has_an_index_out_of_bounds(name: str) -> None:
    function, indices, expected = CASES[name]
    for index, which in zip(indices, expected, strict=True):
        array = np.array(index, getattr(indices, "dtype", np.int32))
        hlo, _ = traced_hlo(function, [(x.shape, x.dtype.name) for x in (TABLE, array)])
        checked = bounds.check(hlo)
        *results, flag = execute.run(checked.hlo, [TABLE, array])
        assert flag == which, f"{index}"
        assert len(checked.names) == max(1, max(expected))
        for result, plain in zip(results, execute.run(hlo, [TABLE, array]), strict=True):
            assert np.array_equal(result, plain)


ROWS = np.array([3, -20, 4, 5, 100, 0], np.int32)
INSIDE = (ROWS >= -5) & (ROWS < 5)
NEW = np.arange(6 * 12, dtype=np.float32).reshape(6, 4, 3)


def written(*, add: bool = False) -> Array:
    """Returns the table with new rows at the indices that are inside."""
    result = TABLE.copy()
    for row, new in zip(ROWS[INSIDE], NEW[INSIDE], strict=True):
        result[row] = new + add * result[row]
    return result


def take(table: Array, index: Array) -> Array:
    import jax.numpy as jnp

    return jnp.take(table, index, axis=0)


MODES: dict[str, tuple[Callable[[Array], Array], Array]] = {
    "take": (lambda x, i: take(x, i), np.where(INSIDE[:, None, None], TABLE[np.where(INSIDE, ROWS, 0)], np.nan)),
    "clip": (lambda x, i: x.at[i].get(mode="clip"), TABLE[np.clip(np.where(ROWS == -20, 0, ROWS), 0, 4)]),
    "fill": (
        lambda x, i: x.at[i].get(mode="fill", fill_value=7),
        np.where(INSIDE[:, None, None], TABLE[np.where(INSIDE, ROWS, 0)], 7),
    ),
    "set": (lambda x, i: x.at[i].set(NEW), written()),
    "drop": (lambda x, i: x.at[i].set(NEW, mode="drop"), written()),
    "add": (lambda x, i: x.at[i].add(NEW), written(add=True)),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_jax_for_indices_out_of_bounds_stay_in_bounds(mode: str) -> None:
    function, expected = MODES[mode]
    hlo, _ = traced_hlo(function, [(x.shape, x.dtype.name) for x in (TABLE, ROWS)])
    result, flag = execute.run(bounds.check(canonicalize(hlo, ["x", "i"], ["y"])).hlo, [TABLE, ROWS])
    assert flag == 0
    assert np.array_equal(result, expected, equal_nan=True)


def test_constant_indices_that_are_inside_need_no_check() -> None:
    _, traced = traced_hlo(lambda x: x.at[np.array([1, 3])].set(2.0).at[-1].add(1.0), [((5, 4), "float32")])
    assert not {"pad", "clamp"} & {str(equation.primitive) for equation in traced.eqns}


@pytest.mark.parametrize("shown", [5, 8, 0])
def test_masked_stores_of_nki_stay_in_bounds(shown: int) -> None:
    """Rows 5 to 7 have no place."""
    from nki_interpreter import kernel, loading

    with loading.interpreter():
        import neuronxcc.nki.language as nl

    rows, where = np.arange(32, dtype=np.float32).reshape(8, 4), np.array([[2, 0, 9, 1, 5, 16, 16, 16]], np.int32).T

    def put_rows(rows: Array, where: Array) -> Array:
        out = nl.ndarray((16, 4), dtype=rows.dtype, buffer=nl.shared_hbm)
        i_p, i_f = nl.arange(16)[:, None], nl.arange(4)[None, :]
        nl.store(out[i_p, i_f], value=nl.zeros((16, 4), dtype=rows.dtype, buffer=nl.sbuf))
        value, place = nl.load(rows), nl.load(where)
        nl.store(out[place[nl.arange(8)[:, None], 0], i_f], value=value, mask=nl.arange(8)[:, None] < shown)
        return out

    recorded = kernel.record(put_rows, [rows, where], {}, older=True)
    hlo, _ = traced_hlo(lambda *x: recorded(*x)[0], [(x.shape, x.dtype.name) for x in (rows, where)])
    result, flag = execute.run(bounds.check(hlo).hlo, [rows, where])
    expected = np.zeros((16, 4), np.float32)
    expected[where[: min(shown, 5), 0]] = rows[: min(shown, 5)]
    assert flag == 0
    assert np.array_equal(result, expected)


def test_other_programs_stay_as_they_are() -> None:
    hlo, _ = traced_hlo(lambda x: x[:2] + 1, [((5, 4), "float32")])
    assert bounds.check(hlo) == bounds.BoundsCheckedHlo(hlo, ())


@pytest.mark.parametrize("strict", ["1", "0"])
def test_an_execution_with_such_an_index_fails(
    client: Callable[..., subprocess.CompletedProcess[str]], make_neff: Callable[..., Path], strict: str
) -> None:
    """nrt_client sets element i of the second input to (i * 7 + 3) % 11, at most 10: the table has 11 rows, or 10."""
    index = TensorDesc.parse("(7,1,1,1)/f32")
    row = TensorDesc.parse("(1,7,1,1)/f32")

    def function(table: Any, index: Any) -> Any:
        return gather_rows(table.reshape(-1, 1, 1) * np.ones((4, 3), np.float32), index.reshape(-1).astype(np.int32))[
            :, 0, :1
        ].reshape(1, 1, 7, 1)

    for rows, fails in ((11, False), (10, strict == "1")):
        spec = KernelSpec.make(f"my_rows_{rows}", [TensorDesc.parse(f"({rows},1,1,1)/f32"), index], row)
        done = client("run", make_neff(spec, function), NEURON_SIMULATOR_STRICT=strict)
        assert (done.returncode == 1) == fails, done.stderr
        if fails:
            assert "NRT simulator ERROR nrt_execute: an index of gather 'gather" in done.stderr
            assert "execute(&j) is NRT_SUCCESS: got NRT_EXEC_OOB" in done.stderr
