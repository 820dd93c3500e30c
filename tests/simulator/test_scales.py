"""Reads of the scales of quantized weights: rewritten for XLA on the CPU, with the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelgen import lowering
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import execute, proto
from kernelgen.lowering.op import traced_hlo
from kernelgen.simulator import products, scales
from kernelgen.spec.op_kernel import KernelSpec

Array = Any


def product(weights: str) -> bytes:
    """Returns the HLO of a product of 256 × 64 quantized weights and one row."""
    inputs = [TensorDesc.parse(f"(256,64,1,1)/{weights}"), TensorDesc.parse("(256,1,1,1)/f32")]
    spec = KernelSpec.make("mul_mat", inputs, TensorDesc.parse("(64,1,1,1)/f32"))
    return lowering.emit(spec, load_function(*Catalog([builtin_library()]).find("mul_mat")))


def opcodes(module: bytes) -> list[str]:
    return [i.opcode for i in proto.entry(proto.parse(module)).instructions]


@pytest.mark.parametrize("weights", ["q8_0", "q5_1", "q4_K"])
def test_scales_are_rewritten_and_give_the_same(weights: str) -> None:
    emitted = product(weights)
    rewritten = scales.rewrite(emitted)
    assert "reduce" in opcodes(emitted)
    assert "reduce" not in opcodes(rewritten)
    # Scales of a few bits are computed once: as a product, because XLA computes a product's operands once.
    assert opcodes(rewritten).count("dot") == (3 if weights == "q4_K" else 1)
    random = np.random.default_rng(1)
    arrays = [
        random.integers(0, 60, shape, dtype=np.uint8)
        if dtype == "uint8"
        else random.standard_normal(shape).astype(dtype)
        for _, dtype, shape in execute.parameters(emitted)
    ]
    (expected,) = execute.run(emitted, arrays)
    assert np.square(expected).sum() > 0
    for module in (rewritten, products.rewrite(rewritten)):
        (actual,) = execute.run(module, arrays)
        assert np.square(actual - expected).sum() <= 1e-10 * np.square(expected).sum()


@pytest.mark.parametrize("operation", ["add", "bitwise_or", "max"])
def test_a_short_sum_of_whole_numbers_keeps_its_start(operation: str) -> None:
    """The numbers wrap around, and the start value counts once."""
    from jax import lax

    def reduced(x: Array) -> Array:
        return lax.reduce(x, np.uint16(5), lambda a, b: getattr(lax, operation)(a, b), (1,))

    module, _ = traced_hlo(reduced, [((3, 4), "uint16")])
    rewritten = scales.rewrite(module)
    assert "reduce" not in opcodes(rewritten)
    numbers = np.random.default_rng(1).integers(0, 1 << 16, (3, 4)).astype(np.uint16)
    (expected,), (actual,) = execute.run(module, [numbers]), execute.run(rewritten, [numbers])
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize(
    ("shape", "dtype", "axis"),
    [((3, scales.MAX_TERMS + 1), "uint16", 1), ((2, 3), "uint16", 0), ((3, 2), "float32", 1)],
    ids=["a long axis", "another axis", "floats"],
)
def test_other_sums_stay_as_they_are(shape: tuple[int, ...], dtype: str, axis: int) -> None:
    def reduced(x: Array) -> Array:
        from jax import lax

        return lax.reduce(x, x.dtype.type(0), lax.add, (axis,))

    module, _ = traced_hlo(reduced, [(shape, dtype)])
    assert "reduce" in opcodes(module)
    assert scales.rewrite(module) == module
