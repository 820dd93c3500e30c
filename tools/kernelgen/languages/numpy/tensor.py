"""An array under a trace: NumPy's operators, methods and functions on it become JAX operations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from kernelgen.errors import KernelgenError
from kernelgen.languages.numpy import dtypes, scope
from kernelgen.languages.numpy.dtypes import narrowed
from kernelgen.languages.numpy.places import refused

F = TypeVar("F", bound=Callable[..., Any])

N: Any = np
"""NumPy, which dispatches on tensors; its types do not include them."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""The implementation of each NumPy function and ufunc, with NumPy's arguments. `operator.getitem` and `operator.setitem` are for
elements; the latter returns the array's new content.

Modules imported by `functions` fill it: they use the class of arrays, so that class can't import them.
"""

REDUCTIONS: dict[Any, Any] = {np.add: np.sum, np.multiply: np.prod, np.maximum: np.max, np.minimum: np.min}
REDUCTIONS |= {np.logical_and: np.all, np.logical_or: np.any}
"""The function that computes each `ufunc.reduce`."""

INSTEAD = {
    "positive": "np.copy(x)",
    "arctan2": "np.arctan(y / x), and np.where for the quadrant",
    "sort": "kernelgen.languages.numpy.topk",
    "argsort": "kernelgen.languages.numpy.topk",
    "nonzero": "np.where(condition, x, y): how many there are is not known while tracing",
    "unique": "np.where(condition, x, y): how many there are is not known while tracing",
    "float_power": "np.power",
    "fmax": "np.maximum",
    "fmin": "np.minimum",
    "fmod": "np.remainder",
    "cbrt": "np.power(x, 1 / 3)",
    "log10": "np.log(x) / np.log(10.0)",
    "exp2": "np.exp(x * np.log(2.0))",
    "inner": "np.matmul",
    "tensordot": "np.matmul or np.einsum",
    "vdot": "np.dot",
    "nan_to_num": "np.where(np.isnan(x), 0, x)",
    "isinf": "np.abs(x) == np.inf",
    "median": "kernelgen.languages.numpy.topk",
    "insert": "np.concatenate",
    "delete": "np.concatenate",
    "append": "np.concatenate",
    "array_split": "np.split",
}
"""Replacements for unsupported functions."""


def implements(*functions: Any) -> Callable[[F], F]:
    """Marks a function as the implementation of some NumPy functions."""

    def mark(made: F) -> F:
        FUNCTIONS.update(dict.fromkeys(functions, made))
        return made

    return mark


class TracedArray:
    """An array whose values are not available while tracing.

    Attributes:
        array: the JAX array; an assignment to elements replaces it.
        parameter: number of the kernel's parameter that it is, or None.
        changed: whether elements were assigned.
        iterations: sizes of the loops of the NumPy operation that computes it, if any: for knobs.
    """

    __array_priority__ = 1000
    __hash__ = object.__hash__

    def __init__(self, array: Any, parameter: int | None = None) -> None:
        self.array = array
        self.parameter = parameter
        self.changed = False
        self.iterations: tuple[str, tuple[int, ...]] | None = None
        self._body = scope.body()

    # --- known values -----------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        found: np.dtype[Any] = np.dtype(self.array.dtype)
        return found

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along each dimension, as in a contiguous NumPy array."""
        return tuple(math.prod(self.shape[k + 1 :]) * self.itemsize for k in range(self.ndim))

    @property
    def T(self) -> Any:
        return N.transpose(self)

    def __len__(self) -> int:
        if not self.shape:
            raise refused("an array of rank 0 has no length")
        return self.shape[0]

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

    def _unknown(self, what: str) -> KernelgenError:
        return refused(f"{what} needs a value that is not known while the kernel is traced")

    def __int__(self) -> int:
        raise self._unknown("int(), or an assignment to an element of an array of NumPy's,")

    def __float__(self) -> float:
        raise self._unknown("float(), or an assignment to an element of an array of NumPy's,")

    def __index__(self) -> int:
        raise self._unknown("an index or size of Python")

    def item(self, *args: Any) -> Any:
        raise self._unknown("item()")

    def tolist(self) -> Any:
        raise self._unknown("tolist()")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise refused(
            "an array that is not known while the kernel is traced can't be made one of NumPy's",
            "np.stack makes an array of several; elements are assigned to arrays that np.zeros or np.copy made in the kernel",
        )

    # --- NumPy's protocols --------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if method == "reduce" and ufunc in REDUCTIONS:
            kwargs.setdefault("axis", 0)
            made = apply(REDUCTIONS[ufunc], inputs, kwargs)
        elif method == "outer":
            one, other = map(tensor, inputs)
            made = apply(ufunc, (TracedArray(one.array.reshape(one.shape + (1,) * other.ndim)), other), kwargs)
        elif method == "__call__":
            made = apply(ufunc, inputs, kwargs)
        else:
            raise refused(f"np.{ufunc.__name__}.{method} is not supported")
        return made if out is None else assigned(out[0], made)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out = kwargs.pop("out", None) if "out" in kwargs else None
        made = apply(function, args, kwargs)
        return made if out is None else assigned(out, made)

    # --- elements -----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        return guarded("an index", FUNCTIONS[operator.getitem], self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.replace(guarded("an assignment to elements", FUNCTIONS[operator.setitem], self, index, value))

    def replace(self, array: Any) -> None:
        """Replaces the tensor's content by one of the same shape and dtype."""
        if self._body is not scope.body():
            raise refused(
                "the body of fori_loop changes an array from outside of it",
                "pass the array in init, change it in the body and return it",
            )
        self.array = array
        self.changed = True

    # --- methods ------------------------------------------------------------------------------------------------------

    def astype(self, dtype: Any, **_: Any) -> Any:
        return cast(self, dtype)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        return N.reshape(self, shape[0] if len(shape) == 1 else shape, **kwargs)

    def transpose(self, *axes: Any) -> Any:
        order = axes[0] if len(axes) == 1 else axes or None
        return N.transpose(self, order)

    def ravel(self) -> Any:
        return self.reshape(-1)

    flatten = ravel

    def fill(self, value: Any) -> None:
        self[...] = value


def _method(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "all any argmax argmin clip copy cumsum diagonal dot max mean min prod repeat round squeeze std sum swapaxes take trace var"
).split():
    setattr(TracedArray, _name, _method(_name))


def _operator(ufunc: Any) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    return (lambda self, other: ufunc(self, other)), (lambda self, other: ufunc(other, self))


for _name, _ufunc in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "matmul": np.matmul,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}.items():
    _plain, _reverse = _operator(_ufunc)
    setattr(TracedArray, f"__{_name}__", _plain)
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(TracedArray, f"__r{_name}__", _reverse)

_UNARY: dict[str, Any] = {"neg": np.negative, "abs": np.abs, "invert": np.invert, "pos": np.copy}
for _name, _unary in _UNARY.items():
    setattr(TracedArray, f"__{_name}__", (lambda function: lambda self: function(self))(_unary))


def apply(function: Any, args: Any, kwargs: Any) -> Any:
    """Computes one of NumPy's functions.

    Raises:
        KernelgenError: it is not supported, or not with these arguments.
    """
    module = getattr(function, "__module__", None) or "numpy"
    name = f"{module.replace('numpy', 'np', 1)}.{function.__name__}"
    made = FUNCTIONS.get(function)
    if made is None:
        hint = INSTEAD.get(function.__name__)
        raise refused(
            f"{name} is not supported in a kernel",
            f"use {hint}" if hint else "docs/reference/kernels-in-numpy.md lists the functions that are",
        )
    return guarded(name, made, *args, **kwargs)


def guarded(what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function; an error names the kernel's line."""
    try:
        return function(*args, **kwargs)
    except KernelgenError:
        raise
    except (TypeError, ValueError, IndexError, NotImplementedError, OverflowError) as error:
        raise refused(f"{what}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error


def assigned(out: Any, value: Any) -> Any:
    """Writes a result to the array of `out=`."""
    if not isinstance(out, TracedArray):
        raise refused("out= is an array of the kernel", "make it with np.zeros in the kernel, or omit out=")
    out[...] = value
    return out


def tensor(value: Any, dtype: Any = None) -> TracedArray:
    """Returns a value as a tensor: a NumPy array or a number as a constant, narrowed to 32 bits.

    Args:
        value: a tensor, an array, a number, or a list of those.
        dtype: the dtype to convert it to, or None.
    """
    import jax.numpy as jnp

    if isinstance(value, TracedArray):
        return value if dtype is None or value.dtype == dtype else TracedArray(value.array.astype(dtype))
    if isinstance(value, list | tuple) and any(isinstance(v, TracedArray) for v in value):
        return tensor(N.stack([tensor(v) for v in value]), dtype)
    found = np.asarray(value)
    return TracedArray(jnp.asarray(found.astype(narrowed(found.dtype) if dtype is None else dtype)))


def cast(value: Any, dtype: Any) -> TracedArray:
    """Returns a tensor converted to a dtype. Conversion from float to integer truncates."""
    return TracedArray(tensor(value).array.astype(narrowed(dtype)))


def together(*operands: Any, dtype: Any = None) -> list[Any]:
    """Returns operands as JAX arrays of their common dtype, or of `dtype`."""
    common = dtypes.promoted(*(_number(o) for o in operands)) if dtype is None else narrowed(dtype)
    return [tensor(o, common).array for o in operands]


def _number(operand: Any) -> Any:
    return tensor(operand) if isinstance(operand, list | tuple) else operand
