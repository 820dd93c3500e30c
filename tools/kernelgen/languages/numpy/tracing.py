"""One call of a kernel's function with tensors, and its effects: results, changed parameters, knobs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError, Location
from kernelgen.languages.numpy import functions, scope  # noqa: F401  # `functions` fills the table that arrays ask
from kernelgen.languages.numpy.creation import filled
from kernelgen.languages.numpy.places import is_users
from kernelgen.languages.numpy.scope import Trace
from kernelgen.languages.numpy.tensor import TracedArray, cast, tensor
from kernelgen.languages.protocol import Call, CallResults


def traced(function: Callable[..., Any], call: Call) -> CallResults:
    """Calls a kernel's function.

    Raises:
        KernelgenError: the function breaks a rule for kernels.
    """
    parameters = [None if a is None else TracedArray(a, i) for i, a in enumerate(call.arguments)]
    made = Trace(call.targets)
    token = scope.TRACE.set(made)
    try:
        with _constructors():
            ordered, named = call.bound(parameters)
            returned = function(*ordered, **named)
    finally:
        scope.TRACE.reset(token)
    results = [] if returned is None else list(returned) if isinstance(returned, tuple | list) else [returned]
    for k, result in enumerate(results):
        if not isinstance(result, TracedArray | np.ndarray | np.generic | int | float):
            raise _at(function, f"result {k} is {type(result).__name__}, not an array")
    updated = {p.parameter: p.array for p in parameters if p is not None and p.parameter is not None and p.changed}
    notes = {"knobs": made.knobs} if made.knobs else {}
    return CallResults(tuple(tensor(r).array for r in results), updated, notes)


def _at(function: Callable[..., Any], message: str) -> KernelgenError:
    code = getattr(function, "__wrapped__", function).__code__
    place = Location(code.co_filename, code.co_firstlineno, 1)
    return KernelgenError(Diagnostic(f"kernel '{code.co_name}': {message}", place), exit_code=EXIT_FAILED)


def _by_user(own: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is `own` for a kernel's code, and `other` for NumPy's and JAX's code."""
    import sys

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (own if is_users(sys._getframe(1)) else other)(*args, **kwargs)

    return chosen


def _array(obj: Any, dtype: Any = None, **_: Any) -> Any:
    if _holds_tensor(obj):
        return cast(obj, dtype) if dtype is not None else TracedArray(tensor(obj).array)
    return _PLAIN["array"](obj, dtype)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, TracedArray) or (isinstance(value, list | tuple) and any(map(_holds_tensor, value)))


def _of_size(value: Any) -> Callable[..., Any]:
    def make(shape: Any, dtype: Any = None, *_: Any, **__: Any) -> TracedArray:
        return filled(shape, value, np.float32 if dtype is None else dtype)

    return make


def _full(shape: Any, fill_value: Any, dtype: Any = None, *_: Any, **__: Any) -> TracedArray:
    found = tensor(fill_value).dtype if dtype is None else dtype
    return filled(shape, fill_value, found)


_OWN: dict[str, Callable[..., Any]] = {
    "zeros": _of_size(0),
    "ones": _of_size(1),
    "empty": _of_size(0),
    "full": _full,
    "array": _array,
    "asarray": _array,
}
_PLAIN: dict[str, Callable[..., Any]] = {name: getattr(np, name) for name in _OWN}


@contextlib.contextmanager
def _constructors() -> Iterator[None]:
    """Makes NumPy's constructors return tensors, whose elements can be assigned, but only for a kernel's code."""
    before = {name: getattr(np, name) for name in _OWN}
    try:
        for name, own in _OWN.items():
            setattr(np, name, _by_user(own, _PLAIN[name]))
        yield
    finally:
        for name, function in before.items():
            setattr(np, name, function)
