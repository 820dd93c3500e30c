"""An array under a trace: NumPy's functions, operators and methods on it compute with functions of the same names in jax.numpy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernelgen.errors import KernelgenError
from kernelgen.languages.numpy import indexing, scope
from kernelgen.languages.numpy.places import refused

F = TypeVar("F", bound=Callable[..., Any])

_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32"}

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""The functions of JAX arrays that take precedence over jax.numpy's, by NumPy's function. The module `functions` fills it."""

IN_PLACE: dict[Any, Callable[..., None]] = {}
"""The functions that assign to their first argument, a `TracedArray`; filled like `FUNCTIONS`."""

REFUSED = dict.fromkeys(
    "sort argsort partition argpartition lexsort median nanmedian percentile nanpercentile quantile nanquantile".split(),
    "kernelgen.languages.numpy.topk",
) | dict.fromkeys(
    "argwhere compress extract flatnonzero nonzero unique".split(),
    "np.where(condition, x, y): how many there are is not known while tracing",
)
REFUSED |= dict.fromkeys(
    "nanargmax nanargmin searchsorted digitize histogram bincount interp cumprod nancumsum".split(), ""
)
"""Functions of jax.numpy that sort, search, pair values or have results of no fixed size, each with a replacement."""

_REDUCTIONS = {np.add: np.sum, np.multiply: np.prod, np.maximum: np.max, np.minimum: np.min}
_REDUCTIONS |= {np.logical_and: np.all, np.logical_or: np.any}

_FACTS = ("shape", "ndim", "size", "itemsize", "nbytes")
_METHODS = (
    "all any argmax argmin clip copy cumsum diagonal dot max mean min prod ravel "
    "repeat round squeeze std sum swapaxes take trace var"
).split()


class TracedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array whose values are not available while tracing.

    Attributes:
        array: the JAX array; an assignment to elements replaces it.
        parameter: number of the kernel's parameter that it is, or None.
        changed: whether elements were assigned.
        iterations: sizes of the loops of the NumPy operation that computes it, if any: for knobs.
        tile: the tile sizes of these loops that a knob sets, if any.
    """

    __slots__ = ("_body", "array", "changed", "iterations", "parameter", "tile")
    __array_priority__ = 1000
    __hash__ = object.__hash__

    def __init__(self, array: Any, parameter: int | None = None) -> None:
        self.array = lax.convert_element_type(array, array.dtype)  # not a "weak" dtype, which yields to others
        self.parameter = parameter
        self.changed = False
        self.iterations: tuple[str, tuple[int, ...]] | None = None
        self.tile: list[int] | None = None
        self._body = scope.body()

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.array.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along each dimension, as in a contiguous NumPy array."""
        return tuple(math.prod(self.shape[k + 1 :]) * self.itemsize for k in range(self.ndim))

    @property
    def T(self) -> Any:
        return self.transpose()

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return getattr(self.array, name)
        if name in _METHODS:
            return functools.partial(getattr(np, name), self)
        raise AttributeError(f"an array in a kernel has no attribute '{name}'", name=name, obj=self)

    def __len__(self) -> int:
        if not self.shape:
            raise refused("an array of rank 0 has no length")
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype.name})"

    # --- unknown values ---------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        raise refused(
            "a branch or loop depends on values that are not known while the kernel is traced",
            "choose between values with np.where, and repeat with kernelgen.languages.numpy.fori_loop",
        )

    def __int__(self) -> int:
        raise _unknown("int(), or an assignment to an element of an array of NumPy's,")

    def __float__(self) -> float:
        raise _unknown("float(), or an assignment to an element of an array of NumPy's,")

    def __index__(self) -> int:
        raise _unknown("an index or size of Python")

    def item(self, *args: Any) -> Any:
        raise _unknown("item()")

    def tolist(self) -> Any:
        raise _unknown("tolist()")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise refused(
            "an array that is not known while the kernel is traced can't be made one of NumPy's",
            "np.stack makes an array of several; elements are assigned to arrays that np.zeros or np.copy made in the kernel",
        )

    # --- NumPy's protocols --------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", (None,))[0]
        dtype, where = kwargs.pop("dtype", None), kwargs.pop("where", True)
        if method == "reduce" and ufunc in _REDUCTIONS:
            options = {"axis": 0, "where": where, "dtype": dtype, **kwargs}
            given = {name: value for name, value in options.items() if value is not None and value is not True}
            return self.__array_function__(_REDUCTIONS[ufunc], (), inputs, {**given, "out": out})
        operands = [tensor(o) if isinstance(o, list | tuple) else o for o in inputs]
        if method == "outer":
            one, other = map(tensor, operands)
            operands = [one.reshape(*one.shape, *[1] * other.ndim), other]
        elif method != "__call__":
            raise refused(f"np.{ufunc.__name__}.{method} is not supported")
        if dtype is not None:
            operands = [cast(o, dtype) for o in operands]
        made = apply(ufunc, operands, kwargs)
        if where is not True:
            if out is None:
                raise refused("where= leaves elements undefined", "choose with np.where(condition, x, y), or give out=")
            made = np.where(where, made, out)
        return made if out is None else assigned(out, made)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out = kwargs.pop("out", None) if "out" in kwargs else None
        made = apply(function, args, kwargs)
        return made if out is None else assigned(out, made)

    # --- elements -----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        return TracedArray(guarded("an index", indexing.get, self.array, unwrapped(index, index=True)))

    def __setitem__(self, index: Any, value: Any) -> None:
        new = tensor(value, self.dtype).array
        self.replace(guarded("an assignment to elements", indexing.put, self.array, unwrapped(index, index=True), new))

    def replace(self, array: Any) -> None:
        """Replaces the tensor's content by one of the same shape and dtype."""
        if self._body is not scope.body():
            raise refused(
                "the body of fori_loop changes an array from outside of it",
                "pass the array in init, change it in the body and return it",
            )
        self.array = array
        self.changed = True

    def fill(self, value: Any) -> None:
        self[...] = value

    # --- methods whose arguments are unlike the function's ------------------------------------------------------------

    def astype(self, dtype: Any, **_: Any) -> Any:
        return cast(self, dtype)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        return apply(np.reshape, (self, shape[0] if len(shape) == 1 else shape), kwargs)

    def transpose(self, *axes: Any) -> Any:
        return apply(np.transpose, (self, axes[0] if len(axes) == 1 else axes or None), {})

    def flatten(self) -> Any:
        return self.reshape(-1)


for _name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    # `x += 1` makes another array: an assignment to a parameter is written `x[...] += 1`.
    setattr(TracedArray, f"__i{_name}__", lambda self, other: NotImplemented)


def _unknown(what: str) -> KernelgenError:
    return refused(f"{what} needs a value that is not known while the kernel is traced")


def apply(function: Any, args: Any, kwargs: Any) -> Any:
    """Computes one of NumPy's functions.

    Raises:
        KernelgenError: it is not supported, or not with these arguments.
    """
    module = getattr(function, "__module__", None) or "numpy"
    name = f"{module.replace('numpy', 'np', 1)}.{function.__name__}"
    if function in IN_PLACE:
        if not isinstance(args[0], TracedArray):
            raise refused(f"{name} writes to an array of the kernel", "make it with np.zeros in the kernel")
        return guarded(name, IN_PLACE[function], *args, **kwargs)
    compute = FUNCTIONS.get(function)
    family = function.__name__.partition("_")[0]  # `unique` of `unique_all`
    if compute is None and module == "numpy" and family not in REFUSED:
        compute = getattr(jnp, function.__name__, None)
    if compute is None:
        hint = REFUSED.get(family)
        raise refused(
            f"{name} is not supported in a kernel",
            f"use {hint}" if hint else "docs/reference/kernels-in-numpy.md lists the functions that are",
        )
    values = [unwrapped(a) for a in args]
    options = {k: narrowed(v) if k == "dtype" and isinstance(v, str) else unwrapped(v) for k, v in kwargs.items()}

    def computed() -> Any:
        try:
            return compute(*values, **options)
        except (TypeError, ValueError) as error:
            if "implicit dtype promotion" in str(error):  # JAX names the dtypes in any order
                dtypes = sorted({v.dtype.name for v in values if hasattr(v, "dtype")})
                hint = "convert one of them: x.astype(np.float32)"
                raise refused(f"{name}: {' and '.join(dtypes)} have no common dtype", hint) from error
            with np.errstate(all="ignore"):
                function(*map(_zeros, values), **options)  # NumPy's error takes precedence
            raise

    return _wrapped(guarded(name, computed), function, [*values, *options.values()])


def _zeros(value: Any) -> Any:
    """Returns a value with NumPy arrays in place of JAX's."""
    if isinstance(value, list | tuple):
        return type(value)(map(_zeros, value))
    return np.broadcast_to(np.zeros((), value.dtype), value.shape) if isinstance(value, jax.Array) else value


def _wrapped(value: Any, function: Any, operands: list[Any]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_wrapped(v, function, operands) for v in value)
    if not isinstance(value, jax.Array):
        return value
    narrowed(value.dtype)
    result = TracedArray(value)
    result.iterations = _iterations(function, operands, result.shape)
    return result


_ELEMENTWISE = {np.clip, np.round, np.around, np.where, np.isclose}
_REDUCING = {np.argmax, np.argmin, np.amax, np.amin, np.count_nonzero, np.cumsum, np.mean, np.std, np.var}
_REDUCING |= set(_REDUCTIONS.values())


def _iterations(function: Any, operands: list[Any], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Returns the kind of an operation and the sizes of its loops; None for one that only moves elements."""
    if function is np.matmul or function is np.dot:
        a, b = map(np.shape, operands[:2])
        if not a or not b:
            return "elementwise", shape
        rows = shape if len(b) > 1 else (*shape, 1)
        return "matmul", (*rows, a[-1]) if len(a) > 1 else (*rows[:-1], 1, rows[-1], a[-1])
    if function in _REDUCING:
        return "reduction", np.shape(operands[0])
    return ("elementwise", shape) if isinstance(function, np.ufunc) or function in _ELEMENTWISE else None


def guarded(what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function; an error names the kernel's line."""
    try:
        return function(*args, **kwargs)
    except KernelgenError:
        raise
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        raise refused(
            f"{what} needs a value that is not known while the kernel is traced", "use np.where(condition, x, y)"
        ) from None
    except (TypeError, ValueError, IndexError, NotImplementedError, OverflowError) as error:
        raise refused(f"{what}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error


def unwrapped(value: Any, index: bool = False) -> Any:
    """Returns a value with JAX arrays in place of tensors and 32 bits in dtypes; in an index, lists become NumPy arrays."""
    if isinstance(value, type | np.dtype):
        return narrowed(value)
    if isinstance(value, TracedArray):
        return value if index and hasattr(value, "affine") else value.array
    if isinstance(value, tuple) or (isinstance(value, list) and not index):
        return type(value)(unwrapped(v, index) for v in value)
    return np.asarray(value) if isinstance(value, list) else value


def assigned(out: Any, value: Any) -> Any:
    """Writes a result to the array of `out=`."""
    if not isinstance(out, TracedArray):
        raise refused("out= is an array of the kernel", "make it with np.zeros in the kernel, or omit out=")
    out[...] = value
    return out


def narrowed(dtype: Any) -> np.dtype[Any]:
    """Returns a dtype; for 64 bits, its 32-bit counterpart.

    Raises:
        KernelgenError: Neuron devices have no such dtype.
    """
    wide: np.dtype[Any] = np.dtype(dtype)
    found = np.dtype(_NARROW.get(wide.name, wide))
    if not (jnp.issubdtype(found, np.floating) or found.kind in "iub"):
        raise refused(f"a kernel computes with numbers and bools, not with {found.name}")
    return found


def tensor(value: Any, dtype: Any = None) -> TracedArray:
    """Returns a value as a tensor: a NumPy array or a number as a constant, narrowed to 32 bits.

    Args:
        value: a tensor, an array, a number, or a list of those.
        dtype: the dtype to convert it to, or None.
    """
    if isinstance(value, TracedArray):
        return value if dtype is None or value.dtype == dtype else TracedArray(value.array.astype(dtype))
    if holds_tensor(value):
        return tensor(apply(np.stack, ([tensor(v) for v in value],), {}), dtype)
    found = np.asarray(value)
    return TracedArray(jnp.asarray(found.astype(narrowed(found.dtype) if dtype is None else dtype)))


def holds_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor, or a list with one at any depth."""
    return isinstance(value, TracedArray) or (isinstance(value, list | tuple) and any(map(holds_tensor, value)))


def cast(value: Any, dtype: Any) -> TracedArray:
    """Returns a tensor converted to a dtype. Conversion from float to integer truncates."""
    return TracedArray(tensor(value).array.astype(narrowed(dtype)))
