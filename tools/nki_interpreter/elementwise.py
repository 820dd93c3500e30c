"""The elementwise functions of the engines: their names, their aliases, and how to compute each.

Attributes:
    UNARY, BINARY: per name the function of float32 arrays (of integer arrays for the bitwise ones).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nki_interpreter.errors import NkiTypeError
from nki_interpreter.lazy import jax, jnp, lax

_GELU_TANH = math.sqrt(2 / math.pi)


def _erf_dx(x: Any) -> Any:
    return (2 / math.sqrt(math.pi)) * jnp.exp(-x * x)


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + lax.erf(x * np.float32(math.sqrt(0.5))))


def _gelu_dx(x: Any) -> Any:
    return 0.5 * (1 + lax.erf(x * np.float32(math.sqrt(0.5)))) + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + lax.tanh(np.float32(_GELU_TANH) * (x + np.float32(0.044715) * x * x * x)))


def _gelu_sigmoid(x: Any) -> Any:
    return x * jax.nn.sigmoid(np.float32(1.702) * x)


def _silu_dx(x: Any) -> Any:
    s = jax.nn.sigmoid(x)
    return s * (1 + x * (1 - s))


def _gelu_sigmoid_dx(x: Any) -> Any:
    s = jax.nn.sigmoid(np.float32(1.702) * x)
    return s + np.float32(1.702) * x * s * (1 - s)


def _softplus(x: Any) -> Any:
    return jax.nn.softplus(x)


UNARY: dict[str, Callable[[Any], Any]] = {
    "copy": lambda x: x,
    "abs": lambda x: lax.abs(x),
    "arctan": lambda x: lax.atan(x),
    "ceil": lambda x: lax.ceil(x),
    "cos": lambda x: lax.cos(x),
    "erf": lambda x: lax.erf(x),
    "erf_dx": _erf_dx,
    "exp": lambda x: lax.exp(x),
    "floor": lambda x: lax.floor(x),
    "gelu": _gelu,
    "gelu_apprx_sigmoid": _gelu_sigmoid,
    "gelu_apprx_sigmoid_dx": _gelu_sigmoid_dx,
    "gelu_apprx_tanh": _gelu_tanh,
    "gelu_dx": _gelu_dx,
    "log": lambda x: lax.log(x),
    "logical_not": lambda x: x == 0,
    "mish": lambda x: x * lax.tanh(_softplus(x)),
    "negative": lambda x: -x,
    "reciprocal": lambda x: 1 / x,
    "relu": lambda x: jnp.maximum(x, 0),
    "rsqrt": lambda x: lax.rsqrt(x),
    "sigmoid": lambda x: jax.nn.sigmoid(x),
    "sign": lambda x: lax.sign(x),
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "silu_dx": _silu_dx,
    "sin": lambda x: lax.sin(x),
    "softplus": _softplus,
    "sqrt": lambda x: lax.sqrt(x),
    "square": lambda x: x * x,
    "tan": lambda x: lax.tan(x),
    "tanh": lambda x: lax.tanh(x),
    "trunc": lambda x: jnp.trunc(x),
    "invert": lambda x: ~x,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "maximum": lambda a, b: jnp.maximum(a, b),
    "minimum": lambda a, b: jnp.minimum(a, b),
    "abs_max": lambda a, b: jnp.maximum(jnp.abs(a), jnp.abs(b)),
    "abs_min": lambda a, b: jnp.minimum(jnp.abs(a), jnp.abs(b)),
    "power": lambda a, b: jnp.power(a, b),
    "mod": lambda a, b: jnp.mod(a, b),
    "fmod": lambda a, b: jnp.fmod(a, b),
    "equal": lambda a, b: a == b,
    "not_equal": lambda a, b: a != b,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
    "logical_and": lambda a, b: (a != 0) & (b != 0),
    "logical_or": lambda a, b: (a != 0) | (b != 0),
    "logical_xor": lambda a, b: (a != 0) ^ (b != 0),
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "left_shift": lambda a, b: lax.shift_left(a, b),
    "right_shift": lambda a, b: lax.shift_right_logical(a, b),  # the engines have no arithmetic shift
    "bypass": lambda a, b: a,
    "average": lambda a, b: (a + b) / 2,
    "prelu": lambda a, b: jnp.where(a > 0, a, a * b),
    "rsqrt": lambda a, b: lax.rsqrt(a),
}
BITWISE = {"bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift", "invert"}
COMPARISONS = {
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
    "logical_and", "logical_or", "logical_xor", "logical_not",
}  # fmt: skip
REDUCTIONS = {
    "add": 0.0,
    "multiply": 1.0,
    "maximum": -math.inf,
    "minimum": math.inf,
    "abs_max": 0.0,
    "bitwise_and": -1,
    "bitwise_or": 0,
    "bitwise_xor": 0,
    "logical_and": 1.0,
    "logical_or": 0.0,
}
"""The operations that can reduce, with their neutral elements."""

_ALIASES = {
    "identity": "copy",
    "absolute": "abs",
    "fabs": "abs",
    "amax": "maximum",
    "max": "maximum",
    "amin": "minimum",
    "min": "minimum",
    "sum": "add",
    "prod": "multiply",
    "mul": "multiply",
    "sub": "subtract",
    "subtract": "subtract",
    "true_divide": "divide",
    "pow": "power",
    "float_power": "power",
    "remainder": "mod",
    "bitwise_not": "invert",
    "bitwise_invert": "invert",
    "bitwise_left_shift": "left_shift",
    "bitwise_right_shift": "right_shift",
    "logical_shift_left": "left_shift",
    "logical_shift_right": "right_shift",
    "logical_left_shift": "left_shift",
    "logical_right_shift": "right_shift",
    "is_equal": "equal",
    "all": "logical_and",
    "any": "logical_or",
    "atan": "arctan",
    "swish": "silu",
}


def op_name(op: Any) -> str:
    """Returns the name of an operation, given as a function of nki.language or NumPy, or by its name.

    Raises:
        NkiTypeError: the argument is not one of the operations.
    """
    name = getattr(op, "nki_op", None) or (op if isinstance(op, str) else getattr(op, "__name__", None))
    name = _ALIASES.get(str(name), str(name))
    if name not in UNARY and name not in BINARY:
        raise NkiTypeError("err_unsupported_op", f"{op!r} is not an operation of the engines")
    return name


def check_op(name: str, table: dict[str, Any], what: str) -> str:
    if name not in table:
        raise NkiTypeError("err_unsupported_op", f"'{name}' is not an operation that {what} takes")
    return name
