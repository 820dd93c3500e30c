"""Softmax with scale, mask, ALiBi and sinks."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, spec


def causal(rows: int, columns: int, *batch: int) -> np.ndarray:
    """Returns a mask that hides later columns: [*batch, rows, columns]."""
    mask = np.where(np.arange(columns) > np.arange(rows)[:, None] + 2, -np.inf, 0.0)
    return np.broadcast_to(mask, (*batch, rows, columns)).copy()


@pytest.mark.parametrize("ne", ["(16,4,3,2)", "(1,3,1,1)", "(129,1,5,1)"])
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_plain(ne: str, scale: float) -> None:
    check(spec("soft_max", [f"{ne}/f32"], f"{ne}/f32", scale=scale))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("mask", ["(16,4,1,1)", "(16,4,3,1)", "(16,4,3,2)", "(16,4,1,2)", "(16,9,1,1)"])
@pytest.mark.parametrize("max_bias", [0.0, 8.0])
def test_mask_is_shared_over_heads_and_batches(dtype: str, mask: str, max_bias: float) -> None:
    kernel = spec("soft_max", ["(16,4,6,2)/f32", f"{mask}/{dtype}"], "(16,4,6,2)/f32", scale=0.5, max_bias=max_bias)
    _, rows, n2, n3 = (int(n) for n in mask.strip("()").split(","))
    values = causal(rows, 16, n3, n2) + np.random.default_rng(3).normal(size=(n3, n2, rows, 16))
    check(kernel, src1=values)


@pytest.mark.parametrize("mask", [None, "(8,3,1,1)/f32"])
def test_sinks(mask: str | None) -> None:
    check(spec("soft_max", ["(8,3,4,2)/f32", mask, "(4,1,1,1)/f32"], "(8,3,4,2)/f32", scale=0.3))


def test_large_scores_do_not_overflow() -> None:
    check(spec("soft_max", ["(8,3,1,1)/f32"], "(8,3,1,1)/f32", scale=1000.0))


@pytest.mark.parametrize("ne", ["(16,4,3,2)", "(1,3,1,1)", "(129,1,5,1)"])
@pytest.mark.parametrize("max_bias", [0.0, 8.0])
def test_gradient(ne: str, max_bias: float) -> None:
    kernel = spec("soft_max_back", [f"{ne}/f32", f"{ne}/f32"], f"{ne}/f32", scale=0.125, max_bias=max_bias)
    check(kernel, 1e-10)


def test_gradient_is_that_of_softmax() -> None:
    """The differences of a softmax with a mask and ALiBi: neither takes part in the gradient."""
    rng = np.random.default_rng(9)
    x, grad = rng.normal(size=(2, 3, 8)), rng.normal(size=(2, 3, 8))
    mask = causal(3, 8) * 1.0
    slopes = np.float64([0.5, 0.25])[:, None, None]

    def soft_max(x: np.ndarray) -> np.ndarray:
        e = np.exp(0.3 * x + slopes * mask)
        return e / e.sum(axis=2, keepdims=True)

    want = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = 1e-5
        want[at] = (grad * (soft_max(x + step) - soft_max(x - step))).sum() / 2e-5
    kernel = spec("soft_max_back", ["(8,3,2,1)/f32"] * 2, "(8,3,2,1)/f32", scale=0.3, max_bias=8.0)
    y = check(kernel, src0=grad.astype(np.float32), src1=soft_max(x).astype(np.float32))
    np.testing.assert_allclose(y[0], want, atol=1e-5)


@pytest.mark.parametrize("op", ["diag_mask_inf", "diag_mask_zero"])
@pytest.mark.parametrize("n_past", [0, 5, 20])
@pytest.mark.parametrize("alias", [None, 0])
def test_triangle(op: str, n_past: int, alias: int | None) -> None:
    check(spec(op, ["(10,7,3,2)/f32"], "(10,7,3,2)/f32", alias=alias, n_past=n_past), 0)
