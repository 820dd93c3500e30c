"""Loops with bounds in memory run if the arrays exist, and are refused if the HLO is made earlier."""

from __future__ import annotations

import numpy as np
import pytest

from nki_interpreter import kernel, loading
from nki_interpreter.errors import NkiError

with loading.interpreter():
    import nki.isa as nisa
    import nki.language as nl

X = np.arange(256 * 4, dtype=np.float32).reshape(256, 4)


def _first_rows(x, blocks):
    """Copies `blocks` blocks of 64 rows of `x`."""
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    zeros = nl.zeros((64, 4), x.dtype, buffer=nl.sbuf)
    for i in range(4):
        nisa.dma_copy(dst=result[64 * i : 64 * (i + 1), :], src=zeros)
    held = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=held, src=blocks[0])
    count = nisa.register_alloc()
    nisa.register_load(count, held)
    start = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=start, value=0)
    for _ in nl.dynamic_range(0, count, 1):
        tile = nl.ndarray((64, 4), x.dtype, buffer=nl.sbuf)
        pattern = [[4, 64], [1, 4]]
        nisa.dma_copy(dst=tile, src=x.ap(pattern=pattern, offset=0, scalar_offset=start, indirect_dim=0))
        nisa.dma_copy(dst=result.ap(pattern=pattern, offset=0, scalar_offset=start, indirect_dim=0), src=tile)
        nisa.tensor_scalar(dst=start, data=start, op0=nl.add, operand0=64)
    return result


def _programs(blocks, barrier=False):
    """Each program adds 1 to a number n times: for the first program n is `blocks`, for each other one the number that
    the program before it left.
    """
    result = nl.ndarray((1, 1), nl.int32, buffer=nl.shared_hbm)
    held = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=held, src=blocks[0] if nl.program_id(0) == 0 else result)
    if barrier:
        nisa.core_barrier(result, (0, 1))
    total = nl.zeros((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=total, src=held)
    for _ in nl.dynamic_range(held):
        nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=1)
    nisa.dma_copy(dst=result, src=total)
    return result


def _nested(blocks):
    """Counts to 1 + 2 + … + n: the outer loop changes the bound of the inner loop."""
    result = nl.ndarray((1, 1), nl.int32, buffer=nl.shared_hbm)
    held = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    total = nl.zeros((1, 1), nl.int32, buffer=nl.sbuf)
    inner = nl.zeros((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=held, src=blocks[0])
    for _ in nl.dynamic_range(0, held, 1):
        nisa.tensor_scalar(dst=inner, data=inner, op0=nl.add, operand0=1)
        for _ in nl.dynamic_range(inner):
            nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=1)
    nisa.dma_copy(dst=result, src=total)
    return result


def _halved(blocks):
    """Counts how often a number can be halved: the body makes the register that the loop reads."""
    result = nl.ndarray((1, 1), nl.int32, buffer=nl.shared_hbm)
    held = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    total = nl.zeros((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=held, src=blocks[0])

    def body(register):
        nisa.register_store(dst=held, src=register)
        nisa.tensor_scalar(dst=held, data=held, op0=nl.right_shift, operand0=1)
        nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=1)
        return nisa.register_alloc(held)

    nl.while_loop(nisa.register_alloc(held), body)
    nisa.dma_copy(dst=result, src=total)
    return result


def _blocks(n):
    return np.array([[n]], np.int32)


def _jit(function):
    return kernel.NkiKernel(function, older=False)


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_a_register_bounds_a_loop(blocks: int) -> None:
    found = _jit(_first_rows)(X, _blocks(blocks))
    assert np.array_equal(found[: 64 * blocks], X[: 64 * blocks]) and not found[64 * blocks :].any()


def test_a_program_s_bound_is_what_the_one_before_has_left() -> None:
    assert _jit(_programs)[3](_blocks(5)).item() == 40


def test_it_is_refused_after_programs_waited_for_each_other() -> None:
    with pytest.raises(NkiError, match="known at run time only, after programs exchanged data"):
        _jit(_programs)[2](_blocks(5), barrier=True)


def test_a_tile_bounds_a_loop_inside_of_another() -> None:
    assert _jit(_nested)(_blocks(4)).item() == 10


@pytest.mark.parametrize(("number", "halvings"), [(0, 0), (1, 1), (9, 4)])
def test_a_loop_goes_by_the_register_that_its_body_returns(number: int, halvings: int) -> None:
    assert _jit(_halved)(_blocks(number)).item() == halvings


def test_a_body_returns_a_register() -> None:
    def forgets(x):
        nl.while_loop(nisa.register_alloc(1), lambda register: None)
        return x

    with pytest.raises(NkiError, match="the bounds of a loop are numbers, not NoneType"):
        _jit(forgets)(X)


def test_it_is_refused_where_the_values_are_unknown() -> None:
    with pytest.raises(NkiError, match=r"test_run_time_loops\.py:\d+: err_dynamic_loop_bound: .* HLO is made before"):
        kernel.record(_first_rows, (X, _blocks(1)), {}, older=False)


def test_a_bound_is_one_number() -> None:
    def wide(x):
        for _ in nl.dynamic_range(nl.zeros((1, 2), nl.int32, buffer=nl.sbuf)):
            pass
        return x

    with pytest.raises(NkiError, match=r"the bound of a loop is one number, not a tensor \(1, 2\)"):
        _jit(wide)(X)


def test_a_dtype_and_that_of_a_tensor_have_one_text() -> None:
    def compared(x):
        assert str(x.dtype) == str(nl.float32) == "float32" and x.dtype == nl.float32 and str(nl.bfloat16) == "bfloat16"
        assert {nl.float32: 4}[x.dtype] == 4
        return _first_rows(x, nl.zeros((1, 1), nl.int32, buffer=nl.hbm))

    _jit(compared)(X[:, :4])
