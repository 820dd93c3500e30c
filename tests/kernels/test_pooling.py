"""Pooling: windows at the edges and outside of the tensor, and ties."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, spec

from kernelgen.ggml import shapes
from kernelgen.ggml.ops import OPS
from kernelgen.ggml.tensor import TensorDesc

MAX, MEAN = 0, 1


@pytest.mark.parametrize("pool", [MAX, MEAN])
@pytest.mark.parametrize("k, s, p", [(1, 1, 0), (3, 2, 1), (3, 1, 3), (2, 5, 2), (4, 3, 0)])
@pytest.mark.parametrize("tensor", ["(11,3,2,2)/f32", "(12,1,3,1)/f16"])
def test_pool_1d(tensor: str, k: int, s: int, p: int, pool: int) -> None:
    """A window outside of the tensor has the mean 0 and the lowest number as its maximum."""
    params = {"pool": pool, "k0": k, "s0": s, "p0": p}
    output = shapes.result("pool_1d", [TensorDesc.parse(tensor)], OPS["pool_1d"].with_defaults(params))
    check(spec("pool_1d", [tensor], str(output), **params), 1e-13)


STEPS = [
    {"k0": 1, "k1": 1, "s0": 1, "s1": 1},
    {"k0": 3, "k1": 2, "s0": 2, "s1": 1, "p0": 1, "p1": 1},
    {"k0": 2, "k1": 3, "s0": 5, "s1": 4, "p1": 2},
    {"k0": 3, "k1": 3, "s0": 1, "s1": 2, "p0": 4, "p1": 1},
]


def pooled(steps: dict[str, int], more: int = 0) -> str:
    w, h = (
        (n + 2 * steps.get(f"p{i}", 0) + more - steps[f"k{i}"]) // steps[f"s{i}"] + 1 for i, n in enumerate((11, 8))
    )
    return f"({w},{h},3,2)/f32"


@pytest.mark.parametrize("pool", [MAX, MEAN])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("tensor", ["(11,8,3,2)/f32", "(11,8,3,2)/f16", "(11,8,3,2)/f32/(4,80,800,3200)"])
def test_pool_2d(tensor: str, steps: dict[str, int], pool: int) -> None:
    check(spec("pool_2d", [tensor], pooled(steps), pool=pool, **steps), 1e-13)


@pytest.mark.parametrize("pool", [MAX, MEAN])
def test_half_an_element_of_padding_shows_in_the_shape_only(pool: int) -> None:
    steps = {"k0": 3, "k1": 2, "s0": 1, "s1": 2, "p0": 1}
    output = pooled(steps, more=1)
    kernel = spec("pool_2d", ["(11,8,3,2)/f32"], output, pool=pool, **steps)
    assert shapes.check(kernel.op, kernel.inputs, kernel.output, dict(kernel.params)) == []
    check(kernel, 1e-13)
    (problem,) = shapes.check(kernel.op, kernel.inputs, TensorDesc.parse("(13,4,3,2)/f32"), dict(kernel.params))
    assert problem.message == "ne0 of what is pooled is 11 or 12, not 13"


@pytest.mark.parametrize("pool", [MAX, MEAN])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_pool_2d_back(steps: dict[str, int], pool: int, dtype: str) -> None:
    kernel = spec("pool_2d_back", [pooled(steps), f"(11,8,3,2)/{dtype}"], "(11,8,3,2)/f32", pool=pool, **steps)
    assert shapes.check(kernel.op, kernel.inputs, kernel.output, dict(kernel.params)) == []
    check(kernel, 1e-12)


def test_the_first_of_equal_elements_gets_the_gradient() -> None:
    values = np.random.default_rng(4).integers(0, 2, (2, 3, 8, 11)).astype(np.float32)
    values[0, 0] = -np.inf  # no element is above the lowest number, so none gets the gradient
    steps = {"k0": 3, "k1": 3, "s0": 2, "s1": 1, "p0": 1, "p1": 2}
    kernel = spec("pool_2d_back", [pooled(steps), "(11,8,3,2)/f32"], "(11,8,3,2)/f32", pool=MAX, **steps)
    have = check(kernel, 1e-12, src1=values)
    assert not have[0, 0].any()


@pytest.mark.parametrize("op", ["pool_1d", "pool_2d"])
def test_the_lowest_number_is_the_least_maximum(op: str) -> None:
    shape = "(4,4,1,1)/f32"
    params = {"pool": MAX, "k0": 1, "s0": 1} | ({"k1": 1, "s1": 1} if op == "pool_2d" else {})
    have = check(spec(op, [shape], shape, **params), src0=np.full((1, 1, 4, 4), -np.inf))
    assert (have == np.finfo(np.float32).min).all()
