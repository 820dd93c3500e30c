"""Every function, operator, method and index of a kernel in NumPy, compared with NumPy: one kernel computes the whole
list of expressions.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traced import run

from kernelgen.languages.numpy.functions import FUNCTIONS
from kernelgen.languages.numpy.tensor import narrowed

EXPRESSIONS = [
    line
    for line in (Path(__file__).with_name("expressions.txt").read_text(encoding="utf-8")).splitlines()
    if not line.startswith("#")
]


def inputs() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.normal(size=shape).astype(np.float32)

    j = rng.integers(1, 9, (4, 6)) * rng.choice([-1, 1], (4, 6))
    f = normal(4, 6)
    f[0, 2], f[1, 3], f[2, 0] = np.nan, np.inf, -np.inf
    return {
        "a": normal(4, 6),
        "b": rng.uniform(0.1, 4, (4, 6)).astype(np.float32),
        "i": rng.integers(-9, 9, (4, 6)).astype(np.int32),
        "j": j.astype(np.int32),
        "u": rng.integers(0, 255, (4, 6)).astype(np.uint8),
        "c": rng.choice([True, False], (4, 6)),
        "d": rng.choice([True, False], (4, 6)),
        "m": normal(6, 5),
        "v": normal(6),
        "t": normal(2, 3, 4),
        "s": normal(5, 5),
        "k": np.array([2, 0, 3], np.int32),
        "z": normal(2, 4, 3),
        "f": f,
    }


def test_every_function_is_tried() -> None:
    text = "\n".join(EXPRESSIONS)
    not_by_name = {np.copyto, np.put_along_axis, operator.getitem, operator.setitem}
    untried = {
        function.__name__
        for function in FUNCTIONS
        if function not in not_by_name and f"{function.__name__}(" not in text
    }
    assert untried == set()


def test_expressions_are_what_numpy_computes() -> None:
    arrays = inputs()

    def kernel(*tensors: Any) -> list[Any]:
        names = {"np": np, **dict(zip(arrays, tensors, strict=True))}
        return [eval(text, {"__name__": "kernel"}, names) for text in EXPRESSIONS]

    with np.errstate(all="ignore"):
        wanted = [np.asarray(eval(text, {"np": np}, arrays)) for text in EXPRESSIONS]
    found = run(kernel, *arrays.values())
    wrong = []
    for text, want, have in zip(EXPRESSIONS, wanted, found, strict=True):
        if (have.shape, have.dtype) != (want.shape, narrowed(want.dtype)):
            wrong.append(f"{text}: {have.dtype}{have.shape}, not {want.dtype}{want.shape}")
        elif not np.allclose(have, want, rtol=2e-5, atol=1e-5, equal_nan=True):
            wrong.append(f"{text}: {have} not {want}")
    assert not wrong, "\n".join(wrong)


def _same(function: Any, *arrays: np.ndarray[Any, Any]) -> None:
    with np.errstate(all="ignore"):
        wanted = function(*arrays)
    for want, have in zip(wanted, run(function, *arrays), strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=2e-3)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32])
def test_integers_are_divided_by_0_as_numpy_does(dtype: Any) -> None:
    info = np.iinfo(dtype)
    ends = [info.min, info.min + 1, 1, 7, 0, info.max] + ([-1, -7] if info.min else [2, 8])
    x, y = (np.ascontiguousarray(v) for v in np.meshgrid(np.array(ends, dtype), np.array(ends, dtype)))
    _same(lambda a, b: [a // b, a % b, np.floor_divide(a, b), np.remainder(a, b)], x, y)


def test_the_variance_of_float16_overflows_where_numpys_does() -> None:
    rows = [[0] * 100 + [300], [60_000] * 101, list(range(0, 10_100, 100)), [1, -1] * 50 + [0], [100, -100] * 50 + [3]]
    x = np.array(rows, np.float16)

    def kernel(a: Any) -> list[Any]:
        return [
            np.var(a, axis=1),
            np.std(a, axis=1),
            np.var(a, axis=1, dtype=np.float32),
            np.var(a[3:], ddof=1),
            np.mean(a, axis=1),
        ]

    with np.errstate(all="ignore"):
        assert np.isinf(np.var(x, axis=1)[:3]).all() and np.isfinite(np.var(x, axis=1)[3])
    _same(kernel, x)
