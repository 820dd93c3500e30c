"""Sums and norms of rows."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, spec

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
    """Qwen3 normalizes each head of a fused projection: rows of 16 in rows of 96."""
    check(spec(op, ["(16,4,3,1)/f32/(4,64,384,1152)"], "(16,4,3,1)/f32", eps=1e-6))


@pytest.mark.parametrize("tensor", ["(33,4,3,2)/f32", "(16,4,3,1)/f32/(4,192,64,768)"])
def test_sum_rows(tensor: str) -> None:
    ne = tensor.split("/")[0].split(",", 1)[1]
    check(spec("sum_rows", [tensor], f"(1,{ne}/f32"))


@pytest.mark.parametrize("n_groups", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("tensor", ["(5,3,8,2)/f32", "(4,3,8,2)/f32/(4,160,16,480)"])
def test_group_norm(tensor: str, n_groups: int) -> None:
    """Eight channels split into 3 + 3 + 2 for three groups, and into 2 + 2 + 2 + 2 + 0 + 0 for six."""
    check(spec("group_norm", [tensor], tensor.split("/")[0] + "/f32", n_groups=n_groups, eps=1e-5), 1e-12)


def test_group_norm_of_many_elements_far_from_zero() -> None:
    values = np.random.default_rng(3).normal(size=(1, 64, 32, 32)) + 100
    check(spec("group_norm", ["(32,32,64,1)/f32"], "(32,32,64,1)/f32", n_groups=4, eps=1e-6), 1e-10, src0=values)
