"""Gradients, losses and the optimizer's steps."""

from __future__ import annotations

import numpy as np
import pytest
from harness import check, spec
from reference.training import distribution

PADDED = "(16,4,3,1)/f32/(4,80,320,960)"
"""Rows with gaps between them."""


@pytest.mark.parametrize("tensor", ["(31,3,2,1)/f32", "(31,3,2,1)/f16", PADDED])
def test_silu_back(tensor: str) -> None:
    ne, dtype = tensor.split("/")[:2]
    values = np.random.default_rng(1).uniform(-30, 30, [int(n) for n in ne[1:-1].split(",")][::-1])
    check(spec("silu_back", [tensor, tensor], f"{ne}/{dtype}"), 1e-7 if dtype == "f32" else 1e-6, src1=values)


# Rows of one element with a small eps would compare rounding errors: the gradient of x / |x| is 0.
@pytest.mark.parametrize(
    "ne, eps",
    [("(64,5,4,3)", 0.0), ("(64,5,4,3)", 1e-5), ("(1025,2,1,1)", 1e-5), ("(1025,2,1,1)", 10.0), ("(1,3,1,1)", 10.0)],
)
def test_rms_norm_back(ne: str, eps: float) -> None:
    check(spec("rms_norm_back", [f"{ne}/f32"] * 2, f"{ne}/f32", eps=eps))


def test_rms_norm_back_takes_views() -> None:
    check(spec("rms_norm_back", ["(16,4,3,1)/f32", PADDED], "(16,4,3,1)/f32", eps=1e-5))


@pytest.mark.parametrize("ne", [(10, 5, 4, 3), (3000, 1, 1, 1), (1, 4, 1, 1)])
def test_cross_entropy(ne: tuple[int, ...]) -> None:
    tensor = f"({','.join(map(str, ne))})/f32"
    rng = np.random.default_rng(2)
    # As far apart as those of a model that is sure of itself.
    logits, labels = rng.uniform(-100, 100, ne[::-1]), distribution(rng, ne[::-1])
    check(spec("cross_entropy_loss", [tensor, tensor], "(1,1,1,1)/f32"), src0=logits, src1=labels)
    kernel = spec("cross_entropy_loss_back", ["(1,1,1,1)/f32", tensor, tensor], tensor)
    check(kernel, src1=logits, src2=labels)
