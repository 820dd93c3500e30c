"""Small emitters and modules for the tests of HLO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def wire(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (field number, value) of a protobuf message from its bytes: varints as integers, other values as bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        yield tag >> 3, data[at : at + size]
        at += size


def wire_ids(values: Iterator[tuple[int, int | bytes]], field: int) -> list[int]:
    """Returns the integers of a repeated field, packed or not."""
    found: list[int] = []
    for number, value in values:
        if number == field:
            found += (
                [value]
                if isinstance(value, int)
                else [v for _, v in wire(b"".join(b"\x08" + v for v in _varints(value)))]
            )
    return found


def _varints(data: bytes) -> Iterator[bytes]:
    start = 0
    for at, byte in enumerate(data):
        if byte < 128:
            yield data[start : at + 1]
            start = at + 1
