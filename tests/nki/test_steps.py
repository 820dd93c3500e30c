"""Kernels that run instruction by instruction give the same results as one program, and equal instructions are compiled
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from nki_interpreter import kernel, loading, steps

with loading.interpreter():
    import nki.isa as nisa
    import nki.language as nl

X = np.arange(64 * 4, dtype=np.float32).reshape(64, 4)


def _run(function: Callable[..., Any], *arrays: np.ndarray) -> Any:
    return kernel.NkiKernel(function, older=False)(*arrays)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runs kernels instruction by instruction; returns the compiled items."""
    found: list[Any] = []

    class Step(steps._CompiledInstruction):
        def __init__(self, item: Any, *args: Any) -> None:
            found.append(item)
            super().__init__(item, *args)

    monkeypatch.setattr(steps, "MOST", 0)
    monkeypatch.setattr(steps, "_CompiledInstruction", Step)
    return found


def _sums(x, places):
    """Adds rows of `x` at places known at run time; returns their sum and an unchanged row."""
    result = nl.ndarray((1, 4), x.dtype, buffer=nl.shared_hbm)
    kept = nl.ndarray((1, 4), x.dtype, buffer=nl.shared_hbm)
    total = nl.zeros((1, 4), x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=kept, src=x[3:4, :])
    for i in range(6):
        at = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=at, src=places[i : i + 1, :])
        row = nl.ndarray((1, 4), x.dtype, buffer=nl.sbuf)
        view = x.ap(pattern=[[4, 1], [1, 4]], offset=0, scalar_offset=at, indirect_dim=0)
        nisa.dma_copy(dst=row, src=view)
        nisa.tensor_tensor(dst=total, data1=total, data2=row, op=nl.add)
    nisa.dma_copy(dst=result, src=total)
    return result, kept


def _places(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32).reshape(-1, 1)


@pytest.mark.parametrize("most", [0, 1000])
def test_a_kernel_computes_the_same_either_way(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """An index outside is reported with its line."""
    monkeypatch.setattr(steps, "MOST", most)
    places = _places(1, 5, 5, 9, 0, 63)
    total, kept = _run(_sums, X, places)
    assert np.array_equal(total[0], X[places[:, 0]].sum(0)) and np.array_equal(kept, X[3:4])
    with pytest.raises(IndexError, match="index 256 is out of bounds") as caught:
        _run(_sums, X, _places(1, 5, 64, 9, 0, 2))
    line = _sums.__code__.co_firstlineno + 11
    assert any(f"test_steps.py:{line}" in note for note in caught.value.__notes__)


def _two_reads(x, places):
    """Reads a row at each of two places, each in its own line."""
    result = nl.ndarray((2, 4), x.dtype, buffer=nl.shared_hbm)
    at = [nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf) for _ in range(2)]
    row = [nl.ndarray((1, 4), x.dtype, buffer=nl.sbuf) for _ in range(2)]
    for i in range(2):
        nisa.dma_copy(dst=at[i], src=places[i : i + 1, :])
    nisa.dma_copy(dst=row[0], src=x.ap(pattern=[[4, 1], [1, 4]], offset=0, scalar_offset=at[0], indirect_dim=0))
    nisa.dma_copy(dst=row[1], src=x.ap(pattern=[[4, 1], [1, 4]], offset=0, scalar_offset=at[1], indirect_dim=0))
    for i in range(2):
        nisa.dma_copy(dst=result[i : i + 1, :], src=row[i])
    return result


@pytest.mark.parametrize("wrong", [0, 1])
def test_of_two_equal_instructions_the_failing_one_is_reported(compiled: list[Any], wrong: int) -> None:
    places = _places(1, 2)
    places[wrong] = 64
    with pytest.raises(IndexError) as caught:
        _run(_two_reads, X, places)
    line = _two_reads.__code__.co_firstlineno + 7 + wrong
    assert compiled
    assert any(f"test_steps.py:{line}:" in note for note in caught.value.__notes__)


def test_what_is_alike_is_compiled_once(compiled: list[Any]) -> None:
    """Six loads of rows at places, three instructions each: all loads of a place differ in where they read, the others
    do not differ.
    """
    _run(_sums, X, _places(1, 5, 5, 9, 0, 63))
    lines = [item.line - _sums.__code__.co_firstlineno for item in compiled]
    assert [lines.count(n) for n in (8, 11, 12)] == [6, 1, 1]


def _doubled(x):
    """Doubles an argument in place, row by row; returns a tile with one row that was written twice, and others never
    written.
    """
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    for _ in range(2):
        nisa.memset(dst=tile[0:1, :], value=7.0)
    nisa.dma_copy(dst=result, src=tile)
    whole = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=whole, src=x)
    nisa.tensor_scalar(dst=whole, data=whole, op0=nl.multiply, operand0=2.0)
    for i in range(x.shape[0]):
        nisa.dma_copy(dst=x[i : i + 1, :], src=whole[i : i + 1, :])
    return result


def test_memory_is_changed_in_place_and_arguments_are_not(compiled: list[Any]) -> None:
    x = jnp.asarray(X)
    recorded = kernel.record_kernel(kernel.NkiKernel(_doubled, older=False), [X], {})
    (result, changed), _ = steps.run(recorded, [x])
    assert compiled
    assert np.array_equal(x, X) and np.array_equal(changed, X * 2)
    assert (np.asarray(result[0]) == 7).all() and np.isnan(result[1:]).all()


def _rolled(x):
    """Adds each row of `x` to one total and twice each row to another: the two loops differ only in the factor's tile."""
    result = nl.ndarray((3, 4), x.dtype, buffer=nl.shared_hbm)
    for number, factor in enumerate((1.0, 2.0, 2.0)):
        total = nl.zeros((1, 4), x.dtype, buffer=nl.sbuf)
        scale = nl.ndarray((1, 1), x.dtype, buffer=nl.sbuf)
        nisa.memset(dst=scale, value=factor)
        for i in nl.affine_range(64):
            row = nl.ndarray((1, 4), x.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=row, src=x[i : i + 1, :])
            nisa.tensor_scalar(dst=row, data=row, op0=nl.multiply, operand0=scale)
            nisa.tensor_tensor(dst=total, data1=total, data2=row, op=nl.add)
        nisa.dma_copy(dst=result[number : number + 1, :], src=total)
    return result


def test_loops_that_are_alike_are_compiled_once(compiled: list[Any]) -> None:
    result = _run(_rolled, X)
    assert np.array_equal(result, X.sum(0) * np.array([[1], [2], [2]], np.float32))
    assert sum(isinstance(item, steps.RolledLoop) for item in compiled) == 1


def test_options_are_those_that_this_xla_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps._compiler_options() == {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    whole = jax.jit

    def older(function: Callable[..., Any], *, compiler_options: dict[str, Any]) -> Any:
        renamed = {name.replace("use_fusion", "no_such"): value for name, value in compiler_options.items()}
        return whole(function, compiler_options=renamed)

    monkeypatch.setattr(jax, "jit", older)
    assert steps._compiler_options.__wrapped__() == {"xla_backend_optimization_level": 0}
