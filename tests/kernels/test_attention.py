"""Fused attention, and the indexer of sparse attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kernel_harness import Array, check, emit, spec, tensor
from test_softmax import causal

from kernelgen.ggml import ops, shapes
from kernelgen.hlo import proto

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
    """As in DeepSeek, whose values are shorter than its keys."""
    inputs = ["(24,3,4,1)/f32", "(24,7,1,1)/f16", "(16,7,1,1)/f16"]
    check(spec("flash_attn_ext", inputs, "(16,4,3,1)/f32", scale=0.25), 1e-6)


def test_the_bound_of_visible_keys_changes_nothing() -> None:
    """The bound is for kernels that gather the keys; only the mask determines which keys are visible."""
    one, other = (spec("flash_attn_ext", [Q, KV, KV, MASK], OUT, scale=0.25, n_kv_max=n) for n in (0, 8))
    assert emit(one) == emit(other)


def hidden(tokens: int, n_kv: int) -> Array:
    """Returns a mask that hides half of all keys, for most tokens also the first 2,100 or half, all but the last key of
    one token, and all keys of another.
    """
    rng = np.random.default_rng(6)
    mask = np.where(rng.random((tokens, n_kv)) < 0.5, -np.inf, rng.normal(size=(tokens, n_kv)))
    mask[2:, : min(2100, n_kv // 2)] = -np.inf
    mask[1, :-1], mask[1, -1] = -np.inf, 0
    mask[-2] = -np.inf
    return mask


@pytest.mark.parametrize(
    ("dtype", "masked", "sinks", "params"),
    [
        ("f16", True, False, {}),
        ("f16", True, True, {"logit_softcap": 5.0}),
        ("bf16", False, True, {"prec": 10}),
        ("f32", True, False, {"max_bias": 8.0}),
        ("q8_0", True, True, {}),
    ],
)
def test_keys_in_blocks(dtype: str, masked: bool, sinks: bool, params: dict[str, float]) -> None:
    """5,000 keys, which are two blocks and a remainder, with heads that share keys."""
    kv = f"(32,5000,2,1)/{dtype}"
    inputs = ["(32,16,8,1)/f32/(4,1024,128,16384)", kv, kv]
    inputs += ["(5000,16,1,1)/f16" if masked else None, "(8,1,1,1)/f32" if sinks else None]
    kernel = spec("flash_attn_ext", inputs, "(32,8,16,1)/f32", scale=0.25, **params)
    y = check(kernel, 1e-4 if dtype == "bf16" else 1e-6, **({"src3": hidden(16, 5000)} if masked else {}))
    if masked and not sinks:
        assert not y[0, -2].any() and y[0, 1].all()


@pytest.mark.parametrize(("tokens", "n_kv", "sinks"), [(200, 600, True), (128, 600, False)])
def test_prompts_in_blocks(tokens: int, n_kv: int, sinks: bool) -> None:
    """32 heads: scores are computed for 128 tokens and 512 keys at once, and for the remainders of both."""
    kv = f"(8,{n_kv},4,1)/f16"
    inputs = [f"(8,{tokens},32,1)/f32", kv, kv, f"({n_kv},{tokens},1,1)/f16", "(32,1,1,1)/f32" if sinks else None]
    check(spec("flash_attn_ext", inputs, f"(8,32,{tokens},1)/f32", scale=0.25), 1e-6, src3=hidden(tokens, n_kv))


def scores_at_once(tokens: int, n_kv: int, heads: int, **params: bool) -> set[tuple[int, int]]:
    """Returns the numbers of tokens and keys whose scores attention in JAX computes at once."""
    kv = f"(16,{n_kv},{heads},1)/f16"
    inputs = [f"(16,{tokens},{heads},1)/f32", kv, kv, f"({n_kv},{tokens},1,1)/f16"]
    kernel = spec("flash_attn_ext", inputs, f"(16,{heads},{tokens},1)/f32", scale=0.25, **params)
    module = proto.parse(emit(kernel, ("jax",)))
    shapes = (i.shape.dimensions for c in module.computations for i in c.instructions if i.opcode == "exponential")
    return {(shape[2], shape[3]) for shape in shapes if len(shape) == 4}


@pytest.mark.parametrize(
    ("tokens", "n_kv", "heads", "at_once"),
    [
        (128, 4096, 32, {(128, 512)}),
        (512, 1024, 32, {(128, 512)}),
        (512, 4096, 8, {(128, 2048)}),
        (200, 600, 32, {(128, 512), (128, 88), (72, 512), (72, 88)}),
        (512, 512, 8, {(512, 512)}),
        (127, 4096, 32, {(127, 2048)}),
    ],
)
def test_scores_of_a_prompt_fit_into_sbuf(tokens: int, n_kv: int, heads: int, at_once: set[tuple[int, int]]) -> None:
    assert scores_at_once(tokens, n_kv, heads) == at_once


def by_tiles(tokens: int, n_kv: int) -> Array:
    """Returns a mask that hides as little as `causal` allows: for 128 tokens, the keys after the last one."""
    rng = np.random.default_rng(7)
    last = np.minimum(np.arange(tokens) // 128 * 128 + 128, tokens)
    hidden_keys = np.arange(n_kv) >= (n_kv - tokens + last)[:, None]
    return np.where(hidden_keys | (rng.random((tokens, n_kv)) < 0.2), -np.inf, rng.normal(size=(tokens, n_kv)))


@pytest.mark.parametrize("language", ["jax", "nki"])
@pytest.mark.parametrize(
    ("tokens", "n_kv", "params"), [(300, 300, {}), (256, 400, {"logit_softcap": 5.0, "max_bias": 8.0}), (16, 40, {})]
)
def test_keys_that_a_causal_mask_hides_are_left_out(
    tokens: int, n_kv: int, params: dict[str, float], language: str
) -> None:
    kv = f"(16,{n_kv},1,1)/f16"
    inputs = [f"(16,{tokens},2,1)/f32", kv, kv, f"({n_kv},{tokens},1,1)/f16", "(2,1,1,1)/f32"]
    kernel = spec("flash_attn_ext", inputs, f"(16,2,{tokens},1)/f32", scale=0.25, causal=True, **params)
    check(kernel, 1e-5, languages=(language,), src3=by_tiles(tokens, n_kv))


def test_a_causal_kernel_computes_the_scores_of_what_tokens_see() -> None:
    assert scores_at_once(512, 640, 8, causal=True) == {(128, 256), (128, 384), (128, 512), (128, 640)}
    assert scores_at_once(200, 200, 8, causal=True) == {(128, 128), (72, 200)}
    assert scores_at_once(100, 640, 8, causal=True) == {(100, 640)}


def test_a_kernel_that_is_not_causal_has_no_such_parameter() -> None:
    plain, other, causal_one = (
        spec("flash_attn_ext", [Q, KV, KV, MASK], OUT, scale=0.25, **params)
        for params in ({}, {"causal": False}, {"causal": True})
    )
    assert plain == other != causal_one
    assert "causal" not in dict(plain.params)
    assert (plain.op_params[15], causal_one.op_params[15]) == (0, 1)
    decoded = ops.op("flash_attn_ext").decode(causal_one.op_params)
    assert decoded == dict(causal_one.params)
    assert ops.op("flash_attn_ext").decode(plain.op_params) == dict(plain.params)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([Q, KV, KV], "causal needs a mask"),
        (["(16,13,8,1)/f32", KV, KV, "(12,13,1,1)/f16"], "causal needs as many keys as tokens, 13, not 12"),
    ],
)
def test_causal_kernels_have_a_mask_and_a_key_for_each_token(inputs: list[str], message: str) -> None:
    n = tensor(inputs[0]).ne[1]
    kernel = spec("flash_attn_ext", [*inputs], f"(16,8,{n},1)/f32", scale=0.25, causal=True)
    problems = shapes.check(kernel.op, kernel.inputs, kernel.output, dict(kernel.params), None)
    assert [problem.message for problem in problems] == [message]


@pytest.mark.parametrize(
    ("tokens", "n_kv", "width"),
    [(16, 2048, 2048), (16, 2049, 2048), (15, 2176, 2176), (1, 32768, 32768), (1, 40000, 2048)],
)
def test_no_more_scores_than_a_block_are_there_at_once(tokens: int, n_kv: int, width: int) -> None:
    """8 heads: 128 queries and 2,048 keys, or fewer queries and more keys."""
    kv = f"(16,{n_kv},8,1)/f16"
    inputs = [f"(16,{tokens},8,1)/f32", kv, kv, f"({n_kv},{tokens},1,1)/f16"]
    module = proto.parse(emit(spec("flash_attn_ext", inputs, f"(16,8,{tokens},1)/f32", scale=0.25), ("jax",)))
    shapes = [i.shape.dimensions for c in module.computations for i in c.instructions]
    assert max(shape[-1] for shape in shapes if math.prod(shape[:-1]) == 8 * tokens) == width


@pytest.mark.parametrize("k", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("masks", [1, 2, 4])
def test_indexer(k: str, masks: int) -> None:
    inputs = ["(64,5,3,4)/f32", f"(64,1,7,4)/{k}", "(5,3,1,4)/f32", f"(7,3,1,{masks})/f16"]
    mask = np.broadcast_to(causal(3, 7), (masks, 1, 3, 7))
    check(spec("lightning_indexer", inputs, "(7,3,1,4)/f32"), 1e-9, src3=mask)


def test_indexer_of_a_cache() -> None:
    """Keys are rows of a longer cache; the queries are one projection."""
    inputs = ["(16,4,2,1)/f32/(4,64,1024,2048)", "(16,1,9,1)/f16/(2,32,64,1024)", "(4,2,1,1)/f32", "(9,2,1,1)/f16"]
    check(spec("lightning_indexer", inputs, "(9,2,1,1)/f32"), 1e-9, src3=causal(2, 9))
