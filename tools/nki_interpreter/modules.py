"""The modules that a kernel's imports resolve to, for both generations."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from nki_interpreter import checks, kernel, language
from nki_interpreter.errors import NkiTypeError
from nki_interpreter.isa import constants, newer, older
from nki_interpreter.program import PSUM, SBUF
from nki_interpreter.standing_in import found_by_kernels, made
from nki_interpreter.tensors import NkiTensor


class _TensorType:
    """An annotation of `nki.typing`, with or without a shape."""

    def __getitem__(self, shape: Any) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class _MutableTensor(_TensorType):
    def __repr__(self) -> str:
        return "mutable_tensor"


class _Tensor(_TensorType):
    """`tensor[[shape], dtype]`: a description in place of an array."""

    def __getitem__(self, shape: Any) -> Any:
        if isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[0], list | tuple):
            return np.zeros(tuple(shape[0]), np.dtype(shape[1]))
        return self

    def __repr__(self) -> str:
        return "tensor"


class _TensorModule(types.ModuleType):
    """`nki.tensor`: a module, and in published kernels an annotation, with or without a shape."""

    def __getitem__(self, shape: Any) -> _TensorModule:
        return self


def _public(module: types.ModuleType) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}


def _no_effect(*args: Any, **kwargs: Any) -> Any:
    """A decorator that has no effect on values, bare or called."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


def _kernel(function: Any, older: bool) -> kernel.NkiKernel:
    return function if isinstance(function, kernel.NkiKernel) else kernel.NkiKernel(function, older=older)


def _simulate_kernel(function: Any, *args: Any, **kwargs: Any) -> Any:
    return kernel.simulate(_kernel(function, True), *args, **kwargs)


def _simulate(function: Any) -> Callable[..., Any]:
    return functools.partial(kernel.simulate, _kernel(function, False))


_DECORATORS = """
    skip_middle_end_transformations enable_stack_allocator force_auto_alloc no_reorder multi_buffer allocate
    psum_stack_allocator sbuf_stack_allocator
""".split()


def _modules(
    root: str, names: dict[str, Any], language: dict[str, Any], isa: types.ModuleType, dge_mode: Any
) -> dict[str, types.ModuleType]:
    """Returns the modules of a generation, by name; `names` and `language` are the contents of two of them."""
    modules = made(
        {
            root: names,
            f"{root}.language": language,
            f"{root}.isa": _instructions(isa),
            f"{root}.isa.constants": {**_public(constants), "dge_mode": dge_mode},
            f"{root}.typing": {"tensor": _Tensor(), "mutable_tensor": _MutableTensor(), "scalar": _TensorType()},
            f"{root}.compiler": {"sbuf": SBUF, "psum": PSUM, **dict.fromkeys(_DECORATORS, _no_effect)},
            f"{root}.tensor": {"NkiTensor": NkiTensor, "Tensor": NkiTensor},
        }
    )
    modules[f"{root}.tensor"].__class__ = _TensorModule
    return modules


def _instructions(module: types.ModuleType) -> dict[str, Any]:
    """Returns a module's public names; its functions get one more parameter: the instruction's name."""
    return {
        key: _named(value) if isinstance(value, types.FunctionType) and ".isa." in value.__module__ else value
        for key, value in _public(module).items()
    }


def _named(function: types.FunctionType) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def named(*args: Any, name: Any = None, **kwargs: Any) -> Any:
        checks.name(name)
        try:
            return function(*args, **kwargs)
        except TypeError:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as wrong:
                raise NkiTypeError("err_arguments", f"{function.__name__}: {wrong}") from None
            raise

    return named


@found_by_kernels
def older_modules() -> dict[str, types.ModuleType]:
    """Returns the modules of `neuronxcc.nki`, by name."""
    jit = kernel.decorator(True)
    names = {**dict.fromkeys("jit trace baremetal profile benchmark".split(), jit), "simulate_kernel": _simulate_kernel}
    modules = _modules("neuronxcc.nki", names, language.names(), older, constants.older_dge_mode)
    modules["neuronxcc"].__dict__["__version__"] = "0"
    return modules | made({"torch_neuronx": {"nki_jit": jit, "nki_call": _simulate_kernel}})


def _as_dtype(value: Any) -> Any:
    """Returns the dtype for a NumPy class: kernels of this generation compare dtypes by text, and a tensor's is 'float32'."""
    return np.dtype(value) if isinstance(value, type) and issubclass(value, np.generic) else value


@found_by_kernels
def newer_modules() -> dict[str, types.ModuleType]:
    """Returns the modules of `nki`, by name."""
    names = {"jit": kernel.decorator(False), "simulate": _simulate, "contextlib": contextlib}
    nl = {name: _as_dtype(value) for name, value in language.names().items()}
    modules = _modules("nki", names, nl, newer, constants.newer_dge_mode)
    dtypes = types.ModuleType("nki.language.dtypes")
    dtypes.__dict__.update((k, v) for k, v in nl.items() if isinstance(v, type | np.dtype))
    modules["nki.language"].__dict__["dtypes"] = modules["nki"].__dict__["dtype"] = dtypes
    return modules | {"nki.language.dtypes": dtypes, "nki.dtype": dtypes}
