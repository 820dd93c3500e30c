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
from kernelgen.lowering.op import traced_hlo
from kernelgen.simulator import bounds
from kernelgen.spec.op_kernel import KernelSpec

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
