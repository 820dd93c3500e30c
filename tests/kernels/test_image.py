"""Resizing, padding, rolling, windows and embeddings."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, spec

from kernelgen.ggml import shapes
from kernelgen.ggml.ops import OPS
from kernelgen.ggml.tensor import TensorDesc

NEAREST, BILINEAR, BICUBIC, ALIGN_CORNERS, ANTIALIAS = 0, 1, 2, 256, 512


@pytest.mark.parametrize(
    "mode",
    [
        NEAREST,
        BILINEAR,
        BICUBIC,
        NEAREST | ALIGN_CORNERS,
        BILINEAR | ALIGN_CORNERS,
        BICUBIC | ALIGN_CORNERS,
        BILINEAR | ANTIALIAS,
        BILINEAR | ANTIALIAS | ALIGN_CORNERS,
    ],
)
@pytest.mark.parametrize(
    "tensor, output",
    [
        ("(5,4,3,2)/f32", "(10,12,3,2)"),
        ("(5,4,3,2)/f32", "(7,9,4,3)"),
        ("(13,9,2,2)/f32", "(4,2,2,1)"),
        ("(1,4,2,1)/f32", "(3,1,2,1)"),
        ("(4,5,3,1)/f32/(20,4,80,240)", "(7,6,3,1)"),
    ],
)
def test_upscale(tensor: str, output: str, mode: int) -> None:
    check(spec("upscale", [tensor], f"{output}/f32", mode=mode), 1e-12)


@pytest.mark.parametrize("circular", [False, True])
@pytest.mark.parametrize("tensor", ["(5,4,3,2)/f32", "(5,4,3,2)/f16", "(5,4,3,2)/f32/(24,120,8,480)"])
@pytest.mark.parametrize(
    "edges",
    [{}, {"rp0": 2, "rp1": 1}, {"lp0": 3, "rp0": 7, "lp1": 4, "lp2": 1, "rp3": 2}, {"lp0": -1, "rp1": -2, "lp2": 2}],
)
def test_pad(tensor: str, edges: dict[str, int], circular: bool) -> None:
    output = shapes.result("pad", [TensorDesc.parse(tensor)], OPS["pad"].with_defaults(edges))
    check(spec("pad", [tensor], str(output), circular=circular, **edges), 0.0)


@pytest.mark.parametrize("p0, p1", [(0, 0), (2, 0), (0, 4), (4, 3)])
def test_pad_reflect_1d(p0: int, p1: int) -> None:
    check(spec("pad_reflect_1d", ["(5,4,3,2)/f32"], f"({5 + p0 + p1},4,3,2)/f32", p0=p0, p1=p1), 0.0)


@pytest.mark.parametrize("tensor", ["(5,4,3,2)/f32", "(5,3,4,2)/f32/(4,80,20,240)", "(5,4,3,2)/i32"])
def test_roll(tensor: str) -> None:
    ne, dtype = tensor.split("/")[:2]
    check(spec("roll", [tensor], f"{ne}/{dtype}", shift0=3, shift1=-2, shift2=-1, shift3=1), 0.0)
    check(spec("roll", [tensor], f"{ne}/{dtype}"), 0.0)


@pytest.mark.parametrize("dim, max_period", [(320, 10000), (7, 100), (1, 10), (2, 10000)])
def test_timestep_embedding(dim: int, max_period: int) -> None:
    steps = np.array([0.0, 1.0, 999.0, 3.5])
    check(
        spec("timestep_embedding", ["(4,1,1,1)/f32"], f"({dim},4,1,1)/f32", dim=dim, max_period=max_period), src0=steps
    )


@pytest.mark.parametrize("wide, high, w", [(7, 5, 3), (6, 6, 3), (2, 5, 4), (4, 1, 1)])
def test_windows_and_back(wide: int, high: int, w: int) -> None:
    npx, npy = -(-wide // w), -(-high // w)
    image, parts = f"(3,{wide},{high},1)/f32", f"(3,{w},{w},{npx * npy})/f32"
    values = np.random.default_rng(5).normal(size=(1, high, wide, 3))
    have = check(spec("win_part", [image], parts, npx=npx, npy=npy, w=w), 0.0, src0=values)
    back = check(spec("win_unpart", [parts], image, w=w), 0.0, src0=have)
    np.testing.assert_array_equal(back, values.astype(np.float32))


@pytest.mark.parametrize("n", [1, 2, 7])
def test_get_rel_pos(n: int) -> None:
    check(spec("get_rel_pos", [f"(3,{2 * n - 1},1,1)/f16"], f"(3,{n},{n},1)/f16"), 0.0)


@pytest.mark.parametrize("alias", [None, 0])
def test_add_rel_pos(alias: int | None) -> None:
    inputs = ["(16,15,2,1)/f32", "(4,5,3,2)/f32", "(4,5,3,2)/f32"]
    check(spec("add_rel_pos", inputs, inputs[0], alias=alias, inplace=alias is not None), 1e-13)
