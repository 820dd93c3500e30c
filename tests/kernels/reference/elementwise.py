"""Ops on each element."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kernelgen.plan import KernelSpec

from .core import Array, example, f32, out, reference


@reference("add", "sub", "mul", "div")
def binary(spec: KernelSpec, a: Array, b: Array) -> Array:
    index = np.ix_(*(np.arange(n) % m for n, m in zip(a.shape, b.shape, strict=True)))
    b = b[index]
    f = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[spec.op]
    return out(spec, f(f32(a), f32(b)))


@reference("scale")
def scale(spec: KernelSpec, x: Array) -> Array:
    p = dict(spec.params)
    return out(spec, f32(x) * np.float32(p["s"]) + np.float32(p["b"]))


@reference("clamp")
def clamp(spec: KernelSpec, x: Array) -> Array:
    p = dict(spec.params)
    return out(spec, np.clip(f32(x), np.float32(p["min"]), np.float32(p["max"])))


@reference("sqr", "sqrt", "log", "sin", "cos")
def math_unary(spec: KernelSpec, x: Array) -> Array:
    f = {"sqr": np.square, "sqrt": np.sqrt, "log": np.log, "sin": np.sin, "cos": np.cos}[spec.op]
    return out(spec, f(f32(x)))


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Array) -> Array:
    x = x.astype(np.float64)
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))


def _gelu_quick(x: Array) -> Array:
    x = x.astype(np.float64)
    return x / (1 + np.exp(-1.702 * x))


def _through_f16(f: Callable[[Array], Array], x: Array) -> Array:
    """The lookup tables of ggml's CPU backend are indexed by an f16 and hold f16."""
    with np.errstate(over="ignore"):
        return f(x.astype(np.float16)).astype(np.float16).astype(np.float32)


def _gelu_table(x: Array, dtype: str) -> Array:
    if dtype == "bf16":
        return _gelu(x).astype(np.float32)
    y = _through_f16(_gelu, x)
    return y if dtype == "f16" else np.where(x <= -10, np.float32(0), np.where(x >= 10, x, y))


def _gelu_quick_table(x: Array, dtype: str) -> Array:
    return _gelu_quick(x).astype(np.float32) if dtype == "bf16" else _through_f16(_gelu_quick, x)


def _hardsigmoid(x: Array) -> Array:
    return np.clip((x + 3) / 6, 0, 1)


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


_UNARY: dict[str, Callable[[Array, str], Array]] = {
    "abs": lambda x, _: np.abs(x),
    "sgn": lambda x, _: np.where(x > 0, 1, np.where(x < 0, -1, 0)),
    "neg": lambda x, _: -x,
    "step": lambda x, _: np.where(x > 0, 1, 0),
    "tanh": lambda x, _: np.tanh(x),
    "elu": lambda x, _: np.where(x > 0, x, np.expm1(x)),
    "relu": lambda x, _: np.where(x > 0, x, 0),
    "sigmoid": lambda x, _: 1 / (1 + np.exp(-x)),
    "gelu": _gelu_table,
    "gelu_quick": _gelu_quick_table,
    "silu": lambda x, _: _silu(x),
    "hardswish": lambda x, _: x * _hardsigmoid(x),
    "hardsigmoid": lambda x, _: _hardsigmoid(x),
    "exp": lambda x, _: np.exp(x),
    "expm1": lambda x, _: np.exp(x) - np.float32(1),
    "softplus": lambda x, _: np.where(x > 20, x, np.log(1 + np.exp(x))),
    "gelu_erf": lambda x, _: 0.5 * x * (1 + _erf(x * math.sqrt(0.5))),
    "floor": lambda x, _: np.floor(x),
    "ceil": lambda x, _: np.ceil(x),
    "round": lambda x, _: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "trunc": lambda x, _: np.trunc(x),
}


@reference(*_UNARY)
def unary(spec: KernelSpec, x: Array) -> Array:
    return out(spec, _UNARY[spec.op](f32(x), spec.inputs[0].dtype))


_GLU: dict[str, Callable[[Array, str], Array]] = {
    "reglu": _UNARY["relu"],
    "geglu": _gelu_table,
    "swiglu": _UNARY["silu"],
    "geglu_erf": _UNARY["gelu_erf"],
    "geglu_quick": _gelu_quick_table,
}


@reference(*_GLU)
def glu(spec: KernelSpec, x: Array, gate: Array | None = None) -> Array:
    if gate is None:
        half = x.shape[3] // 2
        x, gate = x[..., :half], x[..., half : 2 * half]
        if dict(spec.params)["swapped"]:
            x, gate = gate, x
    return out(spec, _GLU[spec.op](f32(x), spec.inputs[0].dtype) * f32(gate))


example("add", "sub", "mul", inputs=("(33,4,3,2)", "(33,2,1,2)"))
# Never near 0 below the line.
example("div", inputs=("(33,4,3,2)", "(33,2,1,2)"), values={1: lambda rng, shape: rng.uniform(1, 2, shape)})
example("scale", inputs=("(33,4,3,2)",), s=0.7, b=-1.5)
example("clamp", inputs=("(33,4,3,2)",), min=-0.5, max=0.7)
example("sqr", "sin", "cos", *_UNARY, inputs=("(33,4,3,2)",))
example("sqrt", "log", inputs=("(33,4,3,2)",), values={0: lambda rng, shape: rng.uniform(0.1, 4, shape)})
example(*_GLU, inputs=("(33,4,3,2)", "(33,4,3,2)"))
