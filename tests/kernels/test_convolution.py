"""Convolutions and im2col: strides, paddings, dilations, layouts and views, compared with ggml's loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import check, spec

from kernelgen.ggml import shapes
from kernelgen.ggml.ops import OPS
from kernelgen.ggml.tensor import TensorDesc

STEPS = [
    {},
    {"s0": 2, "s1": 3},
    {"p0": 2, "p1": 1, "d0": 2},
    {"s0": 3, "p0": 5, "p1": 4, "d1": 3},
    {"s0": 5, "s1": 4, "p1": 3},
    {"s0": 9, "s1": 9, "p0": 7, "p1": 8, "d0": 3, "d1": 2},
    {"s0": 8, "s1": 10, "d0": 5, "d1": 8},  # the dilated kernel is larger than the image, though there is no padding
]


def size(n: int, k: int, s: int, p: int, d: int) -> int:
    return int((n + 2 * p - d * (k - 1) - 1) / s) + 1


def sizes(image: tuple[int, ...], kernel: tuple[int, ...], steps: dict[str, int]) -> list[int]:
    return [
        size(n, k, steps.get(f"s{i}", 1), steps.get(f"p{i}", 0), steps.get(f"d{i}", 1))
        for i, (n, k) in enumerate(zip(image, kernel, strict=True))
    ]


def made(op: str, inputs: list[str], **params: Any) -> str:
    """Returns the result tensor that ggml makes, if the caller has no choice."""
    found = shapes.result(op, [TensorDesc.parse(t) for t in inputs], OPS[op].with_defaults(params))
    assert found is not None
    return str(found)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kernel", [(3, 2), (1, 1), (4, 3)])
def test_im2col_and_back(steps: dict[str, int], kernel: tuple[int, int]) -> None:
    ow, oh = sizes((9, 8), kernel, steps)
    image, columns = "(9,8,3,2)", f"({3 * kernel[0] * kernel[1]},{ow},{oh},2)"
    weights = f"({kernel[0]},{kernel[1]},3,4)/f32"
    check(spec("im2col", [weights, f"{image}/f32"], f"{columns}/f32", is_2D=True, **steps), 0.0)
    check(spec("im2col_back", [f"{columns}/f32", weights], f"{image}/f32", is_2D=True, **steps), 1e-12)


@pytest.mark.parametrize("steps", [{}, {"s0": 2, "p0": 3}, {"s0": 3, "p0": 1, "d0": 2}, {"s0": 7, "p0": 6}])
def test_im2col_of_rows(steps: dict[str, int]) -> None:
    steps = {"d0": 1, **steps, "s1": 0, "d1": 0}
    (ol,) = sizes((11,), (3,), steps)
    check(spec("im2col", ["(3,2,5,1)/f16", "(11,2,4,1)/f32"], f"(6,{ol},4,1)/f16", **steps), 0.0)
    check(spec("im2col", ["(3,2,5,1)/bf16", "(11,2,4,1)/f32/(4,96,240,960)"], f"(6,{ol},4,1)/f32", **steps), 0.0)
    check(spec("im2col_back", [f"(6,{ol},4,1)/f32", "(3,2,5,1)/f16"], "(11,2,4,1)/f32", **steps), 1e-12)


def test_a_large_kernel_makes_no_more_hlo_than_a_small_one() -> None:
    from kernel_harness import emit

    small, large = (
        len(emit(spec("im2col", [f"({k},{k},2,2)/f32", "(40,40,2,1)/f32"], f"({2 * k * k},{n},{n},1)/f32", is_2D=True)))
        for k, n in ((3, 38), (33, 8))
    )
    assert large < small * 1.1


def test_padding_of_im2col_is_zero_beside_infinities() -> None:
    image = np.full((1, 1, 3, 3), np.inf)
    have = check(
        spec("im2col", ["(2,2,1,1)/f32", "(3,3,1,1)/f32"], "(4,4,4,1)/f32", p0=1, p1=1, is_2D=True), src1=image
    )
    assert (have == 0).sum() == 64 - 36


@pytest.mark.parametrize("view", ["", "/(4,40,400,4000)"])
@pytest.mark.parametrize(
    "steps", [{"p0": 1, "p1": 1, "p2": 1}, {"s0": 3, "s1": 2, "d2": 2}, {"p0": 4, "s2": 3, "d0": 3}]
)
def test_im2col_3d(steps: dict[str, int], view: str) -> None:
    """Seven channels are two volumes of three, and an unused one."""
    ow, oh, od = sizes((8, 7, 6), (2, 3, 2), steps)
    for dtype in ("f32", "f16"):
        kernel = spec(
            "im2col_3d", ["(2,3,2,9)/f16", f"(8,7,6,7)/f32{view}"], f"(36,{ow},{oh},{2 * od})/{dtype}", IC=3, **steps
        )
        check(kernel, 0.0)


@pytest.mark.parametrize("dtype, limit", [("f32", 1e-12), ("f16", 1e-7), ("bf16", 1e-6)])
@pytest.mark.parametrize("k, s, p", [(4, 2, 0), (16, 8, 4), (1, 3, 0), (7, 3, 2), (8, 2, 5)])
def test_col2im_1d(k: int, s: int, p: int, dtype: str, limit: float) -> None:
    inputs = [f"({3 * k},9,1,1)/{dtype}"]
    check(spec("col2im_1d", inputs, made("col2im_1d", inputs, s0=s, oc=3, p0=p), s0=s, oc=3, p0=p), limit)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_conv_2d(steps: dict[str, int], dtype: str) -> None:
    inputs = [f"(3,2,5,7)/{dtype}", "(9,8,5,2)/f32"]
    check(spec("conv_2d", inputs, made("conv_2d", inputs, **steps), **steps), 1e-12)


def test_conv_2d_of_channels_that_lie_together() -> None:
    inputs = ["(3,2,5,7)/f16/(70,210,14,2)", "(9,8,5,2)/f32/(20,180,4,1440)"]
    check(spec("conv_2d", inputs, made("conv_2d", inputs, p0=1), p0=1), 1e-12)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("steps", STEPS)
def test_conv_2d_dw(steps: dict[str, int], dtype: str) -> None:
    inputs = [f"(3,2,1,5)/{dtype}", "(9,8,5,2)/f32"]
    check(spec("conv_2d_dw", inputs, made("conv_2d_dw", inputs, **steps), **steps), 1e-12)


@pytest.mark.parametrize("dtype, nb", [("f32", "(20,60,4,4)"), ("f16", "(10,30,2,2)")])
def test_conv_2d_dw_leaves_channels_together(dtype: str, nb: str) -> None:
    inputs = [f"(3,2,1,5)/{dtype}/{nb}", "(9,8,5,2)/f32/(20,180,4,1440)"]
    kernel = spec("conv_2d_dw", inputs, "(9,7,5,2)/f32/(20,180,4,1260)", p0=1)
    assert shapes.check(kernel.op, kernel.inputs, kernel.output, dict(kernel.params)) == []
    check(kernel, 1e-12)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("steps", [{}, {"s0": 2, "p1": 2, "d2": 2}, {"s2": 3, "s1": 2, "p0": 3, "d0": 2, "d1": 3}])
def test_conv_3d(steps: dict[str, int], dtype: str) -> None:
    inputs = [f"(3,2,2,10)/{dtype}", "(7,8,6,4)/f32"]
    params = {**steps, "c": 2, "n": 2, "oc": 5}
    check(spec("conv_3d", inputs, made("conv_3d", inputs, **params), **params), 1e-12)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("k, s", [(1, 1), (3, 2), (2, 5), (67, 3)])
def test_conv_transpose_1d(k: int, s: int, dtype: str) -> None:
    inputs = [f"({k},4,3,1)/{dtype}", "(6,3,1,1)/f32"]
    check(spec("conv_transpose_1d", inputs, made("conv_transpose_1d", inputs, s0=s), s0=s), 1e-12)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("stride", [1, 2, 5])
def test_conv_transpose_2d(stride: int, dtype: str) -> None:
    inputs = [f"(3,2,4,5)/{dtype}", "(6,7,5,2)/f32"]
    check(spec("conv_transpose_2d", inputs, made("conv_transpose_2d", inputs, stride=stride), stride=stride), 1e-12)
