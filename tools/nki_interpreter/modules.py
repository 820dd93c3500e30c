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
from nki_interpreter.errors import NkiError, NkiTypeError
from nki_interpreter.isa import constants, newer, older
from nki_interpreter.program import PSUM, SBUF
from nki_interpreter.standing_in import found_by_kernels
from nki_interpreter.tensors import NkiTensor


class _TensorType:
    """`nki.typing.tensor`: an annotation, with or without a shape."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, shape: Any) -> _TensorType:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return self._name


class _TensorModule(types.ModuleType):
    """`nki.tensor`: a module, and in published kernels an annotation, with or without a shape."""

    def __getitem__(self, shape: Any) -> _TensorModule:
        return self


class _NamedModule:
    """`tensor[[shape], dtype]`: a description in place of an array."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], list | tuple):
            return np.zeros(tuple(key[0]), np.dtype(key[1]))
        return self

    def __repr__(self) -> str:
        return "tensor"


def _module(name: str, names: dict[str, Any], kind: type[types.ModuleType] = types.ModuleType) -> types.ModuleType:
    module = kind(name)
    module.__path__ = []
    module.__dict__.update(names)
    return module


def _public(module: types.ModuleType) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}


def _no_effect(*args: Any, **kwargs: Any) -> Any:
    """A decorator that has no effect on values, bare or called."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


class _Latency:
    """The latency result of `benchmark`, which measures nothing without a device."""

    def get_latency_percentile(self, percentile: int) -> int:
        raise NkiError("err_no_device", "there is no device to measure a latency on")


def _benchmark(function: Any = None, **options: Any) -> Any:
    if function is None:
        return lambda f: _benchmark(f, **options)
    made = kernel.NkiKernel(function, older=True, **options)
    made.benchmark_result = types.SimpleNamespace(nc_latency=_Latency())  # type: ignore[attr-defined]
    return made


def _simulate_kernel(function: Any, *args: Any, **kwargs: Any) -> Any:
    made = function if isinstance(function, kernel.NkiKernel) else kernel.NkiKernel(function, older=True)
    return kernel.simulate(made, *args, **kwargs)


def _simulate(function: Any) -> Callable[..., Any]:
    made = function if isinstance(function, kernel.NkiKernel) else kernel.NkiKernel(function, older=False)

    def run(*args: Any, **kwargs: Any) -> Any:
        return kernel.simulate(made, *args, **kwargs)

    return run


def _typing() -> dict[str, Any]:
    return {"tensor": _NamedModule(), "mutable_tensor": _TensorType("mutable_tensor"), "scalar": _TensorType("scalar")}


def _tensor(name: str) -> types.ModuleType:
    return _module(name, {"NkiTensor": NkiTensor, "Tensor": NkiTensor}, _TensorModule)


_DECORATORS = """
    skip_middle_end_transformations enable_stack_allocator force_auto_alloc no_reorder multi_buffer allocate
    psum_stack_allocator sbuf_stack_allocator
""".split()


def _compiler() -> dict[str, Any]:
    return {
        "sbuf": SBUF,
        "psum": PSUM,
        **dict.fromkeys(_DECORATORS, _no_effect),
    }


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
    root = "neuronxcc.nki"
    isa = _module(f"{root}.isa", _instructions(older))
    isa.constants = _module(f"{root}.isa.constants", {**_public(constants), "dge_mode": constants.older_dge_mode})  # type: ignore[attr-defined]
    nl = _module(f"{root}.language", language.names())
    jit = kernel.decorator(True)
    names = {
        "jit": jit,
        "trace": jit,
        "baremetal": jit,
        "profile": jit,
        "benchmark": _benchmark,
        "simulate_kernel": _simulate_kernel,
        "language": nl,
        "isa": isa,
        "typing": _module(f"{root}.typing", _typing()),
        "compiler": _module(f"{root}.compiler", _compiler()),
        "tensor": _tensor(f"{root}.tensor"),
    }
    nki = _module(root, names)
    return {
        "neuronxcc": _module("neuronxcc", {"nki": nki, "__version__": "0"}),
        root: nki,
        nl.__name__: nl,
        isa.__name__: isa,
        f"{root}.isa.constants": isa.constants,
        f"{root}.typing": names["typing"],
        f"{root}.compiler": names["compiler"],
        f"{root}.tensor": names["tensor"],
        "torch_neuronx": _module("torch_neuronx", {"nki_jit": jit, "nki_call": _simulate_kernel}),
    }


def _as_dtype(value: Any) -> Any:
    """Returns the dtype for a NumPy class: kernels of this generation compare dtypes by text, and a tensor's is 'float32'."""
    return np.dtype(value) if isinstance(value, type) and issubclass(value, np.generic) else value


@found_by_kernels
def newer_modules() -> dict[str, types.ModuleType]:
    """Returns the modules of `nki`, by name."""
    isa = _module("nki.isa", {**_instructions(newer), "dma_engine": constants.dma_engine})
    isa.constants = _module("nki.isa.constants", {**_public(constants), "dge_mode": constants.newer_dge_mode})  # type: ignore[attr-defined]
    nl = _module("nki.language", {name: _as_dtype(value) for name, value in language.names().items()})
    nl.dtypes = _module("nki.language.dtypes", {k: v for k, v in vars(nl).items() if isinstance(v, type | np.dtype)})  # type: ignore[attr-defined]
    nl.tile_size.__class__.__module__ = "nki.language"
    names = {
        "jit": kernel.decorator(False),
        "simulate": _simulate,
        "language": nl,
        "isa": isa,
        "typing": _module("nki.typing", _typing()),
        "compiler": _module("nki.compiler", _compiler()),
        "tensor": _tensor("nki.tensor"),
        "dtype": nl.dtypes,
        "contextlib": contextlib,
    }
    return {
        "nki": _module("nki", names),
        "nki.language": nl,
        "nki.language.dtypes": nl.dtypes,
        "nki.dtype": nl.dtypes,
        "nki.isa": isa,
        "nki.isa.constants": isa.constants,
        "nki.typing": names["typing"],
        "nki.compiler": names["compiler"],
        "nki.tensor": names["tensor"],
    }
