"""NumPy as a language of kernels: imports its files, and calls a kernel's function with tensors (`kernelgen.languages`)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError, Location
from kernelgen.languages import Call, CallResults, Language, environment
from kernelgen.languages.numpy import functions, scope  # noqa: F401  # `functions` fills the table that arrays ask
from kernelgen.languages.numpy.modules import PACKAGES, modules
from kernelgen.languages.numpy.places import is_users
from kernelgen.languages.numpy.scope import Trace
from kernelgen.languages.numpy.tensor import TracedArray, holds_tensor, narrowed, tensor
from nki_interpreter.standing_in import standing_in


class _NumPy:
    name = "numpy"

    @contextlib.contextmanager
    def loading(self, file: Path, env: Mapping[str, str], lowering: str) -> Iterator[None]:
        """Makes imports of nkipy and nkigen resolve to `kernelgen.languages.numpy`, and sets `env`."""
        with environment(env), standing_in(PACKAGES, modules()):
            yield

    def call(self, function: Callable[..., Any], call: Call) -> CallResults:
        parameters = [None if a is None else TracedArray(a, i) for i, a in enumerate(call.arguments)]
        trace = Trace(call.targets)
        token = scope.TRACE.set(trace)
        try:
            with _constructors():
                ordered, named = call.bound(parameters)
                returned = function(*ordered, **named)
        finally:
            scope.TRACE.reset(token)
        results = [] if returned is None else list(returned) if isinstance(returned, tuple | list) else [returned]
        for k, result in enumerate(results):
            if not isinstance(result, TracedArray | np.ndarray | np.generic | int | float):
                code = getattr(function, "__wrapped__", function).__code__
                message = f"kernel '{code.co_name}': result {k} is {type(result).__name__}, not an array"
                place = Location(code.co_filename, code.co_firstlineno, 1)
                raise KernelgenError(Diagnostic(message, place), exit_code=EXIT_FAILED)
        updated = {p.parameter: p.array for p in parameters if p is not None and p.parameter is not None and p.changed}
        notes = {"knobs": trace.knobs} if trace.knobs else {}
        return CallResults(tuple(tensor(r).array for r in results), updated, notes)


LANGUAGE: Language = _NumPy()


def _filled(value: Any) -> Callable[..., TracedArray]:
    def create(shape: Any, dtype: Any = np.float32, **_: Any) -> TracedArray:
        return TracedArray(jnp.full(shape, value, narrowed(dtype)))

    return create


def _full(shape: Any, fill_value: Any, dtype: Any = None, **_: Any) -> TracedArray:
    value = tensor(fill_value)
    return TracedArray(jnp.full(shape, value.array, value.dtype if dtype is None else narrowed(dtype)))


def _array(obj: Any, dtype: Any = None, **_: Any) -> Any:
    if not holds_tensor(obj):
        return _PLAIN["array"](obj, dtype)
    return TracedArray(tensor(obj, None if dtype is None else narrowed(dtype)).array)


_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "zeros": _filled(0),
    "ones": _filled(1),
    "empty": _filled(0),
    "full": _full,
    "array": _array,
    "asarray": _array,
}
_PLAIN: dict[str, Callable[..., Any]] = {name: getattr(np, name) for name in _CONSTRUCTORS}


@contextlib.contextmanager
def _constructors() -> Iterator[None]:
    """Makes NumPy's constructors return tensors, whose elements can be assigned, but only for a kernel's code."""

    def chosen(name: str) -> Callable[..., Any]:
        def construct(*args: Any, **kwargs: Any) -> Any:
            constructors = _CONSTRUCTORS if is_users(sys._getframe(1)) else _PLAIN
            return constructors[name](*args, **kwargs)

        return construct

    before = {name: getattr(np, name) for name in _CONSTRUCTORS}
    try:
        for name in _CONSTRUCTORS:
            setattr(np, name, chosen(name))
        yield
    finally:
        for name, function in before.items():
            setattr(np, name, function)
