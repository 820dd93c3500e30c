"""NumPy's elementwise functions, with broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kernelgen.languages.numpy.dtypes import BOOL, FLOAT32, floating, is_float, promoted
from kernelgen.languages.numpy.places import refused
from kernelgen.languages.numpy.tensor import FUNCTIONS, N, TracedArray, implements, tensor, together


def made(array: Any) -> TracedArray:
    """Returns a result with its loops: one over each of its dimensions."""
    result = TracedArray(array)
    result.iterations = ("elementwise", result.shape)
    return result


def _binary(function: Callable[[Any, Any], Any], kinds: str = "fiub") -> Callable[..., TracedArray]:
    def compute(x: Any, y: Any, /, *, dtype: Any = None, where: Any = True, **_: Any) -> TracedArray:
        _all_elements(where)
        a, b = together(x, y, dtype=dtype)
        if not is_float(a.dtype) and a.dtype.kind not in kinds:
            a, b = a.astype(np.int32), b.astype(np.int32)
        if is_float(a.dtype) and "f" not in kinds:
            raise refused(f"bits of {a.dtype.name} can't be combined", "convert to an integer type: x.astype(np.int32)")
        return made(function(*_broadcast(a, b)))

    return compute


def _broadcast(a: Any, b: Any) -> tuple[Any, Any]:
    shape = np.broadcast_shapes(a.shape, b.shape)
    return jnp.broadcast_to(a, shape), jnp.broadcast_to(b, shape)


def _all_elements(where: Any) -> None:
    if where is not True:
        raise refused("where= of a function is not supported", "choose with np.where(condition, x, y)")


def _remainder(a: Any, b: Any) -> Any:
    """An integer divided by 0 leaves 0, as in NumPy; XLA returns the dividend."""
    rest = lax.rem(a, b)
    if a.dtype.kind != "u":
        rest = jnp.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
    return rest if is_float(a.dtype) else jnp.where(b == 0, jnp.zeros_like(rest), rest)


def _floor_divide(a: Any, b: Any) -> Any:
    """An integer divided by 0 gives 0, as in NumPy; XLA returns one with all bits set."""
    if is_float(a.dtype):
        return lax.floor(a / b)
    whole = lax.div(a, b)
    if a.dtype.kind != "u":
        whole = jnp.where((lax.rem(a, b) != 0) & ((a < 0) != (b < 0)), whole - 1, whole)
    return jnp.where(b == 0, jnp.zeros_like(whole), whole)


def _logaddexp(a: Any, b: Any) -> Any:
    top = lax.max(a, b)
    far = -lax.abs(a - b)
    return jnp.where(a == b, a + np.log(2.0).astype(a.dtype), top + lax.log1p(lax.exp(far)))


_TABLE: tuple[tuple[Any, Any, str], ...] = (
    (np.add, lambda a, b: lax.bitwise_or(a, b) if a.dtype == BOOL else a + b, "fiub"),
    (np.subtract, lambda a, b: a - b, "fiu"),
    (np.multiply, lambda a, b: lax.bitwise_and(a, b) if a.dtype == BOOL else a * b, "fiub"),
    (np.maximum, lax.max, "fiub"),
    (np.minimum, lax.min, "fiub"),
    (np.remainder, _remainder, "fiu"),
    (np.floor_divide, _floor_divide, "fiu"),
    (np.bitwise_and, lax.bitwise_and, "iub"),
    (np.bitwise_or, lax.bitwise_or, "iub"),
    (np.bitwise_xor, lax.bitwise_xor, "iub"),
    (np.left_shift, lax.shift_left, "iu"),
    (
        np.right_shift,
        lambda a, b: (lax.shift_right_logical if a.dtype.kind == "u" else lax.shift_right_arithmetic)(a, b),
        "iu",
    ),
)
for _function, _lax, _kinds in _TABLE:
    FUNCTIONS[_function] = _binary(_lax, _kinds)


def _real(function: Callable[[Any, Any], Any]) -> Callable[..., TracedArray]:
    """Returns a function of two real numbers that converts integers to float32."""

    def compute(x: Any, y: Any, /, *, dtype: Any = None, where: Any = True, **_: Any) -> TracedArray:
        _all_elements(where)
        common = floating(promoted(*(tensor(o) if isinstance(o, list | tuple) else o for o in (x, y))))
        return made(function(*_broadcast(*together(x, y, dtype=dtype or common))))

    return compute


FUNCTIONS[np.divide] = _real(lambda a, b: a / b)
FUNCTIONS[np.logaddexp] = _real(_logaddexp)


@implements(np.power)
def power(x: Any, y: Any, /, *, dtype: Any = None, where: Any = True, **_: Any) -> TracedArray:
    """`x ** y`; a small constant integer exponent becomes products."""
    _all_elements(where)
    if (
        isinstance(x, TracedArray)
        and isinstance(y, int | float | np.number)
        and float(y).is_integer()
        and abs(float(y)) <= 64
    ):
        base, _ = together(x, y, dtype=dtype)
        if int(y) >= 0 or is_float(base.dtype):
            return made(lax.integer_pow(base, int(y)))
    a, b = together(x, y, dtype=dtype)
    if not is_float(a.dtype):
        return made(jnp.power(*_broadcast(a, b)))
    return made(lax.pow(*_broadcast(a, b)))


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[..., TracedArray]:
    def compute(x: Any, y: Any, /, *, where: Any = True, **_: Any) -> TracedArray:
        _all_elements(where)
        return made(function(*_broadcast(*together(x, y))))

    return compute


_COMPARISONS: dict[Any, Any] = {
    np.equal: lax.eq,
    np.not_equal: lax.ne,
    np.less: lax.lt,
    np.less_equal: lax.le,
    np.greater: lax.gt,
    np.greater_equal: lax.ge,
}
for _function, _lax in _COMPARISONS.items():
    FUNCTIONS[_function] = _comparison(_lax)


def truth(value: Any) -> Any:
    """Returns whether each value is nonzero, as a JAX array of bools."""
    array = tensor(value).array
    return array if array.dtype == BOOL else array != array.dtype.type(0)


_LOGICAL: dict[Any, Any] = {
    np.logical_and: lax.bitwise_and,
    np.logical_or: lax.bitwise_or,
    np.logical_xor: lax.bitwise_xor,
}
for _function, _lax in _LOGICAL.items():
    FUNCTIONS[_function] = (lambda f: lambda x, y, /, **_: made(f(*_broadcast(truth(x), truth(y)))))(_lax)


def _unary(function: Callable[[Any], Any], real: bool) -> Callable[..., TracedArray]:
    def compute(x: Any, /, *, dtype: Any = None, where: Any = True, **_: Any) -> TracedArray:
        _all_elements(where)
        array = tensor(x, None if dtype is None else np.dtype(dtype)).array
        return made(function(array.astype(floating(array.dtype)) if real else array))

    return compute


def _whole(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that leaves integers unchanged."""
    return lambda a: function(a) if is_float(a.dtype) else a


_FLOATING: dict[Any, Callable[[Any], Any]] = {
    np.exp: lax.exp,
    np.expm1: lax.expm1,
    np.log: lax.log,
    np.log1p: lax.log1p,
    np.log2: lambda a: lax.log(a) * a.dtype.type(1 / math.log(2)),
    np.sqrt: lax.sqrt,
    np.sin: lax.sin,
    np.cos: lax.cos,
    np.tan: lambda a: lax.sin(a) / lax.cos(a),
    np.arctan: lambda a: lax.atan2(a, lax.full_like(a, 1)),
    np.tanh: lax.tanh,
    np.sinh: lambda a: (lax.exp(a) - lax.exp(-a)) * a.dtype.type(0.5),
    np.cosh: lambda a: (lax.exp(a) + lax.exp(-a)) * a.dtype.type(0.5),
}
_ANY: dict[Any, Callable[[Any], Any]] = {
    np.absolute: lambda a: a if a.dtype.kind in "ub" else lax.abs(a),
    np.fabs: lambda a: lax.abs(a.astype(floating(a.dtype))),
    np.square: lambda a: a * a,
    np.negative: lambda a: -a,
    np.sign: lambda a: lax.sign(a),
    np.ceil: _whole(lax.ceil),
    np.floor: _whole(lax.floor),
    np.trunc: _whole(lambda a: jnp.where(a < 0, lax.ceil(a), lax.floor(a))),
    np.rint: _whole(lambda a: lax.round(a, lax.RoundingMethod.TO_NEAREST_EVEN)),
    np.invert: lax.bitwise_not,
    np.isnan: lambda a: a != a,
    np.isfinite: lambda a: (a - a) == 0 if is_float(a.dtype) else jnp.full(a.shape, True),
    np.reciprocal: lambda a: lax.div(lax.full_like(a, 1), a),
    np.logical_not: lambda a: ~a if a.dtype == BOOL else a == 0,
}
for _function, _compute in _FLOATING.items():
    FUNCTIONS[_function] = _unary(_compute, True)
for _function, _compute in _ANY.items():
    FUNCTIONS[_function] = _unary(_compute, False)


@implements(np.round, np.around)
def around(a: Any, decimals: int = 0, out: Any = None) -> TracedArray:
    array = tensor(a).array
    if not is_float(array.dtype):
        return made(array)
    scale = array.dtype.type(10.0**decimals)
    return made(lax.round(array * scale, lax.RoundingMethod.TO_NEAREST_EVEN) / scale)


@implements(np.clip)
def clip(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None, **_: Any) -> TracedArray:
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    result: Any = tensor(a)
    if low is not None:
        result = N.maximum(result, low)
    if high is not None:
        result = N.minimum(result, high)
    return result  # type: ignore[no-any-return]


@implements(np.where)
def where(condition: Any, x: Any = None, y: Any = None, /) -> TracedArray:
    if x is None or y is None:
        raise refused(
            "np.where with a condition alone is not supported: how many elements there are is not known while tracing",
            "use np.where(condition, x, y)",
        )
    a, b = together(x, y)
    c = truth(condition)
    shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
    return made(lax.select(*(jnp.broadcast_to(v, shape) for v in (c, a, b))))


@implements(np.isclose)
def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, **_: Any) -> TracedArray:
    x, y = together(a, b, dtype=FLOAT32)
    return made(lax.abs(x - y) <= np.float32(atol) + np.float32(rtol) * lax.abs(y))
