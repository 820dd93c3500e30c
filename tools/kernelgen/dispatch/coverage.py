"""Compares the kernels of manifests and bundles with the ops of a model's graphs.

Kernels are compared as canonical specs: strides of dimensions with one element do not count, defaults are filled in.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kernelgen.dispatch.lengths import Selection
from kernelgen.ggml.ops import ANY
from kernelgen.model.graph_ops import GraphCall
from kernelgen.spec.kernel import KernelSpec


@dataclass(frozen=True, slots=True)
class GraphOp:
    """One op of a graph export.

    Attributes:
        spec: the kernel it needs.
        line: its line in the export, from 1.
        name: llama.cpp's name of the node.
    """

    spec: KernelSpec
    line: int
    name: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """The coverage of a graph by kernels.

    Attributes:
        covered: ops with a kernel, or computed by kernels for other numbers of tokens, in the export's order.
        missing: the others.
        beyond: kernels that no op of the graph needs, sorted by id.
    """

    covered: tuple[GraphOp, ...]
    missing: tuple[GraphOp, ...]
    beyond: tuple[KernelSpec, ...]


def compare(
    kernels: Iterable[KernelSpec],
    graph: Sequence[tuple[KernelSpec, int, str]],
    selections: Mapping[KernelSpec, Selection] | None = None,
    grouped: Collection[KernelSpec] = (),
) -> Coverage:
    """Returns the ops of `graph` (from `graph_ops.read`) that `kernels` compute, and the kernels that the graph does not need.

    Args:
        kernels: the available kernels.
        graph: the ops.
        selections: the selected kernels of ops; by default only kernels made for exactly the op.
        grouped: ops whose nodes are all in groups; they need no kernel of their own.
    """
    have = set(kernels)
    ops = [GraphOp(*item) for item in graph]
    by = (
        {op.spec: (one,) for op in ops for one in (op.spec.open, op.spec) if one in have}
        if selections is None
        else {spec: how.kernels for spec, how in selections.items()}
    )
    needed = {kernel for op in ops for kernel in by.get(op.spec, ())}
    return Coverage(
        tuple(op for op in ops if op.spec in by or op.spec in grouped),
        tuple(op for op in ops if op.spec not in by and op.spec not in grouped),
        tuple(sorted(have - needed, key=lambda spec: spec.id)),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """Graphs that differ only in the length of the cache, with equal coverage.

    Attributes:
        sizes: their common sizes, by name; empty if the export has none.
        lengths: distinct lengths of the cache, ascending; empty if there is none.
        graphs: number of graphs.
        nodes: number of nodes of each.
        covered: number of nodes that kernels compute.
        launches: number of kernel launches for these.
        padding: rows of a graph that are computed beyond the nodes' rows, or twice.
        groups: number of launches of groups; None if there are no groups.
        grouped: number of nodes in groups.
        outside: number of nodes of each op in no group, by reason.
    """

    sizes: Mapping[str, int | str]
    lengths: tuple[int, ...]
    graphs: int
    nodes: int
    covered: int
    launches: int
    padding: int
    groups: int | None = None
    grouped: int = 0
    outside: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def rows(graph_calls: Iterable[GraphCall], selections: Mapping[KernelSpec, Selection]) -> list[Row]:
    """Returns the coverage of graphs, in their order."""
    found: dict[tuple[tuple[tuple[str, int | str], ...], int, int, int, int, object], list[GraphCall]] = {}
    for call in graph_calls:
        sizes: list[tuple[str, int | str]] = [
            (name, size) for name, size in call.sizes.items() if name not in ("n_kv", "n_kv_swa")
        ]
        if "n_ctx" in call.context:
            sizes.append(("n_ctx", int(call.context["n_ctx"])))
        if "flash_attn" in call.context:
            sizes.append(("flash_attn", "on" if call.context["flash_attn"] else "off"))
        grouped = (call.groups, json.dumps(ops_outside(call), sort_keys=True))
        key = (tuple(sizes), sum(call.nodes.values()), covered(call, selections), *launches(call, selections), grouped)
        found.setdefault(key, []).append(call)
    return [
        Row(
            dict(sizes),
            tuple(sorted({call.sizes["n_kv"] for call in calls if "n_kv" in call.sizes})),
            len(calls),
            nodes,
            computed,
            launched,
            padding,
            None if calls[0].groups is None else len(calls[0].groups),
            sum(calls[0].groups or ()),
            ops_outside(calls[0]),
        )
        for (sizes, nodes, computed, launched, padding, _), calls in found.items()
    ]


def ops_outside(call: GraphCall) -> dict[str, dict[str, int]]:
    """Returns the number of nodes of each op of a graph that are in no group, by reason."""
    found: dict[str, dict[str, int]] = {}
    for why, nodes in call.outside.items():
        ops = Counter[str]()
        for spec, count in nodes.items():
            ops[spec.op] += count
        found[why] = dict(sorted(ops.items()))
    return found


def covered(call: GraphCall, selections: Collection[KernelSpec]) -> int:
    """Returns the number of a graph's nodes that kernels compute, in groups or one by one."""
    return sum(call.groups or ()) + sum(count for spec, count in call.alone.items() if spec in selections)


def launches(call: GraphCall, selections: Mapping[KernelSpec, Selection]) -> tuple[int, int]:
    """Returns the number of launches for the nodes of a graph that have kernels, and the number of padding rows."""
    found = [(selections[spec], count) for spec, count in call.alone.items() if spec in selections]
    alone = sum(len(s.kernels) * count for s, count in found)
    return len(call.groups or ()) + alone, sum(s.padding * count for s, count in found)


def nearest(
    missing: Sequence[GraphOp], kernels: Iterable[KernelSpec]
) -> dict[KernelSpec, tuple[KernelSpec, list[str]]]:
    """Returns the most similar kernel of the same op, and its differences, for each missing op that has one."""
    by_op: dict[str, list[KernelSpec]] = defaultdict(list)
    for spec in sorted(set(kernels), key=lambda spec: spec.id):
        by_op[spec.op].append(spec)
    found = {}
    for op in missing:
        candidates = by_op.get(op.spec.op)
        if candidates and op.spec not in found:
            other = min(candidates, key=lambda kernel: (len(differences(op.spec, kernel)), _figures(op.spec, kernel)))
            found[op.spec] = (other, differences(op.spec, other))
    return found


def _figures(wanted: KernelSpec, kernel: KernelSpec) -> int:
    """Returns the number of dimensions and strides that differ, for kernels with equally many inputs."""
    pairs = zip((*wanted.inputs, wanted.output), (*kernel.inputs, kernel.output), strict=False)
    return sum(x != y for a, b in pairs if a and b for x, y in zip((*a.ne, *a.nb), (*b.ne, *b.nb), strict=True))


def differences(wanted: KernelSpec, kernel: KernelSpec) -> list[str]:
    """Returns in words the differences of `kernel` from `wanted`; both compute the same op."""
    found = []
    for i in range(max(len(wanted.inputs), len(kernel.inputs))):
        a = wanted.inputs[i] if i < len(wanted.inputs) else None
        b = kernel.inputs[i] if i < len(kernel.inputs) else None
        if a != b:
            found.append(f"input {i} is {b or 'absent'}, not {a or 'absent'}")
    if wanted.output != kernel.output:
        found.append(f"output is {kernel.output}, not {wanted.output}")
    a_params, b_params = dict(wanted.params), dict(kernel.params)
    for name in sorted(a_params.keys() | b_params.keys()):
        if a_params.get(name) != b_params.get(name) and b_params.get(name) != ANY:
            found.append(f"{name} is {_value(b_params.get(name, 0))}, not {_value(a_params.get(name, 0))}")
    if wanted.alias != kernel.alias:
        found.append(f"alias is {_alias(kernel.alias)}, not {_alias(wanted.alias)}")
    return found


def _value(value: object) -> str:
    """Returns a parameter in the form of the backend's run-time messages (`backend/ggml-neuron/report/missing.cpp`)."""
    if isinstance(value, float):
        mantissa, e, exponent = str(value).partition("e")
        return f"{mantissa}{'' if '.' in mantissa or not exponent else '.0'}{e}{exponent}"
    return str(value).lower()


def _alias(alias: int | None) -> str:
    return "none" if alias is None else str(alias)
