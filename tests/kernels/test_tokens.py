"""Ops that are cut along tokens are independent along them: the reference computes the same result in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import Array, random_values, spec
from reference import compute

from kernelgen.dispatch.lengths import LengthIndex
from kernelgen.ggml.ops import GLU, OPS, UNARY
from kernelgen.ggml.tokens import Cut, cuts, one_stream, why_not
from kernelgen.spec.kernel import KernelSpec

N = 7
"""Tokens of the nodes; no other extent has this value."""

ROPE = {"n_dims": 16, "freq_base": 10000.0}
CACHE = "/f16/(2,128,32,2048)"
"""Strides of a cache of 16 cells with 4 heads of 16."""


def node(op: str, inputs: list[str | None], output: str, /, *, alias: int | None = None, **params: Any) -> KernelSpec:
    fill = {"n": N, "ids": f"({N},1,1,1)"}
    return spec(op, [t and t.format(**fill) for t in inputs], output.format(**fill), alias=alias, **params)


ROW = "(32,{n},1,1)/f32"
HEADS = "(16,4,{n},1)/f32"
NAMED = [
    node("mul_mat", ["(32,24,1,1)/f16", ROW], "(24,{n},1,1)/f32"),
    node("mul_mat", ["(32,24,1,1)/q8_0", ROW], "(24,{n},1,1)/f32"),
    node("mul_mat_id", ["(32,24,3,1)/f16", "(32,1,{n},1)/f32", "(2,{n},1,1)/i32"], "(24,2,{n},1)/f32"),
    node("add_id", ["(32,2,{n},1)/f32", "(32,3,1,1)/f32", "(2,{n},1,1)/i32"], "(32,2,{n},1)/f32"),
    node("rope", [HEADS, "{ids}/i32"], HEADS, **ROPE),
    node("rope_back", [HEADS, "{ids}/i32", "(8,1,1,1)/f32"], HEADS, **ROPE),
    node("get_rows", ["(32,3,1,1)/q4_0", "{ids}/i32"], ROW),
    node("get_rows", ["(1,3,{n},1)/f32", "(2,{n},1,1)/i32"], "(1,2,{n},1)/f32"),
    node("set_rows", [ROW, "{ids}/i64", "(32,16,1,1)/f16"], "(32,16,1,1)/f16"),
    node("set_rows", [ROW, "{ids}/i64", "(32,16,1,1)/q8_0"], "(32,16,1,1)/q8_0"),
    node(
        "flash_attn_ext",
        ["(16,{n},4,1)/f32/(4,256,64,1792)", f"(16,9,4,1){CACHE}", f"(16,9,4,1){CACHE}", "(9,{n},1,1)/f16"],
        "(16,4,{n},1)/f32",
        scale=0.25,
    ),
    node(
        "flash_attn_ext",
        ["(16,{n},4,1)/f32/(4,256,64,1792)", f"(16,9,2,1){CACHE}", f"(16,9,2,1){CACHE}", None, "(4,1,1,1)/f32"],
        "(16,4,{n},1)/f32",
        scale=0.25,
    ),
    *(
        node(op, [ROW, other], ROW)
        for op in ("add", "sub", "mul", "div")
        for other in (ROW, "(32,1,1,1)/f32", "(1,{n},1,1)/f32")
    ),
    node("mul", [HEADS, "(16,1,1,1)/f32"], HEADS),
    node("repeat", ["(32,1,{n},1)/f32"], "(32,2,{n},1)/f32"),
    node("repeat", ["(32,2,1,1)/f32"], "(32,2,{n},1)/f32"),
    node("all_reduce", [ROW], ROW, alias=0, n_devices=2),
    node("norm", [HEADS], HEADS, eps=1e-5),
    node("rms_norm", [HEADS], HEADS, eps=1e-5),
    node("l2_norm", [HEADS], HEADS, eps=1e-5),
    node("scale", [ROW], ROW, s=2.0),
    node("clamp", [ROW], ROW, min=-0.5, max=0.5),
    node("leaky_relu", [ROW], ROW, negative_slope=0.1),
    node("soft_max", [ROW, "(32,{n},1,1)/f16"], ROW, scale=0.5),
    node("argsort", [ROW], "(32,{n},1,1)/i32", order=1),
    node("top_k", [ROW], "(3,{n},1,1)/i32"),
    *(node(op, [ROW], "(1,{n},1,1)/f32") for op in ("sum_rows", "mean")),
    *(node(op, [ROW], ROW) for op in ("sqr", "sqrt", "log", "sin", "cos", "cumsum", "cont", "dup")),
    node("cpy", [ROW, "(32,{n},1,1)/f16"], "(32,{n},1,1)/f16"),
    node("concat", [ROW, "(8,{n},1,1)/f32"], "(40,{n},1,1)/f32", dim=0),
    *(
        node(op, [ROW], ROW, **({"alpha_n": 0.8, "alpha_p": 0.8, "beta": 0.5, "eps": -1e-6} if op == "xielu" else {}))
        for op in UNARY
    ),
    *(
        node(
            op,
            [ROW, ROW],
            ROW,
            **(
                {"limit": 7.0} if op == "swiglu_clamp" else {"alpha": 1.702, "limit": 7.0} if op == "swiglu_oai" else {}
            ),
        )
        for op in GLU
    ),
]


def values(kernel: KernelSpec) -> list[Array | None]:
    """Returns random inputs; indices are in range, and row numbers for writes are distinct."""
    rng = np.random.default_rng(3)
    found: list[Array | None] = []
    for i, t in enumerate(kernel.inputs):
        if t is None:
            found.append(None)
        elif kernel.op == "set_rows" and i == 1:
            found.append(rng.permutation(16)[: t.elements].reshape(t.shape).astype(np.int64))
        elif t.dtype == "i32":
            below = 3 if kernel.op in ("get_rows", "mul_mat_id", "add_id") else 100
            found.append(rng.integers(0, below, t.shape).astype(np.int32))
        else:
            array = random_values(t, rng)
            found.append(np.abs(array) + np.float32(0.5) if kernel.op in ("sqrt", "log") else array)
    return found


def rows_of(array: Array | None, axis: int | None, first: int, n: int) -> Array | None:
    if array is None or axis is None:
        return array
    return np.take(array, range(first, first + n), axis=3 - axis)


def computed(kernel: KernelSpec, inputs: list[Array | None]) -> Array:
    if kernel.op == "all_reduce":  # all devices have the same input
        assert inputs[0] is not None
        return inputs[0] * np.float32(dict(kernel.params)["n_devices"])
    with np.errstate(all="ignore"):
        return compute(kernel, inputs)


def one_cut(kernel: KernelSpec) -> Cut:
    (cut,) = (cut for cut in cuts(kernel.op, kernel.inputs, kernel.output) if cut.n == N)
    return cut


@pytest.mark.parametrize("kernel", NAMED, ids=lambda k: k.id)
@pytest.mark.parametrize("pieces", [[(0, 4), (3, 4)], [(0, 1), (1, 2), (3, 4)]], ids=["overlapping", "side-by-side"])
def test_pieces_are_the_whole(kernel: KernelSpec, pieces: list[tuple[int, int]]) -> None:
    cut = one_cut(kernel)
    inputs = values(kernel)
    want = computed(kernel, inputs)
    have = np.array(inputs[kernel.alias]) if cut.axes[-1] is None else np.zeros_like(want)
    for first, n in pieces:
        *srcs, result = cut.chunk(n)
        assert result is not None
        piece = KernelSpec(kernel.op, tuple(srcs), result, kernel.params, kernel.alias)
        given = [rows_of(v, axis, first, n) for v, axis in zip(inputs, cut.axes[:-1], strict=True)]
        if cut.axes[-1] is None:
            given[kernel.alias] = have
            have = np.array(computed(piece, given))
        else:
            index = [slice(None)] * 4
            index[3 - cut.axes[-1]] = slice(first, first + n)
            have[tuple(index)] = computed(piece, given)
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)  # the CPU sums rows of matrices in another order


def test_every_op_that_is_cut_is_tried() -> None:
    assert {k.op for k in NAMED} == {name for name, op in OPS.items() if op.tokens}
    # and every rule of each op
    assert {id(one_cut(k).rule) for k in NAMED} == {id(rule) for op in OPS.values() for rule in op.tokens}


def test_a_longer_cache_under_a_longer_mask_is_the_same() -> None:
    kernel = next(k for k in NAMED if k.op == "flash_attn_ext" and k.inputs[3])
    cut = one_cut(kernel)
    assert cut.n_more == 9
    *srcs, result = cut.chunk(N, 16)
    assert result == kernel.output
    assert str(srcs[3]) == f"(16,{N},1,1)/f16"
    q, k, v, mask, *_ = values(kernel)
    rng = np.random.default_rng(4)
    assert k is not None
    assert v is not None
    assert mask is not None
    longer = [np.concatenate([a, rng.normal(size=(1, 4, 7, 16)).astype(np.float16)], axis=2) for a in (k, v)]
    masked = np.concatenate([mask, np.full((1, 1, N, 7), -np.inf, np.float16)], axis=3)
    have = computed(KernelSpec("flash_attn_ext", tuple(srcs), result, kernel.params), [q, *longer, masked])
    np.testing.assert_array_equal(have, computed(kernel, [q, k, v, mask]))


def test_a_longer_table_is_the_same() -> None:
    kernel = next(k for k in NAMED if k.op == "get_rows")
    *srcs, result = one_cut(kernel).chunk(N, 5)
    assert result is not None
    table, ids = values(kernel)
    assert table is not None
    longer = np.concatenate([table, table[:, :, :2]], axis=2)
    have = computed(KernelSpec("get_rows", tuple(srcs), result), [longer, ids])
    np.testing.assert_array_equal(have, computed(kernel, [table, ids]))


def test_the_first_rows_of_what_is_written_are_the_same() -> None:
    """A kernel for the first rows alone computes a write that reaches no further row."""
    kernel = next(k for k in NAMED if k.op == "set_rows")
    cut = one_cut(kernel)
    assert (cut.n_more, cut.rule.written) == (16, 2)
    *srcs, result = cut.chunk(N, 9)
    assert result is not None
    assert str(result) == str(srcs[2]) == "(32,9,1,1)/f16"
    x, _, into = values(kernel)
    assert into is not None
    rows = np.random.default_rng(3).permutation(9)[:N].reshape(1, 1, 1, N).astype(np.int64)
    have = np.array(into)
    have[:, :, :9] = computed(KernelSpec("set_rows", tuple(srcs), result, kernel.params, 2), [x, rows, into[:, :, :9]])
    np.testing.assert_array_equal(have, computed(kernel, [x, rows, into]))


def test_kernels_for_the_most_first_rows_are_chosen() -> None:
    nodes = {
        m: node("set_rows", [ROW, "({n},1,1,1)/i64", f"(32,{m},1,1)/f16"], f"(32,{m},1,1)/f16") for m in (8, 16, 24, 40)
    }
    index = LengthIndex.of([nodes[8], nodes[16]])
    for m, kernel in ((40, nodes[16]), (16, nodes[16])):
        found = index.select(nodes[m])
        assert found is not None
        assert found.kernels == (kernel,)
    # a cache has memory behind it for up to as many rows again
    assert LengthIndex.of([nodes[40]]).select(nodes[16]) is None
    behind = LengthIndex.of([nodes[8], nodes[24], nodes[40]]).select(nodes[16])
    assert behind is not None
    assert behind.kernels == (nodes[24],)


@pytest.mark.parametrize(
    "kernel",
    [
        # attention without flash attention: the rows of a token are not contiguous
        node("mul_mat", ["(16,9,4,1)/f16", "(16,{n},4,1)/f32/(4,256,64,1792)"], "(9,{n},4,1)/f32"),
        node("soft_max", ["(9,{n},4,1)/f32", "(9,{n},1,1)/f32"], "(9,{n},4,1)/f32"),
        node("cont", ["(16,4,{n},1)/f32/(4,448,64,1792)"], "(64,{n},1,1)/f32"),
        # several streams
        node("flash_attn_ext", ["(16,{n},4,2)/f32", "(16,9,4,2)/f16", "(16,9,4,2)/f16"], "(16,4,{n},2)/f32", scale=1.0),
        node("set_rows", ["(32,{n},2,1)/f32", "({n},2,1,1)/i64", "(32,16,2,1)/f16"], "(32,16,2,1)/f16"),
        # positions of several dimensions
        node("rope", [HEADS, "(28,1,1,1)/i32"], HEADS, mode=8, section0=4, section1=4, **ROPE),
        # along the tokens, or recurrent
        node("concat", [ROW, ROW], "(32,14,1,1)/f32", dim=1),
        node("transpose", ["({n},32,1,1)/f32"], ROW),
        node("tri", [ROW], ROW, tri_type=0),
        node("group_norm", ["(4,8,{n},1)/f32"], "(4,8,{n},1)/f32", n_groups=7, eps=1e-5),
    ],
    ids=lambda k: k.id,
)
def test_what_is_not_cut(kernel: KernelSpec) -> None:
    assert N not in {cut.n for cut in cuts(kernel.op, kernel.inputs, kernel.output)}


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (
            node("set_rows", ["(32,{n},2,1)/f32", "({n},2,1,1)/i64", "(32,16,2,1)/f16"], "(32,16,2,1)/f16"),
            "its tokens are not in its outermost dimension",
        ),
        (
            node(
                "flash_attn_ext",
                ["(16,{n},4,2)/f32/(4,256,64,1792)", "(16,9,4,2)/f16", "(16,9,4,2)/f16"],
                "(16,4,{n},2)/f32",
                scale=1.0,
            ),
            None,  # each stream is cut
        ),
        (
            node(
                "flash_attn_ext",
                ["(16,{n},4,4)/f32/(4,256,64,1792)", "(16,9,4,2)/f16", "(16,9,4,2)/f16"],
                "(16,4,{n},4)/f32",
                scale=1.0,
            ),
            "it has 4 streams",
        ),
        (
            node("rope", [HEADS, "(28,1,1,1)/i32"], HEADS, mode=8, section0=4, section1=4, **ROPE),
            "its positions have several dimensions",
        ),
        (node("ssm_conv", ["(10,32,1,1)/f32", "(4,32,1,1)/f32"], ROW), "what it computes runs along the tokens"),
        (node("tri", [ROW], ROW, tri_type=0), "this op has no dimension of tokens"),
        (node("relu", [ROW], ROW), None),
    ],
    ids=lambda value: getattr(value, "id", None),
)
def test_what_is_not_cut_has_a_reason(kernel: KernelSpec, why: str | None) -> None:
    assert why_not(kernel.op, kernel.inputs, kernel.output) == why


def test_streams_are_computed_one_after_the_other() -> None:
    """Kernels for one sequence compute attention of several sequences with a cache each: each stream equals the stream
    alone.
    """
    streams = 3
    kernel = spec(
        "flash_attn_ext",
        [f"(16,{N},4,{streams})/f32", f"(16,9,2,{streams})/f16", f"(16,9,2,{streams})/f16", f"(9,{N},1,1)/f16"],
        f"(16,4,{N},{streams})/f32",
        scale=0.25,
    )
    one = one_stream(kernel.op, kernel.inputs, kernel.output)
    assert one
    *sources, result = one
    assert result
    alone = KernelSpec(kernel.op, tuple(sources), result, kernel.params)
    inputs = values(kernel)
    want = computed(kernel, inputs)
    for stream in range(streams):
        own = [v if v is None or v.shape[0] == 1 else v[stream : stream + 1] for v in inputs]
        np.testing.assert_array_equal(computed(alone, own)[0], want[stream])
    found = LengthIndex.of([alone]).select(kernel)
    assert found
    assert (found.kernels, found.chunks, found.padding) == ((alone,) * streams, (), 0)
    single = LengthIndex.of([alone]).select(alone)
    assert single
    assert found.us == streams * single.us
    # a kernel for all streams at once is preferred
    both = LengthIndex.of([alone, kernel]).select(kernel)
    assert both
    assert both.kernels == (kernel,)


def test_one_token_can_be_cut_in_several_ways() -> None:
    kernel = spec("add", ["(32,1,1,1)/f32", "(32,1,1,1)/f32"], "(32,1,1,1)/f32")
    ways = {cut.axes for cut in cuts("add", kernel.inputs, kernel.output)}
    assert {(1, 1, 1), (1, None, 1), (None, 1, 1)} < ways
    families = {cut.family for cut in cuts("add", kernel.inputs, kernel.output)}
    for other in (ROW, "(32,1,1,1)/f32"):
        many = node("add", [ROW, other], ROW)
        assert one_cut(many).family in families
