"""Gradients, losses and the optimizer's steps."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, emit, spec
from reference import distribution

from kernelgen.neff.container import tensors_of

PADDED = "(16,4,3,1)/f32/(4,80,320,960)"
"""Rows with gaps between them."""


@pytest.mark.parametrize("tensor", ["(31,3,2,1)/f32", "(31,3,2,1)/f16", PADDED])
def test_silu_back(tensor: str) -> None:
    ne, dtype = tensor.split("/")[:2]
    values = np.random.default_rng(1).uniform(-30, 30, [int(n) for n in ne[1:-1].split(",")][::-1])
    check(spec("silu_back", [tensor, tensor], f"{ne}/{dtype}"), 1e-7 if dtype == "f32" else 1e-6, src1=values)


# For rows of one element a small eps would compare rounding errors: the gradient of x / |x| is 0.
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
    # The logits spread as far as those of a confident model.
    logits, labels = rng.uniform(-100, 100, ne[::-1]), distribution(rng, ne[::-1])
    check(spec("cross_entropy_loss", [tensor, tensor], "(1,1,1,1)/f32"), src0=logits, src1=labels)
    kernel = spec("cross_entropy_loss_back", ["(1,1,1,1)/f32", tensor, tensor], tensor)
    check(kernel, src1=logits, src2=labels)


@pytest.mark.parametrize("tensor", ["(31,3,2,1)/f32", PADDED])
def test_the_step_of_gradient_descent(tensor: str) -> None:
    check(spec("opt_step_sgd", [tensor, tensor, "(2,1,1,1)/f32"], tensor), src2=np.array([0.01, 0.1]))


@pytest.mark.parametrize("tensor", ["(31,3,2,1)/f32", PADDED])
def test_the_step_of_adamw_changes_weights_and_momenta(tensor: str) -> None:
    kernel = spec("opt_step_adamw", [tensor] * 4 + ["(7,1,1,1)/f32"], tensor)
    assert kernel.alias == 0 and kernel.updates == (2, 3)
    shape = kernel.output.shape
    v = np.random.default_rng(1).uniform(0, 1, shape)
    check(kernel, src3=v, src4=np.array([0.01, 0.9, 0.999, 1e-8, 0.1, 1.5, 2.0]))
    neff = {t.name: t.alias for t in tensors_of(emit(kernel))}
    assert neff == {
        "input0.must_alias_input": None,
        "input1": None,
        "input2.must_alias_input": None,
        "input3.must_alias_input": None,
        "input4": None,
        "output0": "input0.must_alias_input",
        "input2.updated": "input2.must_alias_input",
        "input3.updated": "input3.must_alias_input",
    }
