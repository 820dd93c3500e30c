"""Titles of kernels for readers: the layers and nodes of a model that a kernel computes; without a model, a manifest's name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kernelgen.forecast.call import CallForecast
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.model.graphs import Graph
from kernelgen.spec.kernel import GraphSpec, SourceSpec, Spec

_LAYER = re.compile(r"-([0-9]+)$")
"""The number of a layer in llama.cpp's name of a node."""
_CACHE = re.compile(r"cache_k_l[0-9]+")
"""llama.cpp's name of a layer's keys."""
_MANY = 4
"""Maximum number of ranges of layers, or of nodes' names, in a title."""


@dataclass
class _Use:
    """The parts of a model's calls that a kernel computes.

    Attributes:
        layers: numbers of the layers.
        is_complete: whether each launch computes all nodes of its layers.
        nodes: names of nodes, in the order of the graph: for complete layers those beside them, otherwise the first and the last.
        is_sliding: whether each launch reads a cache that is shorter than another layer's.
        n_tokens: the tokens of its calls.
    """

    layers: set[int] = field(default_factory=set)
    is_complete: bool = True
    nodes: dict[str, None] = field(default_factory=dict)
    is_sliding: bool = True
    n_tokens: set[int] = field(default_factory=set)


class ModelTitles:
    """Titles of the kernels that a model's calls launch."""

    def __init__(self) -> None:
        self._uses: dict[Spec, _Use] = {}

    def add(self, graph: Graph, call: CallForecast) -> None:
        """Notes the launches of a call with this graph."""
        layers = _layers(graph)
        lengths = {n: root.shape.ne[1] for n, root in graph.roots.items() if _CACHE.fullmatch(root.name)}
        for launches in call.launches:
            use = self._uses.setdefault(launches.spec, _Use())
            use.n_tokens.add(call.n_tokens)
            for nodes in launches.nodes:
                of_layers = {layers[i] for i in nodes} - {None}
                is_complete = bool(of_layers) and all(i in nodes for i, n in enumerate(layers) if n in of_layers)
                outside = [i for i in nodes if layers[i] is None] if is_complete else [nodes[0], nodes[-1]]
                use.nodes |= dict.fromkeys(_name(graph, i) for i in outside)
                use.layers |= {n for n in of_layers if n is not None}
                use.is_complete &= is_complete
                read = {place.root for i in nodes for place in graph.wires[i].inputs if place is not None}
                use.is_sliding &= any(lengths[n] < max(lengths.values()) for n in read & lengths.keys())

    def title(self, spec: Spec) -> str | None:
        """Returns the title of a kernel in the graphs' form; None if no call launches it."""
        use = self._uses.get(spec)
        if use is None:
            return None
        layers = _layers_text(sorted(use.layers))
        is_group = isinstance(spec, GraphSpec)
        nodes = _joined(list(use.nodes), " to " if is_group and len(use.nodes) == 2 and not use.is_complete else ", ")
        parts = (
            [layers, nodes and f"with {nodes}"] if use.is_complete else [f"{nodes} of {layers}" if layers else nodes]
        )
        parts += [*(["sliding"] if use.is_sliding else []), *_sizes(spec, use.n_tokens)]
        return ", ".join(filter(None, parts))


def title(spec: Spec) -> str:
    """Returns the title of a kernel without a model: the manifest's name of a group, or the op with its inputs."""
    if isinstance(spec, GraphSpec):
        ops = [node.op for node in spec.nodes]
        return spec.label or ", ".join([f"{len(ops)} ops, {ops[0]} to {ops[-1]}", *_sizes(spec, ())])
    if isinstance(spec, SourceSpec):
        return spec.source
    return f"{spec.op} {', '.join(_short(t) for kernel in spec.kernels for t in kernel.inputs if t is not None)}"


def tensors(spec: Spec) -> list[str]:
    """Returns the name of each input of a kernel's program, for readers; a number's input at the end has none."""
    if isinstance(spec, GraphSpec):
        if spec.slot_names:
            return list(spec.slot_names)
        first: dict[int, str] = {}
        for node in spec.nodes:
            for number, operand in enumerate(node.inputs):
                if operand is not None and operand.place.slot:
                    first.setdefault(operand.place.index, f"{node.op} src[{number}]")
        return [first.get(n, "") for n in range(len(spec.slots))]
    return [name for kernel in spec.kernels for name in ggml_ops.op(kernel.op).inputs]


def _layers(graph: Graph) -> list[int | None]:
    """Returns the layer of each node. A node without a number is in the layer of the nodes before and after it."""
    matches = [_LAYER.search(name.partition(" (")[0]) for name in graph.names]
    numbers = [None if match is None else int(match[1]) for match in matches]
    after = _filled(numbers[::-1])[::-1]
    return [a if a == b else None for a, b in zip(_filled(numbers), after, strict=True)]


def _filled(numbers: Iterable[int | None]) -> list[int | None]:
    """Returns numbers with the last one before it for each None."""
    filled: list[int | None] = []
    for number in numbers:
        filled.append(filled[-1] if number is None and filled else number)
    return filled


def _name(graph: Graph, number: int) -> str:
    """Returns llama.cpp's name of a node without the layer, or the op for a generated name."""
    name = re.sub(r"-[0-9]+$|_l[0-9]+$", "", graph.names[number].partition(" (")[0])
    return graph.nodes[number].op if re.fullmatch("(node|leaf)_[0-9]+|", name) else name


def _joined(names: Sequence[str], separator: str) -> str:
    return separator.join(names) if len(names) <= _MANY else f"{', '.join(names[: _MANY - 1])} and others"


def _layers_text(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    ranges = [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(ranges) <= _MANY:
        return f"layers {', '.join(ranges)}"
    return f"{len(layers)} layers ({', '.join(ranges[:2])} … {ranges[-1]})"


def _sizes(spec: Spec, n_tokens: Iterable[int]) -> list[str]:
    """Returns the tokens and the cells of the cache in words, if there is one number of each."""
    attention = [[t and t.ne for t in node.inputs] for node in spec.kernels if node.op == "flash_attn_ext"]
    rows = {q[1] for q, *_ in attention if q} or set(n_tokens)
    cells = {k[1] for _, k, *_ in attention if k}
    words = [f"{n:,} token{'' if n == 1 else 's'}" for n in rows if len(rows) == 1]
    return words + [f"{n:,} cells" for n in cells if len(cells) == 1]


def _short(tensor: TensorDesc) -> str:
    """Returns a tensor's shape without the dimensions of one element at its end, and its type."""
    ne = list(tensor.ne)
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return f"({','.join(map(str, ne))})/{tensor.type_text}"
