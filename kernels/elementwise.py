"""Ops on each element: binary ops with GGML's broadcasting, unary ops, gated linear units.

All are computed in float32 and rounded to the result's type, as ggml's CPU backend does.
"""

import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter

from .common import f32, number, repeat, result

_SQRT_2_OVER_PI = np.float32(0.79788456080286535588)
_SQRT_1_2 = np.float32(0.70710678118654752440)
_ONE, _ZERO, _HALF = np.float32(1), np.float32(0), np.float32(0.5)


@emitter("add", "sub", "mul", "div", "add1", types="float, f32 same")
def binary(a, b, *, op, out):
    """`a op b`, `b` repeated to the shape of `a`; add1's `b` is one number.

    a: [ne3, ne2, ne1, ne0]; b: each axis divides the axis of a; both f32, f16 or bf16 in any mixture.
    """
    b = repeat(f32(b), a.shape)
    function = {"add": lax.add, "add1": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div}[op]
    return result(function(f32(a), b), out)


@emitter("add_id", types="f32, f32, i32")
def add_id(a, b, ids, *, out):
    """`a` plus, in each row, the row of `b` that `ids` names: the biases of the chosen experts.

    a: [ne3, n_tokens, n_used, ne0]; b: [1, 1, n_experts, ne0]; ids: [1, 1, n_tokens, n_used] i32, each below n_experts.
    """
    rows = lax.gather(
        b[0, 0],
        ids[0, 0, :, :, None],
        lax.GatherDimensionNumbers((2,), (0,), (0,)),
        (1, b.shape[3]),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return result(a + lax.broadcast_in_dim(rows, a.shape, (1, 2, 3)), out)


@emitter("scale", types="float")
def scale(x, *, s: float, b: float = 0.0, out):
    """`s * x + b`; `s` and `b` may be run-time inputs."""
    y = f32(x) * number(s)
    return result(y if isinstance(b, int | float) and b == 0 else y + number(b), out)


@emitter("clamp", types="float")
def clamp(x, *, min: float, max: float, out):
    """The nearest number to `x` in [min, max]."""
    return result(lax.max(lax.min(f32(x), np.float32(max)), np.float32(min)), out)


@emitter("sqr", "sqrt", "log", "sin", "cos", types="float")
def math_unary(x, *, op, out):
    """A function of each element."""
    x = f32(x)
    return result(
        x * x if op == "sqr" else {"sqrt": lax.sqrt, "log": lax.log, "sin": lax.sin, "cos": lax.cos}[op](x), out
    )


@emitter("leaky_relu", types="f32 f16")
def leaky_relu(x, *, negative_slope: float, out):
    """`x` where it is positive, else `negative_slope * x`."""
    x = f32(x)
    return result(lax.max(x, _ZERO) + np.float32(negative_slope) * lax.min(x, _ZERO), out)


@emitter("xielu", types="float")
def xielu(x, *, alpha_n: float, alpha_p: float, beta: float, eps: float, out):
    """`alpha_p * x^2 + beta * x` where `x` is positive, else `alpha_n * (expm1(min(x, eps)) - x) + beta * x`.

    The parameters are the ones that ggml stores: `ggml_xielu` stores `beta + softplus(alpha_n)` and `softplus(alpha_p)`.
    """
    x = f32(x)
    alpha_n, alpha_p, beta, eps = map(np.float32, (alpha_n, alpha_p, beta, eps))
    positive = alpha_p * x * x + beta * x
    negative = (lax.expm1(lax.min(x, eps)) - x) * alpha_n + beta * x
    return result(lax.select(x > 0, positive, negative), out)


def _expm1(x: Array) -> Array:
    return lax.exp(x) - _ONE


def _sigmoid(x: Array) -> Array:
    return _ONE / (_ONE + lax.exp(-x))


def _hardsigmoid(x: Array) -> Array:
    return lax.min(_ONE, lax.max(_ZERO, (x + np.float32(3)) / np.float32(6)))


def _gelu(x: Array) -> Array:
    return _HALF * x * (_ONE + lax.tanh(_SQRT_2_OVER_PI * x * (_ONE + np.float32(0.044715) * x * x)))


def _gelu_erf(x: Array) -> Array:
    return _HALF * x * (_ONE + lax.erf(x * _SQRT_1_2))


def _gelu_quick(x: Array) -> Array:
    return x * (_ONE / (_ONE + lax.exp(np.float32(-1.702) * x)))


def _relu(x: Array) -> Array:
    return lax.max(x, _ZERO)


def _silu(x: Array) -> Array:
    return x / (_ONE + lax.exp(-x))


_UNARY = {
    "abs": lax.abs,
    "sgn": lax.sign,
    "neg": lax.neg,
    "step": lambda x: f32(x > 0),
    "tanh": lax.tanh,
    "elu": lambda x: lax.select(x > 0, x, lax.expm1(x)),
    "relu": _relu,
    "sigmoid": _sigmoid,
    "gelu": _gelu,
    "gelu_quick": _gelu_quick,
    "silu": _silu,
    "hardswish": lambda x: x * _hardsigmoid(x),
    "hardsigmoid": _hardsigmoid,
    "exp": lax.exp,
    "expm1": _expm1,
    "softplus": lambda x: lax.select(x > 20, x, lax.log(_ONE + lax.exp(x))),
    "gelu_erf": _gelu_erf,
    "floor": lax.floor,
    "ceil": lax.ceil,
    "round": lax.round,  # ties away from zero, as roundf
    "trunc": lambda x: lax.select(x < 0, lax.ceil(x), lax.floor(x)),
}

_GATES = {
    "reglu": _relu,
    "geglu": _gelu,
    "swiglu": _silu,
    "geglu_erf": _gelu_erf,
    "geglu_quick": _gelu_quick,
}

_F16_TABLES = ("gelu", "geglu", "gelu_quick", "geglu_quick")
"""Functions that ggml's CPU backend looks up in a table from f16 to f16, for f32 and f16 operands."""


def _apply(function, x: Array, op: str, dtype: str) -> Array:
    """Returns `function(x)` in float32, rounded like ggml's f16 table if it has one.

    test-backend-ops compares results with the CPU's within 1e-7 of their mean square, which is finer than the table, so its
    rounding is part of the op. Outside of [-10, 10] gelu does not use the table.
    """
    x = f32(x)
    if op not in _F16_TABLES or dtype not in ("f32", "f16"):
        return function(x)
    y = _round_to_f16(function(_round_to_f16(x)))
    if dtype == "f32" and op in ("gelu", "geglu"):
        y = lax.select(x <= -10, lax.full_like(x, 0), lax.select(x >= 10, x, y))
    return y


def _round_to_f16(x: Array) -> Array:
    return f32(lax.convert_element_type(x, np.float16))


@emitter(
    "abs",
    "sgn",
    "neg",
    "step",
    "tanh",
    "elu",
    "relu",
    "sigmoid",
    "gelu",
    "gelu_quick",
    "silu",
    "hardswish",
    "hardsigmoid",
    "exp",
    "expm1",
    "softplus",
    "gelu_erf",
    "floor",
    "ceil",
    "round",
    "trunc",
    types="float",
)
def unary(x, *, op, inputs, out):
    """A variant of ggml's UNARY; x: any shape, f32, f16 or bf16."""
    return result(_apply(_UNARY[op], x, op, inputs[0].dtype), out)


def _halves(x: Array, gate: Array | None, swapped: bool) -> tuple[Array, Array]:
    """Returns argument and gate of a gated linear unit; see `glu`."""
    if gate is not None:
        return x, gate
    half = x.shape[-1] // 2
    first, second = (lax.slice_in_dim(x, k * half, (k + 1) * half, axis=3) for k in (0, 1))
    return (second, first) if swapped else (first, second)


@emitter("reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick", types="float, same")
def glu(x, gate=None, *, swapped: bool = False, op, inputs, out):
    """`function(x) * gate`; without `gate`, the two halves of the rows of `x`.

    x: [ne3, ne2, ne1, ne0], or rows twice as long without `gate`: the first half is the argument and the second the gate, or the
    reverse if `swapped`. The last value of rows of an odd length is not used.
    """
    x, gate = _halves(x, gate, swapped)
    return result(_apply(_GATES[op], x, op, inputs[0].dtype) * f32(gate), out)


@emitter("swiglu_oai", types="f32, same")
def swiglu_oai(x, gate=None, *, swapped: bool = False, alpha: float, limit: float, out):
    """gpt-oss's `x * sigmoid(alpha * x) * (gate + 1)`, `x` at most `limit` and `gate` in [-limit, limit]; inputs as in `glu`."""
    x, gate = (f32(t) for t in _halves(x, gate, swapped))
    alpha, limit = np.float32(alpha), np.float32(limit)
    x, gate = lax.min(x, limit), lax.max(lax.min(gate, limit), -limit)
    return result(x / (_ONE + lax.exp(alpha * -x)) * (gate + _ONE), out)


@emitter("swiglu_clamp", types="f32 f16, same")
def swiglu_clamp(x, gate=None, *, swapped: bool = False, limit: float, out):
    """`silu(x) * gate`, `x` at most `limit` and `gate` in [-limit, limit]; inputs as in `glu`."""
    x, gate = (f32(t) for t in _halves(x, gate, swapped))
    limit = np.float32(limit)
    return result(_silu(lax.min(x, limit)) * lax.max(lax.min(gate, limit), -limit), out)
