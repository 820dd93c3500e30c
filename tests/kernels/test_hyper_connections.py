"""Hyper-connections."""

from __future__ import annotations

import pytest
from kernel_harness import check, spec


@pytest.mark.parametrize("streams", [1, 4, 5])
@pytest.mark.parametrize("gated", [False, True])
def test_weighted_sum_before_a_layer(streams: int, gated: bool) -> None:
    weights = f"(31,{streams},3,1)/f32" if gated else f"({streams},3,1,1)/f32"
    kernel = spec("dsv4_hc_pre", [f"(31,{streams},3,1)/f32", weights], "(31,3,1,1)/f32", scale=0.25, gated=gated)
    check(kernel, 1e-10)


@pytest.mark.parametrize("n_tokens, n_iter", [(1, 1), (17, 2), (5, 20)])
def test_mixing_matrix(n_tokens: int, n_iter: int) -> None:
    inputs = [f"(24,{n_tokens},1,1)/f32", "(4,1,1,1)/f32", "(24,1,1,1)/f32"]
    y = check(spec("dsv4_hc_comb", inputs, f"(4,4,{n_tokens},1)/f32", eps=1e-6, n_iter=n_iter), 1e-10)
    assert y.sum(axis=2) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("comb", [None, "(4,4,5,1)/f32", "(4,4,5,1)/f32/(16,4,64,320)"])
def test_streams_after_a_layer(comb: str | None) -> None:
    check(spec("dsv4_hc_post", ["(33,5,1,1)/f32", "(33,4,5,1)/f32", "(4,5,1,1)/f32", comb], "(33,4,5,1)/f32"), 1e-10)
