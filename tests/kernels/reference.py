"""What ggml's ops compute, in NumPy: the measure of the emitters, and written without a look at them.

A function takes the kernel and its inputs as logical arrays `[ne3, ne2, ne1, ne0]` in their own types (None where absent;
quantized tensors as bytes per row) and returns the result in the type of the kernel's output. They follow ggml's CPU backend
row by row and in its order of operations where that shows in the result, and sum in float64 as it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from kernelgen.ggml.types import TYPES
from kernelgen.plan import KernelSpec, TensorDesc

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}

REFERENCES: dict[str, Callable[..., Array]] = {}


def reference(*ops: str) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    def add(function: Callable[..., Array]) -> Callable[..., Array]:
        for op in ops:
            REFERENCES[op] = function
        return function

    return add


def compute(spec: KernelSpec, inputs: list[Array | None]) -> Array:
    """Returns what ggml computes, in the output's type and shape (bytes per row for a quantized one)."""
    return REFERENCES[spec.op](spec, *inputs)


def _quantize_q8_0(x: Array) -> Array:
    """Returns rows of Q8_0 blocks as ggml's vector code makes them: gguf rounds ties away from zero, as ggml's scalar code does."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top != 0)
    d = (top / np.float32(127)).astype(np.float16)
    quants = np.rint(blocks * scale).astype(np.int8)
    return np.concatenate([d.view(np.uint8), quants.view(np.uint8)], axis=-1).reshape(*x.shape[:-1], -1)


def dequantize(x: Array, tensor: TensorDesc) -> Array:
    """Returns float32 elements: ggml's own Python package decodes blocks."""
    if not TYPES[tensor.dtype].quantized:
        return x.astype(np.float32)
    rows = x.reshape(*x.shape[:3], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(TYPES[tensor.dtype].number)).astype(np.float32)


def round_to(x: Array, tensor: TensorDesc) -> Array:
    """Returns `x` as the tensor stores it."""
    if TYPES[tensor.dtype].quantized:
        kind = gguf.GGMLQuantizationType(TYPES[tensor.dtype].number)
        if kind == gguf.GGMLQuantizationType.Q8_0:
            return _quantize_q8_0(np.ascontiguousarray(x, np.float32))
        return gguf.quants.quantize(np.ascontiguousarray(x, np.float32), kind)
    return x.astype(DTYPES[tensor.dtype])


def _f32(x: Array) -> Array:
    return x.astype(np.float32)


def _out(spec: KernelSpec, x: Array) -> Array:
    return round_to(x.reshape(spec.output.shape), spec.output)


# --- element by element ---------------------------------------------------------------------------------------------------


@reference("add", "sub", "mul", "div")
def binary(spec: KernelSpec, a: Array, b: Array) -> Array:
    index = np.ix_(*(np.arange(n) % m for n, m in zip(a.shape, b.shape, strict=True)))
    b = b[index]
    f = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[spec.op]
    return _out(spec, f(_f32(a), _f32(b)))


@reference("scale")
def scale(spec: KernelSpec, x: Array) -> Array:
    p = dict(spec.params)
    return _out(spec, _f32(x) * np.float32(p["s"]) + np.float32(p["b"]))


@reference("clamp")
def clamp(spec: KernelSpec, x: Array) -> Array:
    p = dict(spec.params)
    return _out(spec, np.clip(_f32(x), np.float32(p["min"]), np.float32(p["max"])))


@reference("sqr", "sqrt", "log", "sin", "cos")
def math_unary(spec: KernelSpec, x: Array) -> Array:
    f = {"sqr": np.square, "sqrt": np.sqrt, "log": np.log, "sin": np.sin, "cos": np.cos}[spec.op]
    return _out(spec, f(_f32(x)))


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
    return _out(spec, _UNARY[spec.op](_f32(x), spec.inputs[0].dtype))


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
    return _out(spec, _GLU[spec.op](_f32(x), spec.inputs[0].dtype) * _f32(gate))


# --- rows -------------------------------------------------------------------------------------------------------------------


@reference("sum_rows")
def sum_rows(spec: KernelSpec, x: Array) -> Array:
    return _out(spec, x.astype(np.float64).sum(axis=3, keepdims=True))


@reference("norm")
def norm(spec: KernelSpec, x: Array) -> Array:
    x = x.astype(np.float64)
    x = x - x.mean(axis=3, keepdims=True)
    return _out(spec, x / np.sqrt((x * x).mean(axis=3, keepdims=True) + dict(spec.params)["eps"]))


@reference("rms_norm")
def rms_norm(spec: KernelSpec, x: Array) -> Array:
    x = x.astype(np.float64)
    return _out(spec, x / np.sqrt((x * x).mean(axis=3, keepdims=True) + dict(spec.params)["eps"]))


@reference("l2_norm")
def l2_norm(spec: KernelSpec, x: Array) -> Array:
    x = x.astype(np.float64)
    length = np.sqrt((x * x).sum(axis=3, keepdims=True))
    return _out(spec, x / np.maximum(length, dict(spec.params)["eps"]))


# --- products and attention -------------------------------------------------------------------------------------------------


def _dot_type(x: Array, tensor: TensorDesc) -> Array:
    """The second operand of a dot product as the CPU rounds it for a first operand of this type."""
    return _f32(x) if TYPES[tensor.dtype].quantized else _f32(x.astype(DTYPES[tensor.dtype]))


@reference("mul_mat")
def mul_mat(spec: KernelSpec, a: Array, b: Array) -> Array:
    b = _dot_type(b, spec.inputs[0]).astype(np.float64)
    a = dequantize(a, spec.inputs[0]).astype(np.float64)
    y = np.empty((*b.shape[:3], a.shape[2]))
    for i3 in range(b.shape[0]):
        for i2 in range(b.shape[1]):
            matrix = a[i3 * a.shape[0] // b.shape[0], i2 * a.shape[1] // b.shape[1]]
            y[i3, i2] = b[i3, i2] @ matrix.T
    return _out(spec, y)


def _slope(head: int, n_head: int, max_bias: float) -> float:
    if max_bias <= 0:
        return 1.0
    log2 = 1 << math.floor(math.log2(n_head))
    m0, m1 = 2.0 ** (-max_bias / log2), 2.0 ** (-max_bias / 2 / log2)
    return m0 ** (head + 1) if head < log2 else m1 ** (2 * (head - log2) + 1)


@reference("soft_max")
def soft_max(spec: KernelSpec, x: Array, mask: Array | None = None, sinks: Array | None = None) -> Array:
    p = dict(spec.params)
    y = np.empty(x.shape)
    n3, n2, n1, _ = x.shape
    for i3, i2, i1 in np.ndindex(n3, n2, n1):
        row = x[i3, i2, i1].astype(np.float64) * p["scale"]
        if mask is not None:
            row = row + _slope(i2, n2, p["max_bias"]) * mask[i3 % mask.shape[0], i2 % mask.shape[1], i1].astype(
                np.float64
            )
        top = row.max()
        if sinks is not None:
            top = max(top, sinks[0, 0, 0, i2])
        e = np.exp(row - top)
        y[i3, i2, i1] = e / (e.sum() + (0 if sinks is None else np.exp(sinks[0, 0, 0, i2] - top)))
    return _out(spec, y)


@reference("flash_attn_ext")
def flash_attn_ext(
    spec: KernelSpec, q: Array, k: Array, v: Array, mask: Array | None = None, sinks: Array | None = None
) -> Array:
    p = dict(spec.params)
    q = _dot_type(q, spec.inputs[1]).astype(np.float64)
    k, v = (dequantize(x, t).astype(np.float64) for x, t in zip((k, v), spec.inputs[1:3], strict=True))
    n3, n2, n1, _ = q.shape
    y = np.zeros((n3, n1, n2, v.shape[3]))
    for i3, i2, i1 in np.ndindex(n3, n2, n1):
        keys = k[i3 // (n3 // k.shape[0]), i2 // (n2 // k.shape[1])]
        values = v[i3 // (n3 // v.shape[0]), i2 // (n2 // v.shape[1])]
        s = keys @ q[i3, i2, i1] * p["scale"]
        if p["logit_softcap"]:
            s = p["logit_softcap"] * np.tanh(s / p["logit_softcap"])
        if mask is not None:
            s = s + _slope(i2, n2, p["max_bias"]) * mask[i3 % mask.shape[0], i2 % mask.shape[1], i1].astype(np.float64)
        seen = s > -np.inf
        top = max([*s[seen], *([] if sinks is None else [sinks[0, 0, 0, i2]])], default=0.0)
        e = np.where(seen, np.exp(np.where(seen, s, 0) - top), 0)
        total = e.sum() + (0 if sinks is None else np.exp(sinks[0, 0, 0, i2] - top))
        if total:
            y[i3, i1, i2] = e @ values / total
    return _out(spec, y)


# --- rope -------------------------------------------------------------------------------------------------------------------


def _corr_dim(n_dims: int, n_ctx_orig: int, rotations: float, base: float) -> float:
    if not n_ctx_orig:
        return -math.inf
    return n_dims * math.log(n_ctx_orig / (rotations * 2 * math.pi)) / (2 * math.log(base))


@reference("rope")
def rope(spec: KernelSpec, x: Array, pos: Array, factors: Array | None = None) -> Array:
    p = dict(spec.params)
    n_dims, mode, offset = int(p["n_dims"]), p["mode"], int(p["n_offs"])
    n_tokens, ne0 = x.shape[1], x.shape[3]
    sections = [int(p[f"section{i}"]) for i in range(4)]
    step = np.float32(p["freq_base"] ** (-2.0 / n_dims))
    low = high = 0.0
    if p["ext_factor"]:
        low = max(0.0, np.floor(_corr_dim(n_dims, p["n_ctx_orig"], p["beta_fast"], p["freq_base"])))
        high = min(n_dims - 1.0, np.ceil(_corr_dim(n_dims, p["n_ctx_orig"], p["beta_slow"], p["freq_base"])))
    y = x.astype(np.float32).copy()
    flat = pos.reshape(-1)
    for t in range(n_tokens):
        if mode in (0, 2):
            thetas = {"t": np.float32(flat[t])}
        else:
            thetas = {name: np.float32(flat[t + n_tokens * c]) for c, name in enumerate("thwe")}
        start = dict(thetas)
        rotated = ne0 if mode == 24 else n_dims
        for i0 in range(0, rotated, 2):
            name = "t"
            if mode in (8, 24, 40):
                sector = (i0 // 2) % sum(sections)
                bounds = np.cumsum([0, *sections])
                if mode == 24:
                    for c, section in enumerate("thwe"):
                        if sector == bounds[c]:
                            thetas[section] = start[section]
                if mode == 40:
                    if sector % 3 == 1 and sector < 3 * sections[1]:
                        name = "h"
                    elif sector % 3 == 2 and sector < 3 * sections[2]:
                        name = "w"
                    elif sector % 3 == 0 and sector < 3 * sections[0]:
                        name = "t"
                    else:
                        name = "e"
                elif sector >= bounds[3]:
                    name = "e"
                elif sector >= bounds[2]:
                    name = "w"
                elif sector >= bounds[1]:
                    name = "h"
            extrapolated = thetas[name] / (factors[0, 0, 0, i0 // 2] if factors is not None else np.float32(1))
            theta = extrapolated * np.float32(p["freq_scale"])
            magnitude = p["attn_factor"]
            if p["ext_factor"]:
                ramp = 1 - min(1.0, max(0.0, (i0 // 2 - low) / max(0.001, high - low)))
                mix = ramp * p["ext_factor"]
                theta = theta * (1 - mix) + extrapolated * mix
                magnitude *= 1 + 0.1 * math.log(1 / p["freq_scale"])
            cos, sin = math.cos(theta) * magnitude, math.sin(theta) * magnitude
            if mode == 0:
                first, second = offset + i0, offset + i0 + 1
            elif mode == 24:
                first, second = i0 // 2, i0 // 2 + n_dims
            else:
                first, second = offset + i0 // 2, offset + i0 // 2 + n_dims // 2
            x0, x1 = (x[:, t, :, c].astype(np.float64) for c in (first, second))
            y[:, t, :, first] = x0 * cos - x1 * sin
            y[:, t, :, second] = x0 * sin + x1 * cos
            thetas = {key: value * step for key, value in thetas.items()}
    return _out(spec, y)


# --- rows by index, copies --------------------------------------------------------------------------------------------------


@reference("get_rows")
def get_rows(spec: KernelSpec, x: Array, rows: Array) -> Array:
    table = x if spec.inputs[0].dtype == "i32" else dequantize(x, spec.inputs[0])
    y = np.empty(spec.output.shape, table.dtype)
    for i3, i2, i in np.ndindex(*y.shape[:3]):
        y[i3, i2, i] = table[i3, i2, rows[0, i3, i2, i]]
    return _out(spec, y)


@reference("set_rows")
def set_rows(spec: KernelSpec, x: Array, rows: Array, dst: Array) -> Array:
    y = dst.copy()
    stored = round_to(_f32(x), spec.output)
    for i3, i2, i in np.ndindex(*x.shape[:3]):
        y[i3, i2, rows[0, i3 % rows.shape[1], i2 % rows.shape[2], i]] = stored[i3, i2, i]
    return y


@reference("cont", "dup", "reshape")
def cont(spec: KernelSpec, x: Array) -> Array:
    return _out(spec, x)


@reference("transpose")
def transpose(spec: KernelSpec, x: Array) -> Array:
    return _out(spec, np.swapaxes(x, 2, 3))


@reference("cpy")
def cpy(spec: KernelSpec, x: Array, dst: Array) -> Array:
    if spec.inputs[0].dtype == spec.output.dtype:
        return x.reshape(dst.shape)
    x = x if spec.inputs[0].dtype == "i32" else dequantize(x, spec.inputs[0])
    return round_to(x.reshape(spec.output.shape), spec.output)
