"""Copies, conversions, reshapes and transposes are exact for all strides."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, emit, spec, tensor
from reference import dequantize

from kernelgen.ggml.types import GROUPS, TYPES
from kernelgen.hlo import execute

VIEWS = [
    "(4,3,5,2)/f32",
    "(4,3,5,2)/f32/(12,4,48,240)",  # transposed
    "(4,3,5,2)/f32/(4,80,16,240)",  # heads and positions swapped
    "(4,3,5,2)/f32/(4,16,128,640)",  # a slice of planes
    "(4,3,5,1)/f32/(8,48,144,720)",  # every second element
    "(4,3,5,2)/f32/(4,0,16,0)",  # repeated rows
    "(4,3,5,1)/f32/(4,4,4,60)",  # overlapping windows
    "(4,3,5,1)/f32/(4,20,56,280)",  # strides that are not nested
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("op", ["cont", "dup"])
def test_any_view_becomes_dense(op: str, view: str) -> None:
    check(spec(op, [view], f"{view.split('/')[0]}/f32"), 0.0)


@pytest.mark.parametrize("view", VIEWS[:4])
def test_cont_may_change_the_shape(view: str) -> None:
    check(spec("cont", [view], f"(12,5,{view.split('/')[0].strip('()').split(',')[3]},1)/f32"), 0.0)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i32", "i16", "i8"])
def test_reshape_and_transpose(dtype: str) -> None:
    check(spec("reshape", [f"(6,4,1,1)/{dtype}"], f"(3,2,4,1)/{dtype}"), 0.0)
    check(spec("transpose", [f"(6,4,2,1)/{dtype}"], f"(4,6,2,1)/{dtype}"), 0.0)


def test_the_result_may_be_stored_permuted() -> None:
    check(spec("dup", ["(4,3,5,1)/f32/(4,80,16,240)"], "(4,3,5,1)/f32/(4,80,16,240)"), 0.0)


@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("target", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_cpy_converts(source: str, target: str) -> None:
    check(spec("cpy", [f"(64,6,1,1)/{source}", f"(64,6,1,1)/{target}"], f"(64,6,1,1)/{target}"), 0.0)


@pytest.mark.parametrize(
    "source",
    ["f32", pytest.param("f16", marks=pytest.mark.long)],  # F16 has many equal magnitudes, and ties
)
@pytest.mark.parametrize("target", GROUPS["quantizable"])
def test_cpy_quantizes(source: str, target: str) -> None:
    """All bits are ggml's: in a search for a scale, one different decision changes a whole block."""
    check(spec("cpy", [f"(512,60,1,1)/{source}", f"(512,60,1,1)/{target}"], f"(512,60,1,1)/{target}"), 0.0)


@pytest.mark.parametrize("target", GROUPS["quantizable"])
def test_zeros_stay_zeros(target: str) -> None:
    """ggml does not specify the numbers beside a scale of 0, so the decoded elements are compared."""
    dst = tensor(f"(256,1,1,1)/{target}")
    block = TYPES[target]
    old = np.full((1, 1, 1, 256 // block.block, block.size), 255, np.uint8)
    kernel = spec("cpy", ["(256,1,1,1)/f32", str(dst)], str(dst), alias=1)
    (stored,) = execute.run(emit(kernel), [np.zeros((1, 1, 1, 256), np.float32), old])
    np.testing.assert_array_equal(dequantize(stored.reshape(1, 1, 1, -1), dst), 0.0)


@pytest.mark.parametrize("first", [-8.0, 8.0])
def test_the_first_of_two_extremes_scales_q4_0(first: float) -> None:
    """The sums also end in halves: the product is rounded before the sum."""
    values = np.linspace(-8, 8, 32, dtype=np.float32)
    values[0], values[-1] = first, -first
    check(spec("cpy", ["(32,1,1,1)/f32", "(32,1,1,1)/q4_0"], "(32,1,1,1)/q4_0"), 0.0, src0=values)


def test_ties_of_q8_0_go_to_the_even_number() -> None:
    values = np.arange(32, dtype=np.float32) + np.float32(0.5)
    values[0] = 127
    stored = check(spec("cpy", ["(32,1,1,1)/f32", "(32,1,1,1)/q8_0"], "(32,1,1,1)/q8_0"), 0.0, src0=values)
    assert stored.reshape(-1)[3:7].tolist() == [2, 2, 4, 4]


@pytest.mark.parametrize("source", GROUPS["quantized"])
def test_cpy_from_quantized(source: str) -> None:
    check(spec("cpy", [f"(256,3,1,1)/{source}", "(256,3,1,1)/f32"], "(256,3,1,1)/f32"))


@pytest.mark.parametrize("source, target", [("f32", "i32"), ("i32", "f32"), ("i32", "i32")])
def test_cpy_of_integers(source: str, target: str) -> None:
    check(spec("cpy", [f"(7,6,1,1)/{source}", f"(7,6,1,1)/{target}"], f"(7,6,1,1)/{target}"), 0.0)


@pytest.mark.parametrize("view", VIEWS[:5])
def test_cpy_into_a_view_leaves_the_rest(view: str) -> None:
    ne = view.split("/")[0]
    check(spec("cpy", [f"{ne}/f16", view], f"{ne}/f32"), 0.0)


def test_cpy_may_change_the_shape() -> None:
    check(spec("cpy", ["(12,5,2,1)/f32", "(4,3,5,2)/f16/(2,40,8,120)"], "(4,3,5,2)/f16"), 0.0)
