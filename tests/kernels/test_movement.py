"""Concatenations, repetitions, regions, diagonals, triangles and constant tensors."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, spec

from kernelgen.ggml import shapes


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8", "i16", "i32", "i64", "q4_0", "q6_K", "iq2_xxs"])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_concat(dtype: str, dim: int) -> None:
    a, b = [256, 3, 2, 4], [256, 3, 2, 4]
    b[dim] = 512 if dim == 0 else 5
    ne = list(a)
    ne[dim] += b[dim]
    texts = [f"({','.join(map(str, x))})/{dtype}" for x in (a, b, ne)]
    check(spec("concat", texts[:2], texts[2], dim=dim))


@pytest.mark.parametrize("dtype, size", [("f32", 4), ("i8", 1), ("i64", 8), ("f16", 2)])
@pytest.mark.parametrize("dim", [0, 3])
def test_concat_of_views(dtype: str, size: int, dim: int) -> None:
    a = f"(11,4,3,2)/{dtype}/({size},{22 * size},{22 * 16 * size},{22 * 16 * 9 * size})"
    b = f"(11,4,3,2)/{dtype}/({12 * size},{3 * size},{132 * size},{size})"
    out = f"(22,4,3,2)/{dtype}" if dim == 0 else f"(11,4,3,4)/{dtype}"
    check(spec("concat", [a, b], out, dim=dim))


def test_concat_keeps_the_upper_words() -> None:
    x = np.array([-(2**63), 2**63 - 1, 2**32, -1], np.int64)
    y = check(spec("concat", ["(4,1,1,1)/i64", "(1,1,1,1)/i64"], "(5,1,1,1)/i64", dim=0), src0=x)
    assert y.ravel()[:4].tolist() == x.tolist()


@pytest.mark.parametrize("dtype", ["f32", "i16"])
@pytest.mark.parametrize("times", ["(10,5,4,3)", "(20,5,4,3)", "(10,15,8,3)", "(10,5,4,6)"])
def test_repeat(dtype: str, times: str) -> None:
    check(spec("repeat", [f"(10,5,4,3)/{dtype}"], f"{times}/{dtype}"))


def test_repeat_of_a_view() -> None:
    check(spec("repeat", ["(3,4,2,1)/f32/(4,24,12,96)"], "(6,4,6,2)/f32"))


@pytest.mark.parametrize("op", ["acc", "set"])
@pytest.mark.parametrize("alias", [None, 0])
@pytest.mark.parametrize(
    "part, strides, offset",
    [
        ("(8,6,4,3)", (32, 192, 768), 0),  # the whole tensor
        ("(8,5,4,3)", (32, 192, 768), 32),  # rows
        ("(5,6,2,1)", (32, 192, 768), 12),  # parts of rows
        ("(5,3,2,2)", (20, 60, 120), 8),  # packed
        ("(3,2,2,2)", (64, 400, 1000), 4),  # strides that are not nested
    ],
)
def test_regions(op: str, alias: int | None, part: str, strides: tuple[int, int, int], offset: int) -> None:
    params = dict(zip(("nb1", "nb2", "nb3"), strides, strict=True))
    kernel = spec(
        op, ["(8,6,4,3)/f32", f"{part}/f32"], "(8,6,4,3)/f32", offset=offset, inplace=alias == 0, alias=alias, **params
    )
    assert shapes.check(op, kernel.inputs, kernel.output, dict(kernel.params), alias) == []
    check(kernel)


def test_a_region_may_be_taken_from_a_view() -> None:
    params = {"nb1": 32, "nb2": 192, "nb3": 768, "offset": 0}
    for op in ("acc", "set"):
        check(spec(op, ["(8,6,4,3)/f32", "(5,4,2,3)/f32/(4,36,180,720)"], "(8,6,4,3)/f32", **params))


@pytest.mark.parametrize("tensor", ["(79,1,3,2)/f32", "(4,1,3,1)/f32/(12,48,4,48)", "(1,1,1,1)/f32"])
def test_diag(tensor: str) -> None:
    n, _, n2, n3 = map(int, tensor.split("/")[0].strip("()").split(","))
    check(spec("diag", [tensor], f"({n},{n},{n2},{n3})/f32"))


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_tri(kind: int) -> None:
    x = np.full((2, 10, 10), np.inf, np.float32)  # other elements are 0, not a product with infinity
    check(spec("tri", ["(10,10,2,1)/f32"], "(10,10,2,1)/f32", tri_type=kind), src0=x)


@pytest.mark.parametrize("c", [0.0, -152.0, float("-inf")])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("alias", [None, 0])
def test_fill(c: float, dtype: str, alias: int | None) -> None:
    check(spec("fill", [f"(10,3,2,1)/{dtype}"], f"(10,3,2,1)/{dtype}", c=c, alias=alias))


@pytest.mark.parametrize("start, stop, step, n", [(0.0, 10.0, 1.0, 10), (-1.0, 1.0, 0.3, 7), (5.5, 6.0, 100.0, 1)])
def test_arange(start: float, stop: float, step: float, n: int) -> None:
    kernel = spec("arange", [], f"({n},1,1,1)/f32", start=start, stop=stop, step=step)
    assert shapes.check("arange", [], kernel.output, dict(kernel.params)) == []
    check(kernel, 1e-13)
