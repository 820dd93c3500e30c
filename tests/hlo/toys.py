"""Small emitters and modules for the tests of HLO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.hlo.cpu import import_jax
from kernelgen.spec.kernel import KernelSpec


def spec(inputs: list[str | None], output: str, alias: int | None = None, op: str = "toy", **params: Any) -> KernelSpec:
    """Returns a kernel of a custom op."""
    return KernelSpec.make(op, [t and TensorDesc.parse(t) for t in inputs], TensorDesc.parse(output), params, alias)


def raw(function: Callable[..., Any], *arguments: tuple[tuple[int, ...], str], x64: bool = False) -> bytes:
    """Returns a function's HLO as XLA writes it."""
    jax = import_jax()
    with jax.enable_x64(x64):
        avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments]
        lowered = jax.jit(function, keep_unused=True).trace(*avals).lower(lowering_platforms=("cpu",))
        return bytes(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())


def canonical(function: Callable[..., Any], *arguments: tuple[tuple[int, ...], str], x64: bool = False) -> bytes:
    """Returns a function's HLO in canonical form."""
    return canonicalize(raw(function, *arguments, x64=x64), [f"input{i}" for i in range(len(arguments))])
