"""Sums, means, maxima and counts."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, spec


@pytest.mark.parametrize(
    "tensor", ["(33,1024,1,1)/f32", "(11,6,5,3)/f32/(4,220,44,1320)", "(7,3,1,1)/f16", "(1,1,1,1)/bf16"]
)
def test_sum(tensor: str) -> None:
    check(spec("sum", [tensor], f"(1,1,1,1)/{tensor.split('/')[1]}"), 1e-5 if "f16" in tensor else 1e-12)


@pytest.mark.parametrize("tensor", ["(32769,2,1,1)/f32", "(11,5,3,2)/f32/(4,44,440,1320)", "(1,4,1,1)/f16"])
def test_mean(tensor: str) -> None:
    ne = tensor.split("/")[0].partition(",")[2]
    check(spec("mean", [tensor], f"(1,{ne}/f32"), 1e-11)


@pytest.mark.parametrize("n", [1, 2, 3, 127, 128, 20481])
def test_cumsum(n: int) -> None:
    check(spec("cumsum", [f"({n},3,1,1)/f32"], f"({n},3,1,1)/f32"), 1e-9)


def test_an_infinity_reaches_no_element_before_it() -> None:
    x = np.array([1, 2, -np.inf, 3, np.inf, 4], np.float32)
    y = check(spec("cumsum", ["(6,1,1,1)/f32"], "(6,1,1,1)/f32"), src0=x)
    np.testing.assert_array_equal(y.ravel(), [1, 3, -np.inf, -np.inf, np.nan, np.nan])


@pytest.mark.parametrize("tensor", ["(5438,3,1,1)/f32", "(9,4,1,1)/f32/(4,80,320,320)", "(1,1,1,1)/f32"])
def test_argmax(tensor: str) -> None:
    n = tensor.split(",")[1]
    check(spec("argmax", [tensor], f"({n},1,1,1)/i32"))


def test_argmax_is_the_last_of_several() -> None:
    x = np.array([[3, 5, 1, 5, 2], [-np.inf] * 5, [np.inf, 0, 0, 0, 0]], np.float32)
    y = check(spec("argmax", ["(5,3,1,1)/f32"], "(3,1,1,1)/i32"), src0=x)
    assert y.ravel().tolist() == [3, 4, 0]


@pytest.mark.parametrize("ne", ["(5000,1,1,1)", "(3,4,5,2)", "(1,1,1,1)"])
@pytest.mark.parametrize("most", [1, 3])
def test_count_equal(ne: str, most: int) -> None:
    rng = np.random.default_rng(3)
    n = int(np.prod([int(n) for n in ne.strip("()").split(",")]))
    x, y = (rng.integers(-1, most, n).astype(np.int32) for _ in range(2))
    have = check(spec("count_equal", [f"{ne}/i32"] * 2, "(1,1,1,1)/i64"), src0=x, src1=y)
    assert have.dtype == np.int64


@pytest.mark.parametrize(
    "tensor, out",
    [
        ("(16,6,4,2)/f32", "(8,6,4,2)/f32"),
        ("(8,12,4,4)/f32", "(8,6,2,2)/f32"),
        ("(8,6,4,2)/f32/(4,64,768,6144)", "(4,6,4,1)/f32"),
        ("(8,6,4,2)/f16", "(1,1,1,1)/f16"),
        ("(3,1,1,1)/bf16", "(3,1,1,1)/bf16"),
    ],
)
def test_repeat_back(tensor: str, out: str) -> None:
    check(spec("repeat_back", [tensor], out), 1e-5 if "f16" in out else 1e-12)
