"""Binary ops with broadcasting, unary ops, gated linear units."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, spec

BINARY = ("add", "sub", "mul", "div")
UNARY = (
    *("abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish"),
    *("hardsigmoid", "exp", "expm1", "softplus", "gelu_erf", "floor", "ceil", "round", "trunc", "sqr", "sin", "cos"),
)
GLU = ("reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick")
LIMITED = {"swiglu_oai": {"alpha": 1.702, "limit": 0.7}, "swiglu_clamp": {"limit": 0.7}}


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize(
    "a, b",
    [
        ("(5,3,2,2)", "(5,3,2,2)"),
        ("(7,4,1,1)", "(7,1,1,1)"),
        ("(6,4,2,3)", "(3,2,2,1)"),  # every axis except one repeats; one of them has more than one element
        ("(6,4,6,2)", "(1,4,3,1)"),
    ],
)
def test_binary_repeats_the_second_operand(op: str, a: str, b: str) -> None:
    check(spec(op, [f"{a}/f32", f"{b}/f32"], f"{a}/f32"))


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("types", ["f16 f16 f16", "f16 f32 f16", "f32 f16 f32", "bf16 bf16 bf16", "bf16 f32 bf16"])
def test_binary_rounds_to_the_results_type(op: str, types: str) -> None:
    a, b, out = types.split()
    check(spec(op, [f"(9,5,1,1)/{a}", f"(9,1,1,1)/{b}"], f"(9,5,1,1)/{out}"), 1e-6)


@pytest.mark.parametrize("op", ["add", "mul"])
def test_binary_takes_views(op: str) -> None:
    # The first operand is permuted, the second a slice of longer rows.
    check(spec(op, ["(4,3,5,1)/f32/(4,80,16,240)", "(4,3,1,1)/f32/(4,28,84,84)"], "(4,3,5,1)/f32"))


def test_binary_may_write_over_its_first_operand() -> None:
    check(spec("add", ["(8,3,1,1)/f32", "(8,1,1,1)/f32"], "(8,3,1,1)/f32", alias=0))


@pytest.mark.parametrize("types", ["f32 f32", "f16 f32", "f16 f16", "bf16 bf16"])
@pytest.mark.parametrize("strides", ["", "/({0},{1},{2},{3})"])
def test_add1_adds_one_number(types: str, strides: str) -> None:
    a, b = types.split()
    unit = 4 if a == "f32" else 2
    a = f"(7,3,5,2)/{a}" + strides.format(unit, unit * 9, unit * 27, unit * 135)
    check(spec("add1", [a, f"(1,1,1,1)/{b}"], "(7,3,5,2)/" + types.split()[0]), 1e-6)


@pytest.mark.parametrize("ids", ["(2,6,1,1)/i32", "(2,6,1,1)/i32/(4,16,96,96)"])
@pytest.mark.parametrize("rows", ["(33,4,1,1)/f32", "(33,4,1,1)/f32/(4,160,640,640)"])
def test_add_id_adds_the_row_of_each_id(ids: str, rows: str) -> None:
    chosen = np.random.default_rng(3).integers(0, 4, 12)
    check(spec("add_id", ["(33,2,6,1)/f32", rows, ids], "(33,2,6,1)/f32"), src2=chosen)


@pytest.mark.parametrize("tensor", ["(31,3,2,1)/f32", "(31,3,2,1)/f16", "(4,3,5,1)/f32/(4,20,60,300)"])
@pytest.mark.parametrize("alias", [None, 0])
def test_leaky_relu(tensor: str, alias: int | None) -> None:
    ne, dtype = tensor.split("/")[:2]
    output = tensor if alias == 0 else f"{ne}/{dtype}"
    check(spec("leaky_relu", [tensor], output, alias=alias, negative_slope=0.1), 1e-6)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("eps", [1e-7, -1e-6])
def test_xielu(dtype: str, eps: float) -> None:
    values = np.random.default_rng(1).uniform(-3, 3, (1, 2, 3, 67))
    values[0, 0, 0, :4] = [0.0, -0.0, eps, eps / 2]
    kernel = spec("xielu", [f"(67,3,2,1)/{dtype}"], f"(67,3,2,1)/{dtype}", alpha_n=4.5, alpha_p=20.0, beta=0.5, eps=eps)
    check(kernel, 1e-7 if dtype == "f32" else 1e-5, src0=values)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("op", UNARY)
def test_unary(op: str, dtype: str) -> None:
    kernel = spec(op, [f"(67,3,2,1)/{dtype}"], f"(67,3,2,1)/{dtype}")
    values = np.random.default_rng(1).uniform(-12, 12, (1, 2, 3, 67))
    values[0, 0, 0, :9] = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 10.0, -10.0]
    check(kernel, 1e-7 if dtype == "f32" else 1e-6, src0=values)


@pytest.mark.parametrize("op", ["sqrt", "log"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_unary_of_positive_numbers(op: str, dtype: str) -> None:
    values = np.random.default_rng(1).uniform(0.01, 50, (1, 1, 3, 33))
    check(spec(op, [f"(33,3,1,1)/{dtype}"], f"(33,3,1,1)/{dtype}"), 1e-6, src0=values)


def test_gelu_reads_the_f16_table() -> None:
    """Between two f16 numbers gelu is a step function, on the CPU and here."""
    values = np.linspace(1.0, 1.0 + 2.0**-10, 9, dtype=np.float32)
    y = check(spec("gelu", ["(9,1,1,1)/f32"], "(9,1,1,1)/f32"), 0.0, src0=values)
    assert len(np.unique(y)) == 2
    y = check(spec("gelu", ["(4,1,1,1)/f32"], "(4,1,1,1)/f32"), 0.0, src0=np.float32([-10, -11, 10, 12.34567]))
    np.testing.assert_array_equal(y.reshape(-1), np.float32([0, 0, 10, 12.34567]))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("op", GLU)
def test_glu_of_two_inputs(op: str, dtype: str) -> None:
    check(spec(op, [f"(33,5,2,1)/{dtype}"] * 2, f"(33,5,2,1)/{dtype}"), 1e-6 if dtype != "f32" else 1e-7)


@pytest.mark.parametrize("length", [34, 35])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("op", [*GLU, *LIMITED])
def test_glu_of_halves(op: str, swapped: bool, length: int) -> None:
    check(spec(op, [f"({length},5,2,1)/f32"], "(17,5,2,1)/f32", swapped=swapped, **LIMITED.get(op, {})))


@pytest.mark.parametrize("op, dtype", [("swiglu_oai", "f32"), ("swiglu_clamp", "f32"), ("swiglu_clamp", "f16")])
def test_glu_within_limits(op: str, dtype: str) -> None:
    values = np.random.default_rng(1).uniform(-150, 150, (1, 2, 5, 33))
    kernel = spec(op, [f"(33,5,2,1)/{dtype}"] * 2, f"(33,5,2,1)/{dtype}", **LIMITED[op])
    check(kernel, 1e-7 if dtype == "f32" else 1e-6, src0=values, src1=-values)


def test_glu_of_views_into_one_tensor() -> None:
    """Gate and value may be the two halves of one projection's rows."""
    half = "(16,4,1,1)/f32/(4,128,512,512)"
    check(spec("swiglu", [half, half], "(16,4,1,1)/f32"))


@pytest.mark.parametrize("s, b", [(0.25, 0.0), (-3.0, 1.5)])
def test_scale(s: float, b: float) -> None:
    check(spec("scale", ["(31,3,1,1)/f32"], "(31,3,1,1)/f32", s=s, b=b))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_clamp(dtype: str) -> None:
    check(spec("clamp", [f"(31,3,1,1)/{dtype}"], f"(31,3,1,1)/{dtype}", min=-0.5, max=0.75), 0.0)


def test_clamp_to_infinity_changes_nothing() -> None:
    check(spec("clamp", ["(31,3,1,1)/f32"], "(31,3,1,1)/f32", min=float("-inf"), max=float("inf")), 0.0)


@pytest.mark.parametrize("types", ["f32 f32", "f16 f16"])
@pytest.mark.parametrize("numbers", [{"s": 0.3}, {"s": -2.5, "b": 0.75}, {"s": 0.0, "b": 1.0}])
def test_scale_for_any_numbers_is_given_them(types: str, numbers: dict[str, float]) -> None:
    x, out = types.split()
    kernel = spec("scale", [f"(7,5,2,1)/{x}"], f"(7,5,2,1)/{out}", **numbers)
    check(kernel, 1e-6 if x == "f16" else 1e-12, opened=True)  # the CPU multiplies and adds in one step
