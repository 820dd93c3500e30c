"""Sums and norms of rows."""

from __future__ import annotations

import numpy as np
import pytest
from harness import check, spec

NORMS = ("norm", "rms_norm", "l2_norm")


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("ne", ["(64,5,4,3)", "(33,7,1,1)", "(1,4,1,1)", "(4096,1,1,1)"])
def test_norms(op: str, ne: str) -> None:
    check(spec(op, [f"{ne}/f32"], f"{ne}/f32", eps=1e-5))


@pytest.mark.parametrize("op", NORMS)
def test_eps_decides_for_small_rows(op: str) -> None:
    values = np.random.default_rng(2).normal(size=(1, 1, 3, 16)) * 1e-3
    check(spec(op, ["(16,3,1,1)/f32"], "(16,3,1,1)/f32", eps=0.5), src0=values)


@pytest.mark.parametrize("op", NORMS)
def test_norms_of_heads_inside_longer_rows(op: str) -> None:
    """Qwen3 normalises each head of a fused projection: rows of 16 in rows of 96."""
    check(spec(op, ["(16,4,3,1)/f32/(4,64,384,1152)"], "(16,4,3,1)/f32", eps=1e-6))


@pytest.mark.parametrize("tensor", ["(33,4,3,2)/f32", "(16,4,3,1)/f32/(4,192,64,768)"])
def test_sum_rows(tensor: str) -> None:
    ne = tensor.split("/")[0].split(",", 1)[1]
    check(spec("sum_rows", [tensor], f"(1,{ne}/f32"))
