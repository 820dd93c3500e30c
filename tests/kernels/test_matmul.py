"""Matrix products: types, broadcasting, views, quantized weights."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, emit, nmse, random_values, spec
from reference import DTYPES, dequantize

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import GROUPS
from kernelgen.ggml.weight_layouts import pack_f8_tiles
from kernelgen.hlo import proto
from kernelgen.hlo.lint import lint
from kernelgen.targets import TARGETS

JAX = ("jax",)
"""For tests that compare bits: NKI does not support every layout, and JAX sums in another order."""


@pytest.mark.parametrize("weights", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("activations", ["f32", "f16", "bf16"])
def test_types(weights: str, activations: str) -> None:
    check(spec("mul_mat", [f"(40,7,1,1)/{weights}", f"(40,5,1,1)/{activations}"], "(7,5,1,1)/f32"), 1e-6)


@pytest.mark.parametrize("weights", ["f16", "bf16"])
def test_activations_are_rounded_to_the_weights_type(weights: str) -> None:
    """1 + 2^-12 is neither an f16 nor a bf16: the CPU multiplies by 1."""
    values = np.full((1, 1, 1, 4), 1 + 2.0**-12)
    kernel = spec("mul_mat", [f"(4,1,1,1)/{weights}", "(4,1,1,1)/f32"], "(1,1,1,1)/f32")
    assert check(kernel, 0.0, src0=np.ones((1, 1, 1, 4)), src1=values).item() == 4.0


@pytest.mark.parametrize(
    "a, b, out",
    [
        ("(16,6,1,1)", "(16,4,3,2)", "(6,4,3,2)"),
        ("(16,6,2,1)", "(16,4,6,1)", "(6,4,6,1)"),  # grouped heads: matrix i of b is multiplied with matrix i / 3 of a
        ("(16,6,2,3)", "(16,1,4,6)", "(6,1,4,6)"),
        ("(1,1,1,1)", "(1,1,1,1)", "(1,1,1,1)"),
        ("(3,129,1,1)", "(3,1,1,1)", "(129,1,1,1)"),
    ],
)
def test_broadcasting(a: str, b: str, out: str) -> None:
    check(spec("mul_mat", [f"{a}/f16", f"{b}/f32"], f"{out}/f32"), 1e-6)


def test_attention_scores_of_permuted_views() -> None:
    """K and Q are [head size, positions, heads] views of [head size, heads, positions]."""
    k, q = "(16,12,2,1)/f16/(2,64,32,768)", "(16,5,8,1)/f32/(4,512,64,2560)"
    check(spec("mul_mat", [k, q], "(12,5,8,1)/f32", prec=10), 1e-6)


def test_values_from_a_part_of_a_longer_cache() -> None:
    """The transposed V cache: 12 positions of 32 are read, so rows have gaps and the storage ends inside a row."""
    check(spec("mul_mat", ["(12,16,2,1)/f16/(2,64,1024,2048)", "(12,5,4,1)/f32"], "(16,5,4,1)/f32"), 1e-6)


@pytest.mark.parametrize("dtype", GROUPS["quantized"])
@pytest.mark.parametrize("batch", ["1,1", "2,1"])
def test_quantized_weights(dtype: str, batch: str) -> None:
    check(spec("mul_mat", [f"(512,6,{batch})/{dtype}", "(512,3,4,1)/f32"], "(6,3,4,1)/f32"), 1e-6)


@pytest.mark.parametrize("dtype", GROUPS["quantized"])
def test_quantized_weights_as_planes(dtype: str) -> None:
    """The planes hold the same numbers, so all bits of the result are equal."""
    kernels = [f"(512,6,2,1)/{t}" for t in (dtype, f"{dtype}:planes")]
    plain, planes = (
        check(spec("mul_mat", [w, "(512,3,4,1)/f32"], "(6,3,4,1)/f32"), 1e-6, languages=JAX) for w in kernels
    )
    np.testing.assert_array_equal(plain, planes)


@pytest.mark.parametrize("dtype", GROUPS["quantized"])
def test_quantized_weights_as_bf16(dtype: str) -> None:
    """The result has the bits of a product by a bf16 weight with the same elements; the limit covers the rounding of
    the elements.
    """
    t = TensorDesc.make((512, 6, 2, 1), dtype)
    values = random_values(t, np.random.default_rng(1))
    rounded = dequantize(values, t).astype(DTYPES["bf16"])
    x = np.random.default_rng(2).normal(size=(1, 4, 3, 512))
    kernels = [
        spec("mul_mat", [f"(512,6,2,1)/{w}", "(512,3,4,1)/f32"], "(6,3,4,1)/f32") for w in (f"{dtype}:bf16", "bf16")
    ]
    results = [
        check(k, 2e-5, languages=JAX, src0=src0, src1=x) for k, src0 in zip(kernels, (values, rounded), strict=True)
    ]
    np.testing.assert_array_equal(*results)


F8 = "f8_e4m3_128x128"


@pytest.mark.parametrize("dtype", [*GROUPS["quantized"], "f16", "bf16"])
def test_weights_in_tiles_of_8_bits(dtype: str) -> None:
    """Two matrices of two tiles of rows and four of columns; the result is near the product by the original weight."""
    kernels = [
        spec("mul_mat", [f"(512,130,2,1)/{w}", "(512,3,4,1)/f32"], "(130,3,4,1)/f32") for w in (f"{dtype}:{F8}", dtype)
    ]
    tiles, plain = (check(kernel, 1e-6) for kernel in kernels)
    assert 0 < nmse(tiles, plain) < 2e-3


@pytest.mark.parametrize(
    "k, m, n, spread",
    [
        (576, 200, 1, 5),  # tiles are cut on both sides
        (32, 5, 7, 1),  # less than one tile
        (512, 200, 32, 4),  # the most rows for which products are scaled
        (512, 200, 33, 1),  # the fewest rows for which codes are scaled
    ],
)
def test_tiles_of_any_size(k: int, m: int, n: int, spread: int) -> None:
    kernel = spec("mul_mat", [f"({k},{m},1,1)/f16:{F8}", f"({k},{n},1,1)/f32"], f"({m},{n},1,1)/f32")
    check(kernel, 1e-5)
    hlo = emit(kernel, JAX)
    dots = [i for c in proto.parse(hlo).computations for i in c.instructions if i.opcode == "dot"]
    assert [np.prod(i.shape.dimensions) for i in dots] == [spread * m * n]
    for target in TARGETS.values():
        assert lint(hlo, target) == []


@pytest.mark.parametrize(("prec_src1", "factor"), [(0, "bf16"), (10, "f32")])
def test_codes_of_tiles_are_multiplied_and_scaled_afterwards(prec_src1: int, factor: str) -> None:
    """None of the three scales is rounded to bfloat16, and one is 0."""
    weights = np.random.default_rng(1).normal(size=(1, 1, 256, 256)).astype(np.float32)
    weights[..., :128, :128] *= np.float32(2.0**-9)
    weights[..., 128:, 128:] = 0
    kernel = spec("mul_mat", [f"(256,256,1,1)/f16:{F8}", "(256,3,1,1)/f32"], "(256,3,1,1)/f32", prec_src1=prec_src1)
    check(kernel, 1e-12, src0=weights.astype(np.float16))
    assert factors(emit(kernel)) == {factor}


@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_a_tile_that_is_not_finite_has_no_scale(broken: float) -> None:
    values = np.ones((1, 1, 130, 130), np.float32)
    values[0, 0, 129, 3] = broken
    stored = pack_f8_tiles(values)
    scales = stored[256 * 130 :].view(np.float32)
    assert np.isnan(scales[1]) and np.all(scales[[0, 2, 3]] == np.float32(1) / np.float32(240))
    codes = stored[: 256 * 130].reshape(256, 130)
    assert not codes[:128, 128:].any() and codes[:128, :128].all() and not codes[130:].any()


@pytest.mark.parametrize("language", ["jax", "nki"])
@pytest.mark.parametrize(("prec_src1", "factor"), [(0, "bf16"), (10, "f32")])
def test_products_of_quantized_weights_are_of_bfloat16_unless_float32_is_requested(
    prec_src1: int, factor: str, language: str
) -> None:
    kernel = spec("mul_mat", ["(64,6,1,1)/q8_0", "(64,3,1,1)/f32"], "(6,3,1,1)/f32", prec_src1=prec_src1)
    check(kernel, 1e-12, languages=(language,))
    assert factors(emit(kernel, (language,))) == {factor}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_transposed_weights(dtype: str) -> None:
    check(spec("mul_mat", [f"(40,7,2,1)/{dtype}:transposed", "(40,5,4,1)/f32"], "(7,5,4,1)/f32"), 1e-6)


def test_quantized_weights_with_longer_rows() -> None:
    check(spec("mul_mat", ["(64,6,1,1)/q8_0/(34,102,612,612)", "(64,3,1,1)/f32"], "(6,3,1,1)/f32"), 1e-6)


@pytest.mark.parametrize(
    "a, b, out",
    [
        ("(16,6,1,1)", "(4,6,3,2)", "(16,4,3,2)"),
        ("(16,6,2,1)", "(4,6,6,1)", "(16,4,6,1)"),  # matrix i of b is multiplied with matrix i / 3 of a
        ("(7,1,1,1)", "(3,1,1,1)", "(7,3,1,1)"),
    ],
)
def test_out_prod(a: str, b: str, out: str) -> None:
    check(spec("out_prod", [f"{a}/f32", f"{b}/f32"], f"{out}/f32"))


def test_out_prod_of_a_transposed_matrix() -> None:
    check(spec("out_prod", ["(16,6,1,1)/f32", "(4,6,1,1)/f32/(24,4,96,96)"], "(16,4,1,1)/f32"))


def factors(hlo: bytes) -> set[str]:
    """Returns the element types of the factors."""
    made = {i.id: i for c in proto.parse(hlo).computations for i in c.instructions}
    return {
        proto.ELEMENT_TYPES[made[operand].shape.element_type]
        for i in made.values()
        if i.opcode == "dot"
        for operand in i.operand_ids
    }


def experts(n: int, *shape: int) -> np.ndarray:
    """Returns lists of distinct experts; the first experts are more frequent."""
    rng = np.random.default_rng(3)
    weights = 1 / np.arange(1, n + 1) ** 2
    lists = [rng.choice(n, shape[-1], False, weights / weights.sum()) for _ in range(int(np.prod(shape[:-1])))]
    return np.stack(lists).reshape(1, 1, *shape)


@pytest.mark.parametrize("per_token", [1, 4])  # rows of b for each token: one for all experts, or one for each
@pytest.mark.parametrize(
    "n_experts, used, tokens",
    [
        (8, 4, 1),  # fewer rows than experts
        (8, 4, 2),
        (8, 4, 3),  # blocks of two rows
        (5, 4, 70),
        (4, 4, 129),  # every expert for every token
        (64, 4, 40),
    ],
)
def test_mul_mat_id(n_experts: int, used: int, tokens: int, per_token: int) -> None:
    inputs = [f"(32,7,{n_experts},1)/f32", f"(32,{per_token},{tokens},1)/f32", f"({used},{tokens},1,1)/i32"]
    check(spec("mul_mat_id", inputs, f"(7,{used},{tokens},1)/f32"), src2=experts(n_experts, tokens, used))


@pytest.mark.parametrize("tokens", [2, 70])
@pytest.mark.parametrize(
    "dtype, layout, limit",
    [
        ("q8_0", "planes", 0.0),
        ("q4_K", "planes", 0.0),
        ("f16", "transposed", 1e-10),
        ("q4_K", "bf16", 2e-5),
        ("q4_K", F8, 2e-3),
    ],
)
def test_mul_mat_id_of_weights_in_layouts(dtype: str, layout: str, limit: float, tokens: int) -> None:
    chosen = experts(8, tokens, 4)
    results = []
    for weights in (dtype, f"{dtype}:{layout}"):
        inputs = [f"(256,7,8,1)/{weights}", f"(256,1,{tokens},1)/f32", f"(4,{tokens},1,1)/i32"]
        kernel = spec("mul_mat_id", inputs, f"(7,4,{tokens},1)/f32")
        results.append(check(kernel, 2e-5, src2=chosen, languages=JAX))
    assert nmse(*results) <= limit


@pytest.mark.parametrize("n_experts", [1, 2])
def test_mul_mat_id_with_one_expert_for_all(n_experts: int) -> None:
    """More rows than a block, and an expert that no token selects."""
    inputs = [f"(8,3,{n_experts},1)/f16", "(8,1,300,1)/f32", "(1,300,1,1)/i32"]
    check(spec("mul_mat_id", inputs, "(3,1,300,1)/f32"), 1e-6, src2=np.full((1, 1, 300, 1), n_experts - 1))


def test_mul_mat_id_by_a_part_of_the_sorted_experts() -> None:
    """The first two of eight sorted experts, and weights that have more rows than are used."""
    inputs = ["(256,6,8,1)/q4_K/(144,144,1152,9216)", "(256,2,5,1)/f32", "(2,5,1,1)/i32/(4,32,160,160)"]
    check(spec("mul_mat_id", inputs, "(6,2,5,1)/f32"), src2=experts(8, 5, 2))


def test_mul_mat_id_shares_rows_over_several_experts() -> None:
    inputs = ["(8,3,6,1)/f32", "(8,2,3,1)/f32", "(4,3,1,1)/i32"]
    check(spec("mul_mat_id", inputs, "(3,4,3,1)/f32"), src2=experts(6, 3, 4))


@pytest.mark.parametrize("used, rows", [(6, 1), (6, 2), (6, 3), (6, 6), (4, 4), (12, 6)])
def test_no_integer_is_divided_as_the_compiler_can_not(used: int, rows: int) -> None:
    """neuronx-cc divides integers with a float32 reciprocal, which is exact only for powers of two and for smaller
    dividends.
    """
    inputs = ["(40,7,16,1)/f16", f"(40,{rows},9,1)/f32", f"({used},9,1,1)/i32"]
    kernel = spec("mul_mat_id", inputs, f"(7,{used},9,1)/f32")
    check(kernel, 1e-6, src2=experts(16, 9, used))
    assert lint(emit(kernel), TARGETS["trn1"]) == []
