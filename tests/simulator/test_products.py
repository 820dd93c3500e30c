"""Products of a matrix and few rows: rewritten for XLA on the CPU, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernelgen.hlo import execute, proto
from kernelgen.lowering.kernel import traced_hlo
from kernelgen.simulator import products

Array = Any


def contracted(a_axis: int, b_axis: int) -> Callable[[Array, Array], Array]:
    def dot(a: Array, b: Array) -> Array:
        from jax import lax

        return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=np.float32)

    return dot


def emitted(a: Array, b: Array) -> Array:
    """The form that `mul_mat` emits, with batch axes of extent 1."""
    from jax import lax

    dims = (((2,), (2,)), ((0,), (0,)))
    return lax.dot_general(b[None], a[None], dims, preferred_element_type=np.float32)


def computed(a: Array, b: Array) -> Array:
    """Other instructions compute both operands."""
    from jax import lax

    return lax.dot_general(lax.exp(b), a * a, (((1,), (1,)), ((), ())), preferred_element_type=np.float32)


def unpacked(a: Array, b: Array) -> Array:
    """The form of a product by quantized weights: numbers times a scale."""
    return emitted((a - np.float32(8)) * np.float32(0.1), b)


def joined(a: Array, b: Array) -> Array:
    """The form of Q4_K: the matrix joins two arrays."""
    from jax import lax

    half = a.shape[1] // 2
    return emitted(lax.concatenate([a[:, half:] + a[:, :half], a[:, :half]], 1), b)


def chained(a: Array, b: Array) -> Array:
    """The form of gated_delta_net: the matrix of one product depends on another product."""
    return emitted(a * emitted(a, b).reshape(-1, 1), b)


CASES = {
    "one row": (emitted, (257, 128), (1, 128), np.float16),
    "three rows": (emitted, (257, 128), (3, 128), np.float16),
    "bfloat16": (emitted, (257, 128), (1, 128), ml_dtypes.bfloat16),
    "float32": (emitted, (257, 128), (1, 128), np.float32),
    "the matrix comes first": (contracted(1, 1), (257, 128), (2, 128), np.float16),
    "the matrix has its columns first": (contracted(0, 1), (128, 257), (2, 128), np.float16),
    "a vector": (contracted(1, 0), (257, 128), (128,), np.float16),
    "computed operands": (computed, (257, 128), (1, 128), np.float16),
    "a matrix of another product": (chained, (257, 128), (1, 128), np.float32),
    "one row by unpacked weights": (unpacked, (257, 128), (1, 128), np.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_with_few_rows_is_rewritten_and_gives_the_same(name: str) -> None:
    function, a, b, dtype = CASES[name]
    random = np.random.default_rng(1)
    arrays = [random.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in (a, b)]
    hlo, _ = traced_hlo(function, [(x.shape, x.dtype.name) for x in arrays])
    rewritten = products.rewrite(hlo)
    assert rewritten != hlo
    (expected,) = execute.run(hlo, arrays)
    (actual,) = execute.run(rewritten, arrays)
    assert actual.shape == expected.shape
    assert np.square(actual - expected).sum() <= 1e-10 * np.square(expected).sum()


@pytest.mark.parametrize(
    ("a", "b", "dtype"),
    [
        ((257, 128), (products.MAX_ROWS + 1, 128), "float16"),
        ((33, products.MAX_SUM + 1), (1, products.MAX_SUM + 1), "float16"),
        ((16, 128), (1, 128), "float16"),
        ((257, 128), (1, 128), "int32"),
    ],
    ids=["many rows", "long rows", "a small matrix", "integers"],
)
def test_other_products_stay_as_they_are(a: tuple[int, ...], b: tuple[int, ...], dtype: str) -> None:
    def dot(x: Array, y: Array) -> Array:
        from jax import lax

        return lax.dot_general(y, x, (((1,), (1,)), ((), ())))

    hlo, _ = traced_hlo(dot, [(a, dtype), (b, dtype)])
    assert any(i.opcode == "dot" for i in proto.entry(proto.parse(hlo)).instructions)
    assert products.rewrite(hlo) == hlo


@pytest.mark.parametrize(("function", "rows"), [(unpacked, 2), (joined, 1)])
def test_a_matrix_that_is_slower_to_make_in_the_loop_of_a_product_is_made_before_it(
    function: Callable[[Array, Array], Array], rows: int
) -> None:
    hlo, _ = traced_hlo(function, [((257, 128), "float32"), ((rows, 128), "float32")])
    assert products.rewrite(hlo) == hlo
