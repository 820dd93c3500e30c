"""Compares the kernels of manifests with the ops of a model's graphs.

Kernels are compared as specs, which are canonical: strides of dimensions with one element don't count, defaults are filled in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernelgen.kernel import KernelSpec


@dataclass(frozen=True, slots=True)
class GraphOp:
    """One op of a graph export.

    Attributes:
        spec: the kernel it needs.
        line: where it is in the export, from 1.
        name: llama.cpp's name of the node.
    """

    spec: KernelSpec
    line: int
    name: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """What kernels do for a graph.

    Attributes:
        covered: ops that have a kernel, in the export's order.
        missing: ops that have none.
        beyond: kernels that no op of the graph needs, sorted by id.
    """

    covered: tuple[GraphOp, ...]
    missing: tuple[GraphOp, ...]
    beyond: tuple[KernelSpec, ...]


def compare(kernels: Iterable[KernelSpec], graph: Sequence[tuple[KernelSpec, int, str]]) -> Coverage:
    """Returns which ops of `graph` (from `graph_ops.read`) have one of `kernels`, and which kernels are beyond it."""
    held = set(kernels)
    ops = [GraphOp(*item) for item in graph]
    needed = {op.spec for op in ops}
    return Coverage(
        tuple(op for op in ops if op.spec in held),
        tuple(op for op in ops if op.spec not in held),
        tuple(sorted(held - needed, key=lambda spec: spec.id)),
    )


def nearest(
    missing: Sequence[GraphOp], kernels: Iterable[KernelSpec]
) -> dict[KernelSpec, tuple[KernelSpec, list[str]]]:
    """Returns for each missing op the kernel of the same op that differs least, and how; nothing where there is no such kernel."""
    by_op: dict[str, list[KernelSpec]] = defaultdict(list)
    for spec in sorted(set(kernels), key=lambda spec: spec.id):
        by_op[spec.op].append(spec)
    found = {}
    for op in missing:
        candidates = [(differences(op.spec, other), other) for other in by_op.get(op.spec.op, ())]
        if candidates:
            parts, other = min(candidates, key=lambda item: len(item[0]))
            found[op.spec] = (other, parts)
    return found


def differences(wanted: KernelSpec, held: KernelSpec) -> list[str]:
    """Returns in words where `held` is not `wanted`; both compute the same op."""
    found = []
    for i in range(max(len(wanted.inputs), len(held.inputs))):
        a = wanted.inputs[i] if i < len(wanted.inputs) else None
        b = held.inputs[i] if i < len(held.inputs) else None
        if a != b:
            found.append(f"input {i} is {b or 'absent'}, not {a or 'absent'}")
    if wanted.output != held.output:
        found.append(f"output is {held.output}, not {wanted.output}")
    a_params, b_params = dict(wanted.params), dict(held.params)
    for name in sorted(a_params.keys() | b_params.keys()):
        if a_params.get(name) != b_params.get(name):
            found.append(f"{name} is {b_params.get(name, 0)}, not {a_params.get(name, 0)}")
    if wanted.alias != held.alias:
        found.append(f"alias is {held.alias}, not {wanted.alias}")
    return found
