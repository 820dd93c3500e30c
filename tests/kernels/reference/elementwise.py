"""Elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, below, example, f32, out, reference


@reference("add", "sub", "mul", "div")
def binary(spec: KernelSpec, a: Array, b: Array) -> Array:
    index = np.ix_(*(np.arange(n) % m for n, m in zip(a.shape, b.shape, strict=True)))
    b = b[index]
    f = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[spec.op]
    return out(spec, f(f32(a), f32(b)))


@reference("add1")
def add1(spec: KernelSpec, a: Array, b: Array) -> Array:
    return out(spec, f32(a) + f32(b).item())


@reference("add_id")
def add_id(spec: KernelSpec, a: Array, b: Array, ids: Array) -> Array:
    y = np.empty(a.shape, np.float32)
    for i3, i2, i1 in np.ndindex(*a.shape[:3]):
        y[i3, i2, i1] = a[i3, i2, i1] + b[0, 0, ids[0, 0, i2, i1]]
    return out(spec, y)


@reference("leaky_relu")
def leaky_relu(spec: KernelSpec, x: Array) -> Array:
    x = f32(x)
    slope = np.float32(dict(spec.params)["negative_slope"])
    return out(spec, np.where(x > 0, x, 0) + slope * np.where(x < 0, x, 0))


@reference("xielu")
def xielu(spec: KernelSpec, x: Array) -> Array:
    p = {name: np.float32(value) for name, value in spec.params}
    x = f32(x)
    positive = p["alpha_p"] * x * x + p["beta"] * x
    negative = (np.expm1(np.minimum(x, p["eps"])) - x) * p["alpha_n"] + p["beta"] * x
    return out(spec, np.where(x > 0, positive, negative))


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
    """Computes through a lookup table as ggml's CPU backend does: an f16 index and f16 entries."""
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


def _split(spec: KernelSpec, x: Array, gate: Array | None) -> tuple[Array, Array]:
    if gate is None:
        half = x.shape[3] // 2
        x, gate = x[..., :half], x[..., half : 2 * half]
        if dict(spec.params)["swapped"]:
            x, gate = gate, x
    return f32(x), f32(gate)


@reference(*_GLU)
def glu(spec: KernelSpec, x: Array, gate: Array | None = None) -> Array:
    x, gate = _split(spec, x, gate)
    return out(spec, _GLU[spec.op](x, spec.inputs[0].dtype) * gate)


@reference("swiglu_oai")
def swiglu_oai(spec: KernelSpec, x: Array, gate: Array | None = None) -> Array:
    x, gate = _split(spec, x, gate)
    p = {name: np.float32(value) for name, value in spec.params}
    x, gate = np.minimum(x, p["limit"]), np.clip(gate, -p["limit"], p["limit"])
    return out(spec, x / (1 + np.exp(p["alpha"] * -x)) * (gate + 1))


@reference("swiglu_clamp")
def swiglu_clamp(spec: KernelSpec, x: Array, gate: Array | None = None) -> Array:
    x, gate = _split(spec, x, gate)
    limit = np.float32(dict(spec.params)["limit"])
    return out(spec, _silu(np.minimum(x, limit)) * np.clip(gate, -limit, limit))


example("add", "sub", "mul", inputs=("(33,4,3,2)", "(33,2,1,2)"))
# The divisor is never near 0.
example("div", inputs=("(33,4,3,2)", "(33,2,1,2)"), values={1: lambda rng, shape: rng.uniform(1, 2, shape)})
example("add1", inputs=("(33,4,3,2)", "(1,1,1,1)"))
example("add_id", inputs=("(33,4,3,2)", "(33,5,1,1)", "(4,3,1,1)"), values={2: below(5)})
example("leaky_relu", inputs=("(33,4,3,2)",), negative_slope=0.1)
example("xielu", inputs=("(33,4,3,2)",), alpha_n=4.5, alpha_p=2.0, beta=0.5, eps=-1e-6)
example("scale", inputs=("(33,4,3,2)",), s=0.7, b=-1.5)
example("clamp", inputs=("(33,4,3,2)",), min=-0.5, max=0.7)
example("sqr", "sin", "cos", *_UNARY, inputs=("(33,4,3,2)",))
example("sqrt", "log", inputs=("(33,4,3,2)",), values={0: lambda rng, shape: rng.uniform(0.1, 4, shape)})
example(*_GLU, inputs=("(33,4,3,2)", "(33,4,3,2)"))
example("swiglu_oai", inputs=("(33,4,3,2)", "(33,4,3,2)"), alpha=1.702, limit=1.0)
example("swiglu_clamp", inputs=("(33,4,3,2)", "(33,4,3,2)"), limit=1.0)
