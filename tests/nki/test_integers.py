"""Integers, at their extremes: engines compute in float32 and saturate, GpSimd in integers, bitwise operations on bits.

A kernel gives the same bits when it is called, when it runs instruction by instruction, and as the HLO that a build
compiles; NumPy gives them too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernelgen.hlo import execute
from kernelgen.lowering.kernel import traced_hlo
from nki_interpreter import kernel, loading, steps

with loading.interpreter():
    import neuronxcc.nki.isa as older_isa
    import neuronxcc.nki.language as older_nl
    import nki.isa as nisa
    import nki.language as nl

DTYPES = [np.dtype(name) for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32")]
ARITHMETIC = ["add", "subtract", "multiply", "maximum", "minimum", "equal", "not_equal", "less", "greater_equal"]
BITS = ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"]
SIZE = 24


def numbers(dtype: np.dtype[Any]) -> np.ndarray:
    """Returns the extremes of a dtype, numbers that float32 can't hold, and some others."""
    info = np.iinfo(dtype)
    chosen = [0, 1, 2, 3, 7, -1, -2, info.min, info.min + 1, info.max, info.max - 1, info.max // 2 + 1]
    chosen += [n * sign for n in ((1 << 24) - 1, (1 << 24) + 1, (1 << 30) + 1) for sign in (1, -1)]
    chosen = sorted({n for n in chosen if info.min <= n <= info.max})
    drawn = np.random.default_rng(0).integers(info.min, info.max, SIZE - len(chosen), endpoint=True)
    return np.concatenate([np.asarray(chosen, np.int64), drawn]).astype(dtype)


def pairs(first: np.dtype[Any], second: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.meshgrid(numbers(first), numbers(second), indexing="ij")
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


# NumPy's results


def from_float(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.clip(np.rint(values.astype(np.float64)), info.min, info.max).astype(np.int64).astype(dtype)


def in_float(name: str, a: np.ndarray, b: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    return from_float(np.asarray(getattr(np, name)(a.astype(np.float32), b.astype(np.float32)), np.float32), dtype)


def in_integers(name: str, a: np.ndarray, b: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    return np.asarray(getattr(np, name)(a.astype(np.int64), b.astype(np.int64)), np.int64).astype(dtype)


def in_bits(name: str, a: np.ndarray, b: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    wide = np.dtype(f"u{max(a.dtype.itemsize, b.dtype.itemsize, dtype.itemsize)}")
    a, b = (v.view(f"u{v.dtype.itemsize}").astype(wide) for v in (a, b))
    if not name.endswith("shift"):
        return np.asarray(getattr(np, name)(a, b)).astype(f"u{dtype.itemsize}").view(dtype)
    count = wide.itemsize * 8
    shifted = getattr(np, name)(a, np.minimum(b, count - 1).astype(wide))
    return np.where(b < count, shifted, 0).astype(wide).astype(f"u{dtype.itemsize}").view(dtype)


def moved(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    return values if values.dtype == dtype else from_float(values.astype(np.float32), dtype)


# Kernels


def tile(source: Any) -> Any:
    made = nl.ndarray(source.shape, source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=made, src=source)
    return made


def out(*tiles: Any) -> tuple[Any, ...]:
    made = []
    for one in tiles:
        made.append(nl.ndarray(one.shape, one.dtype, buffer=nl.shared_hbm))
        nisa.dma_copy(dst=made[-1], src=one)
    return tuple(made)


def results_of(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """Returns a kernel's results, and checks that its HLO gives the same bits."""
    called = kernel.NkiKernel(function, older=False)(*arrays)
    recorded = kernel.record(function, list(arrays), {}, older=False, targets=("trn2",))
    hlo, _ = traced_hlo(recorded, [(a.shape, str(a.dtype)) for a in arrays])
    for one, other in zip(called, execute.run(hlo, list(arrays)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    return list(called)


def agree(found: list[np.ndarray], expected: dict[str, np.ndarray], *inputs: np.ndarray) -> None:
    assert len(found) == len(expected)
    for have, (what, want) in zip(found, expected.items(), strict=True):
        assert have.dtype == want.dtype, what
        wrong = np.argwhere(have != want)
        if len(wrong):
            at = tuple(wrong[0])
            raise AssertionError(
                f"{what} of {[i[at] for i in inputs]}: {have[at]}, not {want[at]} ({len(wrong)} wrong)"
            )


TRIPLES = [(d, d, d) for d in DTYPES] + [
    tuple(map(np.dtype, names))
    for names in (
        ("int16", "int16", "int32"),
        ("uint8", "uint8", "uint16"),
        ("int8", "int32", "int32"),
        ("int32", "int32", "uint32"),
        ("uint32", "uint32", "int32"),
        ("int32", "int32", "int8"),
    )
]


def tensor_tensors(dtype: np.dtype[Any]) -> Callable[..., Any]:
    def function(x: Any, y: Any) -> Any:
        a, b = tile(x), tile(y)
        made = []
        for name in ARITHMETIC + BITS:
            for engine in (nisa.engine.unknown, nisa.engine.vector, nisa.engine.gpsimd):
                if name in BITS and engine is nisa.engine.gpsimd:
                    continue
                made.append(nl.ndarray(a.shape, dtype, buffer=nl.sbuf))
                nisa.tensor_tensor(made[-1], a, b, getattr(nl, name), engine=engine)
        return out(*made)

    return function


def _expected(a: np.ndarray, b: np.ndarray, dtype: np.dtype[Any]) -> dict[str, np.ndarray]:
    wide = all(str(d) in ("int32", "uint32") for d in (a.dtype, b.dtype, dtype))
    expected = {}
    for name in ARITHMETIC:
        by_gpsimd = in_integers if wide else in_float
        expected[f"{name}"] = by_gpsimd(name, a, b, dtype)
        expected[f"{name} on vector"] = in_float(name, a, b, dtype)
        expected[f"{name} on gpsimd"] = by_gpsimd(name, a, b, dtype)
    for name in BITS:
        expected[f"{name}"] = expected[f"{name} on vector"] = in_bits(name, a, b, dtype)
    return expected


@pytest.mark.parametrize("dtypes", TRIPLES, ids=lambda names: "-".join(map(str, names)))
def test_two_tiles(dtypes: tuple[np.dtype[Any], ...]) -> None:
    a, b = pairs(*dtypes[:2])
    agree(results_of(tensor_tensors(dtypes[2]), a, b), _expected(a, b, dtypes[2]), a, b)


def test_instruction_by_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MOST", 0)
    a, b = pairs(np.dtype("int32"), np.dtype("int32"))
    found = kernel.NkiKernel(tensor_tensors(a.dtype), older=False)(a, b)
    agree(list(found), _expected(a, b, a.dtype), a, b)


def test_the_vector_engine_takes_integers_of_32_bits_in_psum() -> None:
    def function(x: Any, y: Any) -> Any:
        held = nl.ndarray(x.shape, x.dtype, buffer=nl.psum)
        made = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(held, tile(x))
        nisa.tensor_tensor(made, held, tile(y), nl.add)
        return out(made)

    a, b = pairs(np.dtype("int32"), np.dtype("int32"))
    agree(results_of(function, a, b), {"add from PSUM": in_float("add", a, b, a.dtype)}, a, b)


IMMEDIATES = [("multiply", 4), ("add", 0), ("add", 16_777_217), ("subtract", -1), ("maximum", 5), ("less", 16_777_217)]
BIT_IMMEDIATES = [
    ("right_shift", 1),
    ("left_shift", 3),
    ("bitwise_and", 0x55),
    ("bitwise_xor", -1),
    ("right_shift", 99),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tile_and_a_number(dtype: np.dtype[Any]) -> None:
    def function(x: Any) -> Any:
        data, made = tile(x), []
        for name, value in IMMEDIATES + BIT_IMMEDIATES:
            made.append(nl.ndarray(data.shape, dtype, buffer=nl.sbuf))
            nisa.tensor_scalar(made[-1], data, getattr(nl, name), value)
        made += [nl.ndarray(data.shape, dtype, buffer=nl.sbuf) for _ in range(3)]
        nisa.tensor_scalar(made[-3], data, nl.right_shift, 4, op1=nl.bitwise_and, operand1=15)
        nisa.tensor_scalar(made[-2], data, nl.subtract, 2, op1=nl.multiply, operand1=3)
        nisa.scalar_tensor_tensor(made[-1], data, nl.add, 1, nl.multiply, data)
        return out(*made)

    a = numbers(dtype)[None, :]
    floats, one = a.astype(np.float32), np.float32(1)
    bits = a.view(f"u{dtype.itemsize}")
    expected = {f"{name} {value}": in_float(name, a, np.float32(value), dtype) for name, value in IMMEDIATES}
    for name, value in BIT_IMMEDIATES:
        other = np.asarray(value & ((1 << dtype.itemsize * 8) - 1), bits.dtype)
        expected[f"{name} {value}"] = in_bits(name, a, other, dtype)
    expected["nibbles"] = ((bits >> 4) & 15).view(dtype)
    expected["subtract, multiply"] = from_float((floats - np.float32(2)) * np.float32(3), dtype)
    expected["add, multiply"] = from_float((floats + one) * floats, dtype)
    agree(results_of(function, a), expected, a)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_and_dma(dtype: np.dtype[Any]) -> None:
    """Equal dtypes keep every bit; other conversions go through float32: 16777217 becomes 16777216, -1 becomes 0."""

    def function(x: Any) -> Any:
        data, made, results = tile(x), [], []
        for other in DTYPES:
            made.append(nl.ndarray(data.shape, other, buffer=nl.sbuf))
            nisa.tensor_copy(made[-1], data)
            results.append(nl.ndarray(x.shape, other, buffer=nl.shared_hbm))
            nisa.dma_copy(dst=results[-1], src=x)
        return (*out(*made), *results)

    a = numbers(dtype)[None, :]
    expected = {f"{how} to {other}": moved(a, other) for how in ("copy", "dma") for other in DTYPES}
    agree(results_of(function, a), expected, a)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions_and_selections(dtype: np.dtype[Any]) -> None:
    def function(x: Any, y: Any) -> Any:
        a, b = tile(x), tile(y)
        made = [nl.ndarray((SIZE, 1), dtype, buffer=nl.sbuf) for _ in range(5)]
        ops = (nl.maximum, nl.minimum, nl.bitwise_and, nl.bitwise_or, nl.bitwise_xor)
        for one, op in zip(made, ops, strict=True):
            nisa.tensor_reduce(one, op, a, 1)
        chosen = nl.ndarray(a.shape, nl.uint8, buffer=nl.sbuf)
        nisa.tensor_tensor(chosen, a, b, nl.less)
        nisa.tensor_copy_predicated(dst=b, src=a, predicate=chosen)
        nisa.tensor_copy_predicated(dst=a, src=7, predicate=chosen)
        return out(*made, a, b)

    a, b = pairs(dtype, dtype)
    less = a.astype(np.float32) < b.astype(np.float32)
    expected = {n: from_float(getattr(np, n)(a.astype(np.float32), 1, keepdims=True), dtype) for n in ("max", "min")}
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        expected[name] = getattr(np, name).reduce(a, 1, keepdims=True)
    expected["a number where chosen"] = np.where(less, np.asarray(7, dtype), a)
    expected["a tile where chosen"] = np.where(less, a, b)
    agree(results_of(function, a, b), expected)


def test_nki_language_counts_in_integers_and_shifts_bits() -> None:
    def function(x: Any) -> Any:
        data = tile(x)
        made = (nl.add(data, 1), nl.multiply(data, data), nl.right_shift(data, 1))
        return out(*made, nl.bitwise_and(data.view(nl.uint32), 255))

    a = numbers(np.dtype("int32"))[None, :]
    bits = a.view(np.uint32)
    expected = {"add": a + np.int32(1), "multiply": a * a, "shift": (bits >> 1).view(np.int32), "and": bits & 255}
    agree(results_of(function, a), expected, a)


def test_counters_keep_all_bits() -> None:
    def function(x: Any) -> Any:
        made = [nl.ndarray((1, 4), dtype, buffer=nl.sbuf) for dtype in (nl.int32, nl.uint32)]
        for one in made:
            nisa.iota(one, [[1, 4]], offset=16_777_217)
        register = nisa.register_alloc(0)
        held = tile(x)
        nisa.register_load(register, held)
        nisa.register_store(held, register)
        return out(*made, held)

    top = np.full((1, 1), 0xFFFFFFFF, np.uint32)
    counted = np.arange(16_777_217, 16_777_221)[None, :]
    agree(
        results_of(function, top),
        {"int32": counted.astype(np.int32), "uint32": counted.astype(np.uint32), "register": top},
    )


def test_the_older_generation_computes_in_float_where_no_engine_is_named() -> None:
    def function(x: Any, y: Any) -> Any:
        a, b = older_nl.load(x), older_nl.load(y)
        made = [
            older_isa.tensor_tensor(a, b, op=np.add),
            older_isa.tensor_tensor(a, b, op=np.add, engine=older_isa.gpsimd_engine),
            older_isa.tensor_scalar(a, np.multiply, 4),
        ]
        results = [older_nl.ndarray(x.shape, x.dtype, buffer=older_nl.shared_hbm) for _ in made]
        for result, one in zip(results, made, strict=True):
            older_nl.store(result, one)
        return tuple(results)

    a, b = pairs(np.dtype("int32"), np.dtype("int32"))
    found = kernel.NkiKernel(function, older=True)(a, b)
    expected = {
        "add": in_float("add", a, b, a.dtype),
        "add on gpsimd": in_integers("add", a, b, a.dtype),
        "multiply": in_float("multiply", a, np.float32(4), a.dtype),
    }
    agree(list(found), expected, a, b)
