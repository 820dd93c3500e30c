"""Products of attention with a cache that the simulator's library computes without copying the cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernelgen.hlo import execute, proto
from kernelgen.hlo.cpu import client
from kernelgen.lowering.op import traced_hlo
from kernelgen.simulator import attention, products, weights

Array = Any

HAS_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= set(Path("/proc/cpuinfo").read_text().split())
TYPES = (np.float16, ml_dtypes.bfloat16, np.float32)
"""In the order of the library's numbers for them."""


@pytest.fixture(scope="module", autouse=True)
def loaded(library: Path) -> None:
    client()
    if not weights.load(str(library)):
        pytest.skip("the processor has no AVX2")


def calls(hlo: bytes) -> int:
    found = [i for c in proto.parse(hlo).computations for i in c.instructions]
    return sum(i.opcode == "custom-call" and i.custom_call_target == weights.ATTENTION for i in found)


def decode(heads: int, group: int, rows: int, cells: int, depth: int, dtype: Any, *, write: bool) -> Case:
    """Returns a function that computes attention as the library's emitters do, and its arguments.

    Args:
        heads: heads of keys and values.
        group: heads of queries for each of these.
        rows: tokens.
        cells: cells of the cache.
        depth: elements of a vector.
        dtype: the cache's type.
        write: whether the function first writes rows of keys and values to the cache.
    """

    def function(q: Array, keys: Array, values: Array, new: Array, at: Array) -> Array:
        from jax import lax

        if write:
            keys, values = (
                lax.dynamic_update_slice(x.reshape(cells, -1), new.astype(x.dtype), (at[0], np.int32(0)))
                for x in (keys, values)
            )
        keys, values = (lax.transpose(x.reshape(1, cells, heads, depth), (0, 2, 1, 3)) for x in (keys, values))
        b = lax.reshape(q.astype(keys.dtype), (1, 1, heads, group, rows, depth))
        dims = ((0, 2), (0, 1))
        scores = lax.dot_general(b, keys, (((5,), (3,)), dims), preferred_element_type=np.float32)
        p = lax.exp(scores * np.float32(0.1))
        y = lax.dot_general(p, values.astype(np.float32), (((5,), (2,)), ((0, 1), (0, 1))))
        return scores, y

    random = np.random.default_rng(1)
    cache = (1, 1, cells, heads * depth)
    arrays = [random.standard_normal((1, heads * group, rows, depth), dtype=np.float32)]
    arrays += [random.standard_normal(cache, dtype=np.float32).astype(dtype) for _ in range(2)]
    arrays += [random.standard_normal((1, heads * depth), dtype=np.float32), np.array([cells // 3], np.int32)]
    return function, arrays


Case = tuple[Callable[..., Any], list[Array]]

CASES: dict[str, dict[str, Any]] = {
    "one row": {"heads": 3, "group": 1, "rows": 1, "cells": 64, "depth": 64},
    "heads share keys": {"heads": 2, "group": 3, "rows": 1, "cells": 64, "depth": 64},
    "several rows": {"heads": 2, "group": 2, "rows": 3, "cells": 37, "depth": 80},
    "few cells": {"heads": 5, "group": 1, "rows": 2, "cells": 9, "depth": 128},
}


# One type for each case, and all types for one case.
EACH = [
    pytest.param(
        *(name, dtype),
        id=f"{name}-{np.dtype(dtype).name}",
        marks=() if dtype is TYPES[0] or name == "one row" else pytest.mark.long,
    )
    for name in CASES
    for dtype in TYPES
]


@pytest.mark.parametrize("write", [False, True], ids=["read", "written"])
@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_products_with_a_cache_are_those_of_the_hlo(name: str, dtype: Any, write: bool) -> None:
    function, arrays = decode(**CASES[name], dtype=dtype, write=write)
    hlo, _ = traced_hlo(function, [(x.shape, x.dtype.name) for x in arrays])
    rewritten = attention.rewrite(hlo)
    assert calls(rewritten) == 2
    cells = CASES[name]["cells"]
    for at in (0, cells // 3, cells - 1, cells + 5, -cells - 5) if write else (0,):
        arrays[-1][0] = at
        for actual, expected in zip(execute.run(rewritten, arrays), execute.run(hlo, arrays), strict=True):
            assert actual.shape == expected.shape
            assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


def test_the_cache_is_not_copied() -> None:
    """XLA's compiled program has no value of the cache's size except the cache."""
    function, arrays = decode(heads=12, group=1, rows=1, cells=256, depth=64, dtype=np.float16, write=True)
    hlo, _ = traced_hlo(function, [(x.shape, x.dtype.name) for x in arrays])
    cache = arrays[1].size

    def copies(data: bytes) -> int:
        compiled = execute.compile_for_cpu(products.rewrite(data)).loaded.hlo_modules()[0]
        lines = compiled.to_string().partition("ENTRY")[2].splitlines()
        return sum("parameter(" not in line and str(cache // 768) + ",768]" in line.split("(")[0] for line in lines)

    assert copies(attention.rewrite(hlo)) == 0
    function, _ = decode(heads=12, group=1, rows=1, cells=256, depth=64, dtype=np.float16, write=False)

    def written(*inputs: Array) -> Any:
        from jax import lax

        return lax.dynamic_update_slice(inputs[1].reshape(256, 768), inputs[3].astype(np.float16), (inputs[4][0], 0))

    whole, _ = traced_hlo(written, [(x.shape, x.dtype.name) for x in arrays])
    assert copies(whole) > 0  # the check finds a copy where there is one


def test_vectors_of_any_width_and_any_number_of_rows_give_the_same_bits(library: Path) -> None:
    if not HAS_AVX512:
        pytest.skip("the processor has no AVX-512")
    random = np.random.default_rng(3)
    heads, rows, cells, depth = 3, 7, 37, 80
    for sums in (False, True):
        x = random.standard_normal((heads, rows, cells if sums else depth), dtype=np.float32)
        for dtype in TYPES:
            cache = random.standard_normal((cells, heads, depth), dtype=np.float32).astype(dtype)
            new = random.standard_normal((2, heads, depth), dtype=np.float32).astype(dtype)
            together = call(library, cache, x, sums=sums, new=new, at=5)
            narrow = call(library, cache, x, sums=sums, new=new, at=5, vectors="avx2")
            alone = [call(library, cache, x[:, i : i + 1], sums=sums, new=new, at=5) for i in range(rows)]
            cache[5:7] = new
            np.testing.assert_array_equal(together, narrow)
            np.testing.assert_array_equal(together, np.concatenate(alone, axis=1))
            np.testing.assert_array_equal(together, call(library, cache, x, sums=sums))


@pytest.mark.parametrize("vectors", ["avx512", "avx2"])
def test_nan_stays_nan(library: Path, vectors: str) -> None:
    """A cell with weight 0 still makes a sum NaN when its value is NaN or infinite, as in the HLO."""
    cache = np.ones((20, 2, 16), np.float16)
    cache[3, 1, 2], cache[4, 0, 1] = np.nan, np.inf
    x = np.ones((2, 1, 20), np.float32)
    x[:, :, 3:5] = 0
    y = call(library, cache, x, sums=True, vectors=vectors)
    assert np.isnan(y).sum() == 2
    assert np.isnan(y[1, 0, 2])
    assert np.isnan(y[0, 0, 1])
    scores = call(library, cache, np.ones((2, 1, 16), np.float32), sums=False, vectors=vectors)
    assert np.isnan(scores[1, 0, 3])
    assert np.isposinf(scores[0, 0, 4])
    assert np.isfinite(scores).sum() == scores.size - 2


def test_other_products_stay_as_they_are() -> None:
    few = {"heads": 2, "group": 1, "rows": 1, "cells": 64, "depth": 64, "dtype": np.float16, "write": False}
    assert calls(rewritten(**few)) == 2
    assert calls(rewritten(**few | {"rows": attention.MAX_ROWS})) == 2
    assert calls(rewritten(**few | {"rows": attention.MAX_ROWS + 1})) == 0
    assert calls(rewritten(**few | {"depth": 40})) == 0
    assert calls(rewritten(**few | {"cells": 16})) == 0
    assert calls(rewritten(**few | {"heads": 1})) == 0  # a product by a weight has this form too
    assert calls(rewritten(**few | {"heads": 1, "write": True})) == 2


def test_without_the_library_products_are_left_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    function, arrays = decode(heads=2, group=1, rows=1, cells=64, depth=64, dtype=np.float16, write=True)
    hlo, _ = traced_hlo(function, [(x.shape, x.dtype.name) for x in arrays])
    monkeypatch.setattr(weights, "_loaded", False)
    assert attention.rewrite(hlo) == hlo


def rewritten(**sizes: Any) -> bytes:
    function, arrays = decode(**sizes)
    hlo, _ = traced_hlo(function, [(x.shape, x.dtype.name) for x in arrays])
    return attention.rewrite(hlo)


def call(
    library: Path, cache: Array, x: Array, *, sums: bool, new: Array | None = None, at: int = 0, vectors: str = "avx512"
) -> Array:
    """Calls the function as XLA does.

    Args:
        library: the simulator's library.
        cache: [cells, heads, depth].
        x: [heads, rows, depth or cells].
        sums: whether vectors are added up.
        new: cells that are written first, [n, heads, depth].
        at: the first of these cells.
        vectors: the widest vectors that the call may use.
    """
    cells, heads, depth = cache.shape
    x = np.ascontiguousarray(x)
    out = np.empty((heads, x.shape[1], depth if sums else cells), np.float32)
    first = np.array([at * heads * depth], np.int64)
    number = next(i for i, t in enumerate(TYPES) if cache.dtype == t)
    sizes = heads, x.shape[1], cells, depth, depth, heads * depth, 0 if new is None else new.size
    options = "".join(f"{i} " for i in (int(sums), number, *sizes, int(vectors == "avx2"))).encode()
    more = () if new is None else (new.ctypes.data, first.ctypes.data)
    operands = (ctypes.c_void_p * (2 + len(more)))(cache.ctypes.data, x.ctypes.data, *more)
    function = getattr(ctypes.CDLL(str(library)), weights.ATTENTION)
    function(ctypes.c_void_p(out.ctypes.data), operands, options, ctypes.c_size_t(len(options)), None)
    return out
