"""Softmax with scale, mask, ALiBi and sinks."""

from __future__ import annotations

import numpy as np
import pytest
from harness import check, spec


def causal(rows: int, columns: int, *batch: int) -> np.ndarray:
    """Returns a mask that hides what comes later, and all of nothing: [*batch, rows, columns]."""
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
