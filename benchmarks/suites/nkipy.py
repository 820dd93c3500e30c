"""`nkipy` and `nkigen` for the tests of AWS's repository nkipy: kernelgen traces, lowers and runs a kernel on the CPU.

A kernel's HLO is the canonical HLO that a compiler receives. The module omits nkipy's internals: registry of
operations, tables, MLIR.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernelgen.errors import KernelgenError
from kernelgen.hlo import execute, proto
from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.languages import Call, nki
from kernelgen.languages import numpy as kernels
from kernelgen.languages.numpy import modules
from kernelgen.languages.numpy.tensor import TracedArray, narrowed
from kernelgen.lowering.function import lower_function
from nki_interpreter import language
from nki_interpreter.isa import newer

Array = np.ndarray[Any, Any]

_MODULE = proto.module_class({"Instruction": "*int64 dimensions 14"})


def narrow(array: Array, name: str = "") -> Array:
    """Returns an array as a kernel receives it; warns if its dtype has 64 bits."""
    dtype = narrowed(array.dtype)
    if dtype == array.dtype:
        return array
    warnings.warn(f"{name or 'an array'} is {array.dtype}; a kernel gets it as {dtype}", stacklevel=3)
    return array.astype(dtype)


# --- tracing ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """A parameter or result of a kernel."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Alias:
    """A result that shares a parameter's memory."""

    output_index: int
    param_index: int
    param_name: str
    is_user_returned: bool


@dataclass(frozen=True)
class Code:
    """A kernel as HLO.

    Attributes:
        executable: the canonical HLO, compiled for the CPU.
        parameters, outputs: its parameters and results, with nkipy's names.
        aliases: the results that share a parameter's memory.
        operations: its instructions: `op_name`, and `attributes` with the first of its dimensions.
    """

    executable: Any
    parameters: tuple[Named, ...]
    outputs: tuple[Named, ...]
    aliases: tuple[Alias, ...]
    operations: tuple[Any, ...]

    @property
    def inputs(self) -> tuple[Named, ...]:
        return self.parameters

    @property
    def auto_aliased_indices(self) -> set[int]:
        return {a.output_index for a in self.aliases if not a.is_user_returned}


class Bound:
    """A kernel's arguments: which of them are arrays, and a call of the function with other values in their places."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.function = function
        self.bound = inspect.signature(function).bind(*args, **kwargs)
        self.bound.apply_defaults()
        self.names: list[str] = []
        self.originals: list[Array] = []
        self._visit(self._note)

    def _note(self, name: str, array: Array) -> Array:
        self.names.append(name)
        self.originals.append(array)
        return array

    def _visit(self, put: Callable[[str, Array], Any]) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}

        def seen(name: str, value: Any) -> Any:
            return put(name, value) if isinstance(value, np.ndarray) else value

        for name, value in self.bound.arguments.items():
            kind = self.bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                args += [seen(f"{name}{i}" if i else name, item) for i, item in enumerate(value)]
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs.update({key: seen(key, item) for key, item in value.items()})
            elif kind is inspect.Parameter.KEYWORD_ONLY:
                kwargs[name] = seen(name, value)
            else:
                args.append(seen(name, value))
        return args, kwargs

    def call(self, tensors: Sequence[Any]) -> Any:
        left = iter(tensors)
        args, kwargs = self._visit(lambda name, array: next(left))
        return self.function(*args, **kwargs)


def lowered(function: Callable[..., Any], bound: Bound, arrays: Sequence[Array]) -> Code:
    """Returns a kernel's HLO.

    Raises:
        NotImplementedError: the kernel uses something that is not supported.
        Exception: the exception that the kernel's code raised.
    """
    count = 0

    @functools.wraps(function)  # so that messages have its file and line
    def kernel(*tensors: Any) -> Any:
        nonlocal count
        returned = bound.call(tensors)
        count = 0 if returned is None else len(returned) if isinstance(returned, tuple | list) else 1
        return returned

    call = Call(tuple((a.shape, a.dtype.name) for a in arrays))
    try:
        found = lower_function("numpy", kernel, call, getattr(function, "__name__", "kernel"))
    except KernelgenError as error:
        raise _plain(error) from error
    hlo = canonicalize(found.hlo, found.inputs, found.outputs, aliases=found.aliases)
    module = proto.parse(hlo, _MODULE)
    changed = set(found.aliases.values())
    executable = execute.compile_for_cpu(hlo)
    aliases = tuple(Alias(k, i, bound.names[i], k < count) for k, i in sorted(found.aliases.items()))
    operations = tuple(
        SimpleNamespace(op_name=i.opcode, attributes={"dimension": next(iter(i.dimensions), None)})
        for computation in module.computations
        for i in computation.instructions
    )
    return Code(
        executable,
        tuple(
            Named(f"{name}.must_alias_input" if i in changed else name, a.shape, a.dtype)
            for i, (name, a) in enumerate(zip(bound.names, arrays, strict=True))
        ),
        tuple(
            Named(bound.names[found.aliases[k]] if k in found.aliases else f"output{k}", shape, np.dtype(dtype))
            for k, (dtype, shape) in enumerate(executable.results)
        ),
        aliases,
        operations,
    )


def _plain(error: KernelgenError) -> Exception:
    """Returns the error that NumPy raises for the same mistake, if it has one, else NotImplementedError."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Exception) and not isinstance(cause, KernelgenError):
            return cause
        cause = cause.__cause__
    return NotImplementedError(str(error))


class Kernel:
    """`NKIPyKernel`: a function that is lowered for the arguments of each call."""

    def __init__(self, function: Callable[..., Any], backend: str = "hlo") -> None:
        self.func = function
        self.backend = backend
        self._code: Code | None = None
        self.__name__ = getattr(function, "__name__", "kernel")

    @classmethod
    def trace(cls, function: Callable[..., Any] | None = None, backend: str = "hlo") -> Any:
        return (lambda f: cls(f, backend)) if function is None else cls(function, backend)

    def specialize(self, *args: Any, **kwargs: Any) -> Code:
        bound = Bound(self.func, args, kwargs)
        self._code = lowered(self.func, bound, _narrowed(bound))
        return self._code


def _narrowed(bound: Bound) -> list[Array]:
    return [narrow(a, name) for name, a in zip(bound.names, bound.originals, strict=True)]


# --- running ---------------------------------------------------------------------------------------------------------------


def run(kernel: Kernel, *args: Any, artifacts_dir: Any = None, **kwargs: Any) -> Any:
    """Runs a kernel, updates the arguments that it changes, and returns its function's result."""
    bound = Bound(kernel.func, args, kwargs)
    arrays = _narrowed(bound)
    kernel._code = code = lowered(kernel.func, bound, arrays)
    results = code.executable.run(arrays)
    for alias in code.aliases:
        np.copyto(bound.originals[alias.param_index], results[alias.output_index], casting="unsafe")
    returned = tuple(r for k, r in enumerate(results) if k not in code.auto_aliased_indices)
    return returned[0] if len(returned) == 1 else returned or None


class DeviceTensor:
    """An array in the place of a device's tensor."""

    def __init__(self, array: Array) -> None:
        self.array = array

    @classmethod
    def from_numpy(cls, array: Array, *_: Any, **__: Any) -> DeviceTensor:
        return cls(np.array(array))

    def numpy(self) -> Array:
        return self.array


class DeviceKernel:
    """A kernel that is called with arrays by the names of its parameters and results."""

    def __init__(self, code: Code) -> None:
        self.code = code

    @classmethod
    def compile_and_load(
        cls, kernel: Kernel, *args: Any, name: str = "", use_cached_if_exists: bool = False, **kwargs: Any
    ) -> DeviceKernel:
        return cls(kernel.specialize(*args, **kwargs))

    def __call__(self, inputs: Mapping[str, DeviceTensor], outputs: Mapping[str, DeviceTensor], **_: Any) -> None:
        results = self.code.executable.run([inputs[p.name].array for p in self.code.parameters])
        for named, result in zip(self.code.outputs, results, strict=True):
            outputs[named.name].array = result


# --- dtypes ----------------------------------------------------------------------------------------------------------------


class _WeakInt:
    """The type of a Python integer."""


class _WeakFloat:
    """The type of a Python float."""


_WEAK = {_WeakInt: 1, _WeakFloat: 1.0}


def _key(operand: Any) -> Any:
    if isinstance(operand, bool):
        return np.bool_
    if isinstance(operand, int | float) and not hasattr(operand, "dtype"):
        return _WeakInt if isinstance(operand, int) else _WeakFloat
    return np.dtype(operand.dtype).type


def _operand(kind: Any) -> Any:
    return _WEAK[kind] if kind in _WEAK else np.zeros((), kind)


def _common(*kinds: Any) -> Any:
    if any(k not in _WEAK and np.dtype(k) == np.float64 for k in kinds):
        raise TypeError("Unsupported dtype float64")
    try:
        return narrowed(jnp.result_type(*map(_operand, kinds))).type
    except ValueError as error:
        raise TypeError(f"No implicit dtype promotion path: {error}") from error


def common_type(*operands: Any) -> np.dtype[Any]:
    """Returns the common dtype of operands.

    Raises:
        TypeError: they have none.
    """
    kinds = [_key(o) for o in operands]
    if all(k in _WEAK for k in kinds):
        raise TypeError("No implicit dtype promotion path between numbers of Python")
    return np.dtype(_common(*kinds))


def scalar_dtype(value: Any) -> np.dtype[Any]:
    """Returns the dtype of a number."""
    if getattr(value, "dtype", None) == np.float64:
        raise ValueError("float64 is not supported")
    return narrowed(jnp.result_type(value))


# --- nkigen ----------------------------------------------------------------------------------------------------------------


def run_kernel_test(
    traced_func: Any,
    *,
    inputs: Sequence[Array] | None = None,
    reference_output: Any = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 42,
    **_: Any,
) -> None:
    """Compares a kernel's results with the function's own results, or with a reference; does not check the text of an IR.

    Args:
        traced_func: the kernel, with `input_specs`.
        inputs: its arguments; random by default, according to the specs.
        reference_output: the expected result; by default, the function's result for the same arrays.
        rtol, atol: the tolerance; 1e-5 and 1e-6 by default. XLA rounds a product and its sum once, and NumPy twice. If
            they cancel, the difference exceeds the 1e-8 of nkigen's harness.
        seed: the seed of the random arguments.
    """
    arrays = list(inputs) if inputs is not None else _random(traced_func.input_specs, seed)
    function = inspect.unwrap(traced_func)
    wanted = function(*[a.copy() for a in arrays]) if reference_output is None else reference_output
    found = run(Kernel(traced_func), *arrays)
    one, other = (list(x) if isinstance(x, tuple | list) else [x] for x in (found, wanted))
    assert len(one) == len(other), f"{len(one)} results, {len(other)} expected"
    for have, want in zip(one, other, strict=True):
        want = np.asarray(want)
        assert have.shape == want.shape
        limits = {"rtol": 1e-5 if rtol is None else rtol, "atol": 1e-6 if atol is None else atol}
        np.testing.assert_allclose(have.astype(np.float64), want.astype(np.float64), **limits)


def _random(specs: Any, seed: int) -> list[Array]:
    generator = np.random.RandomState(seed)
    found: list[Array] = []
    for shape, dtype in specs:
        kind, bits = dtype.rstrip("0123456789"), dtype.lstrip("fiu")
        name = {"f": "float", "i": "int", "u": "uint"}[kind] + bits
        values = generator.rand(*shape) if kind == "f" else generator.randint(0, 100, size=shape)
        found.append(np.asarray(values).astype(name))
    return found


class Mode:
    """The ways in which nkigen's tests verify a kernel; here, all of them run it."""

    LLVM = HW = STRING_CHECK = FILECHECK = 0


def _nkigen_test(input_specs: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    def mark(function: Callable[..., Any]) -> Callable[[], None]:
        def test() -> None:
            run_kernel_test(kernels.trace(input_specs=input_specs)(function), **options)

        test.__name__ = function.__name__
        return test

    return mark


# --- kernel_builder: NKI's instructions inside a kernel in NumPy ----------------------------------------------------------


@dataclass(frozen=True)
class Described:
    """`kernel_builder.Tensor`: a parameter of a kernel."""

    shape: tuple[int, ...]
    dtype: Any
    buffer: Any


class Built(str):
    """The result of `build_kernel`, which is passed on as text.

    Attributes:
        kernel: a function in NKI from the inputs to the outputs.
    """

    kernel: Callable[..., Any]

    @property
    def operation(self) -> Built:
        return self

    def get_asm(self, **_: Any) -> Built:
        return self


def build_kernel(
    function: Callable[..., Any],
    input_specs: Mapping[str, Described],
    output_specs: Mapping[str, Described],
    **static: Any,
) -> Built:
    """Returns a kernel whose function takes its outputs as arguments."""

    def kernel(*inputs: Any) -> Any:
        outputs = [language.names()["ndarray"](s.shape, s.dtype, buffer=s.buffer) for s in output_specs.values()]
        function(
            **dict(zip(input_specs, inputs, strict=True)), **dict(zip(output_specs, outputs, strict=True)), **static
        )
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    built = Built(function.__name__)
    built.kernel = kernel
    return built


class CustomOp:
    """A kernel of `kernel_builder` that a kernel in NumPy calls; called with arrays, it runs its reference."""

    def __init__(self, nisa_mlir: Built, reference_fn: Callable[..., Any] | None = None, **_: Any) -> None:
        self.kernel = nisa_mlir.kernel
        self.reference = reference_fn

    @classmethod
    def from_kernel_builder(
        cls,
        kernel_func: Callable[..., Any],
        input_specs: Mapping[str, Described],
        output_specs: Mapping[str, Described],
        reference_fn: Callable[..., Any] | None = None,
        **static: Any,
    ) -> CustomOp:
        return cls(build_kernel(kernel_func, input_specs, output_specs, **static), reference_fn)

    def __call__(self, *arrays: Any) -> Any:
        if not any(isinstance(a, TracedArray) for a in arrays):
            assert self.reference is not None, "there is no reference to compute with arrays"
            return self.reference(*arrays)
        results = tuple(TracedArray(r) for r in nki.inline(self.kernel, *(a.array for a in arrays)))
        return results[0] if len(results) == 1 else results


def _activation(dst: Any, src: Any, bias: Any, scale: Any, op: Any) -> None:
    newer.activation(dst=dst, op=op, data=src, bias=bias, scale=scale)


def kernel_builder() -> dict[str, Any]:
    """Returns the names in `nki.compiler.kernel_builder`."""
    names = language.names()
    functions = {n: getattr(newer, n) for n in dir(newer) if not n.startswith("_")}
    isa = SimpleNamespace(**{**functions, "activation": _activation, "activation_function": SimpleNamespace(**names)})

    def ndarray(shape: Any, dtype: Any, buffer: Any) -> Any:
        return names["ndarray"](shape, dtype, buffer=buffer)

    return {**names, "ndarray": ndarray, "isa": isa, "Tensor": Described, "build_kernel": build_kernel}


# --- imported names -------------------------------------------------------------------------------------------------------


def names() -> dict[str, dict[str, Any]]:
    """Returns the names in each of the modules, by module."""
    runtime = {
        "DeviceKernel": DeviceKernel,
        "DeviceTensor": DeviceTensor,
        "baremetal_run_traced_kernel": run,
        "is_neuron_compatible": lambda: True,
    }
    return {
        **modules.names(),
        "nkipy.core.backend.hlo": {
            "find_common_type_hlo": common_type,
            "scalar_dtype_hlo": scalar_dtype,
            "_lookup_promotion": _common,
            "_get_type_key": _key,
            "_WeakInt": _WeakInt,
            "_WeakFloat": _WeakFloat,
            "_TYPE_PROMOTION_TABLE": {},
        },
        "nkipy.core.compile": {"compile_to_neff": _compile, "nkipy_compiler_args": "", "trace": Kernel.trace},
        "nkipy.core.trace": {"NKIPyKernel": Kernel, "_sanitize_array_dtype": narrow},
        "nkipy.runtime": runtime,
        "nkipy.runtime.execute": runtime,
        "nkigen.custom_op": {"CustomOp": CustomOp},
        "nki.compiler.kernel_builder": kernel_builder(),
        # The tests' own module of this name, in their folder.
        "harness": {"run_kernel_test": run_kernel_test, "nkigen_test": _nkigen_test, "Mode": Mode, "TRACE": "trace"},
    }


def _compile(kernel: Kernel, *_: Any, **__: Any) -> None:
    """Replaces the compilation of a kernel, which `specialize` has done."""
    assert kernel._code is not None
