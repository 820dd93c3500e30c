"""Fused attention, and the indexer of sparse attention."""

from __future__ import annotations

import numpy as np
import pytest
from harness import check, emit, spec
from test_softmax import causal

Q, KV, MASK, OUT = "(16,5,8,1)/f32/(4,512,64,2560)", "(16,12,2,1)/f16/(2,64,32,768)", "(12,5,1,1)/f16", "(16,8,5,1)/f32"


@pytest.mark.parametrize("prec", [0, 10])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_types_of_keys_and_values(dtype: str, prec: int) -> None:
    inputs = ["(32,5,4,1)/f32", f"(32,12,2,1)/{dtype}", f"(64,12,2,1)/{dtype}", MASK]
    limit = 1e-4 if dtype == "bf16" and not prec else 1e-6
    check(spec("flash_attn_ext", inputs, "(64,4,5,1)/f32", scale=0.2, prec=prec), limit, src3=causal(5, 12))


@pytest.mark.parametrize("max_bias, softcap", [(0.0, 0.0), (8.0, 0.0), (0.0, 5.0)])
def test_permuted_views_and_grouped_heads(max_bias: float, softcap: float) -> None:
    kernel = spec(
        "flash_attn_ext", [Q, KV, KV, MASK], OUT, scale=0.25, max_bias=max_bias, logit_softcap=softcap, prec=10
    )
    check(kernel, 1e-6, src3=causal(5, 12))


def test_without_mask() -> None:
    check(spec("flash_attn_ext", [Q, KV, KV], OUT, scale=0.25), 1e-6)


def test_a_mask_with_padding_rows_per_batch_and_head() -> None:
    inputs = ["(16,5,4,2)/f32", "(16,12,4,2)/f16", "(16,12,4,1)/f16", "(12,64,2,2)/f16"]
    mask = causal(64, 12, 2, 2) + np.random.default_rng(4).normal(size=(2, 2, 64, 12))
    check(spec("flash_attn_ext", inputs, "(16,4,5,2)/f32", scale=0.25), 1e-6, src3=mask)


@pytest.mark.parametrize("mask", [None, MASK])
def test_sinks(mask: str | None) -> None:
    check(spec("flash_attn_ext", [Q, KV, KV, mask, "(8,1,1,1)/f32"], OUT, scale=0.25), 1e-6)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    mask = causal(5, 12)
    mask[2] = -np.inf
    y = check(spec("flash_attn_ext", [Q, KV, KV, MASK], OUT, scale=0.25), 1e-6, src3=mask)
    assert not y[0, 2].any() and y[0, 1].all()


def test_heads_of_different_sizes() -> None:
    """DeepSeek's values are shorter than its keys."""
    inputs = ["(24,3,4,1)/f32", "(24,7,1,1)/f16", "(16,7,1,1)/f16"]
    check(spec("flash_attn_ext", inputs, "(16,4,3,1)/f32", scale=0.25), 1e-6)


def test_the_bound_of_visible_keys_changes_nothing() -> None:
    """It is for kernels that gather the keys; the mask alone says which they are."""
    one, other = (spec("flash_attn_ext", [Q, KV, KV, MASK], OUT, scale=0.25, n_kv_max=n) for n in (0, 8))
    assert emit(one) == emit(other)


@pytest.mark.parametrize("k", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("masks", [1, 2, 4])
def test_indexer(k: str, masks: int) -> None:
    inputs = ["(64,5,3,4)/f32", f"(64,1,7,4)/{k}", "(5,3,1,4)/f32", f"(7,3,1,{masks})/f16"]
    mask = np.broadcast_to(causal(3, 7), (masks, 1, 3, 7))
    check(spec("lightning_indexer", inputs, "(7,3,1,4)/f32"), 1e-9, src3=mask)


def test_indexer_of_a_cache() -> None:
    """Keys are rows of a longer cache, queries of one projection."""
    inputs = ["(16,4,2,1)/f32/(4,64,1024,2048)", "(16,1,9,1)/f16/(2,32,64,1024)", "(4,2,1,1)/f32", "(9,2,1,1)/f16"]
    check(spec("lightning_indexer", inputs, "(9,2,1,1)/f32"), 1e-9, src3=causal(2, 9))
