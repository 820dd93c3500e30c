"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import check, emit, spec

from kernelgen.errors import KernelgenError


def positions(n: int, largest: int = 4000, components: int = 1) -> np.ndarray:
    return np.random.default_rng(5).integers(0, largest, n * components).astype(np.int32)


def kernel(
    n_tokens: int = 6,
    dtype: str = "f32",
    factors: int = 0,
    components: int = 1,
    ne0: int = 64,
    op: str = "rope",
    **params: Any,
) -> Any:
    shape = f"({ne0},3,{n_tokens},1)/{dtype}"
    inputs = [shape, f"({n_tokens * components},1,1,1)/i32", *([f"({factors},1,1,1)/f32"] if factors else [])]
    return spec(op, inputs, shape, **{"n_dims": ne0, **params})


@pytest.mark.parametrize("mode", [0, 2])
@pytest.mark.parametrize("n_dims, n_offs", [(64, 0), (32, 0), (32, 16), (24, 40)])
def test_modes_rotate_a_part_of_the_channels(mode: int, n_dims: int, n_offs: int) -> None:
    check(kernel(mode=mode, n_dims=n_dims, n_offs=n_offs), src1=positions(6))


@pytest.mark.parametrize("mode", [0, 2])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_bases_and_one_token(mode: int, base: float) -> None:
    check(kernel(n_tokens=1, ne0=128, mode=mode, freq_base=base), src1=np.int32([4095]))


def test_angles_accumulate_rounding_as_ggml_does() -> None:
    """The CPU multiplies from pair to pair in float32; exact powers of the base differ by 1.6e-11 here."""
    check(kernel(n_tokens=1, ne0=128, freq_base=500000.0), 1e-12, src1=np.int32([512]))


@pytest.mark.parametrize("mode", [0, 2])
def test_frequency_factors(mode: int) -> None:
    factors = np.random.default_rng(6).uniform(0.5, 8, 40)
    check(kernel(mode=mode, factors=40), src1=positions(6), src2=factors)


@pytest.mark.parametrize("mode", [0, 2, 8])
@pytest.mark.parametrize("factors", [0, 32])
@pytest.mark.parametrize("context", [0, 512])
def test_yarn(mode: int, factors: int, context: int) -> None:
    yarn = {"ext_factor": 0.8, "freq_scale": 0.25, "attn_factor": 1.3, "n_ctx_orig": context, "beta_fast": 24.0}
    multi = {"section0": 8, "section1": 12, "section2": 12} if mode == 8 else {}
    values = {"src2": np.random.default_rng(6).uniform(0.5, 8, factors)} if factors else {}
    components = 4 if multi else 1
    check(
        kernel(mode=mode, factors=factors, components=components, **yarn, **multi),
        src1=positions(6, components=components),
        **values,
    )


def test_linear_scaling() -> None:
    check(kernel(freq_scale=0.5), src1=positions(6))


def test_f16() -> None:
    check(kernel(dtype="f16"), 1e-6, src1=positions(6))


def test_heads_inside_longer_rows_and_batches() -> None:
    """Q, K and V are parts of one projection: heads of 16 in rows of 160."""
    tensor = "(16,3,4,2)/f32/(4,64,640,2560)"
    check(spec("rope", [tensor, "(4,1,1,1)/i32"], "(16,3,4,2)/f32", n_dims=16, mode=2), src1=positions(4))


@pytest.mark.parametrize("mode, n_dims", [(8, 64), (8, 48), (40, 64), (40, 48), (24, 32)])
@pytest.mark.parametrize("sections", [(8, 12, 12, 0), (4, 4, 4, 4), (11, 11, 10, 0)])
def test_positions_of_several_components(mode: int, n_dims: int, sections: tuple[int, ...]) -> None:
    named = {f"section{i}": n for i, n in enumerate(sections)}
    check(kernel(mode=mode, n_dims=n_dims, components=4, **named), src1=positions(6, 300, 4))


@pytest.mark.parametrize("mode, n_dims", [(0, 64), (2, 48), (8, 64), (40, 48), (24, 32)])
def test_back(mode: int, n_dims: int) -> None:
    components = 1 if mode < 8 else 4
    named = {} if mode < 8 else {"section0": 11, "section1": 11, "section2": 10}
    kernels = [
        kernel(op=op, mode=mode, n_dims=n_dims, components=components, attn_factor=1.0, **named)
        for op in ("rope", "rope_back")
    ]
    pos = positions(6, 300, components)
    x = np.random.default_rng(7).normal(size=(1, 6, 3, 64)).astype(np.float32)
    there = check(kernels[0], src0=x, src1=pos)
    np.testing.assert_allclose(check(kernels[1], src0=there, src1=pos), x, atol=1e-5)


def test_back_with_yarn_and_factors() -> None:
    yarn = {"ext_factor": 0.8, "freq_scale": 0.25, "attn_factor": 1.3, "n_ctx_orig": 512}
    factors = np.random.default_rng(6).uniform(0.5, 8, 32)
    check(kernel(op="rope_back", factors=32, **yarn), src1=positions(6), src2=factors)


def test_in_place_inside_longer_rows() -> None:
    tensor = "(16,3,4,2)/f32/(4,64,640,2560)"
    kernel = spec("rope", [tensor, "(4,1,1,1)/i32"], tensor, alias=0, n_dims=8, mode=2, n_offs=4)
    check(kernel, src1=positions(4))


@pytest.mark.parametrize(
    "params, message",
    [
        ({"mode": 1}, "rope has no mode 1; 0, 2, 8, 24 and 40 are known"),
        ({"n_dims": 65}, "65 channels from 0 can't be rotated in rows of 64"),
        ({"n_offs": 2}, "64 channels from 2 can't be rotated in rows of 64"),
        ({"mode": 8, "section0": 4}, "6 positions for 6 tokens in mode 8"),
        ({"mode": 8, "components": 4}, "do not share out 32 pairs"),
        ({"mode": 24, "components": 4, "section0": 4}, "in vision mode n_dims is half of the row, 32, not 64"),
    ],
)
def test_what_it_does_not_compute_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelgenError, match=message):
        emit(kernel(**params))
