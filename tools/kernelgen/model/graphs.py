"""Reads the graphs that export-graphs prints: one JSON object a line, described in docs/reference/graphs.md."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernelgen.errors import Diagnostic, KernelgenError, Location
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import N_WORDS, ParamValue
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.spec.kernel import KernelSpec

FORMAT = "neuron-kernelgen graphs"
VERSION = 1

VIEW_OPS = frozenset({"none", "view", "reshape", "permute", "transpose"})
"""Ops that compute nothing."""

Ints = tuple[int, ...]

_WRONG = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""The exceptions for values of unexpected types."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The tensor of a node with ggml's shape and strides, including strides of dimensions with one element.

    Attributes:
        dtype: ggml's type name.
        ne: elements per dimension.
        nb: strides in bytes.
    """

    dtype: str
    ne: Ints
    nb: Ints

    @property
    def storage_bytes(self) -> int:
        """`ggml_nbytes`."""
        t = TYPES[self.dtype]
        if 0 in self.ne:
            return 0
        rest = sum((n - 1) * b for n, b in zip(self.ne[1:], self.nb[1:], strict=True))
        return rest + (self.ne[0] // t.block * self.nb[0] if t.quantized else t.size + (self.ne[0] - 1) * self.nb[0])


@dataclass(frozen=True, slots=True)
class ExportedNode:
    """A computed node of a graph without its place in the graph: equal nodes of different layers compare equal.

    Attributes:
        op: `ggml_op_desc` in lower case.
        inputs: `src[0…]`; None for an absent source before a present one.
        output: the result.
        words: `op_params`, 16 words.
        alias: the input that shares its memory with the result, if ggml does not define the op so.
    """

    op: str
    inputs: tuple[Shape | None, ...]
    output: Shape
    words: Ints
    alias: int | None

    @property
    def empty(self) -> bool:
        """Whether one of its tensors has no elements."""
        return any(t is not None and 0 in t.ne for t in (*self.inputs, self.output))

    def tensors(self) -> list[TensorDesc | None]:
        """Returns the inputs and the output.

        Raises:
            ValueError: no kernel can have one of the tensors.
        """
        return [None if t is None else TensorDesc.make(t.ne, t.dtype, t.nb) for t in (*self.inputs, self.output)]

    def spec(self) -> KernelSpec:
        """Returns the node's kernel.

        Raises:
            ValueError: no kernel can have one of the tensors.
        """
        *inputs, output = self.tensors()
        assert output is not None
        return KernelSpec.make(self.op, inputs, output, ggml_ops.op(self.op).decode(self.words), self.alias)


@functools.cache
def unique(node: ExportedNode) -> ExportedNode:
    """Returns one object for all equal nodes, which the changes of a graph make: as in a reader's graphs, its id stands for it."""
    return node


@dataclass(frozen=True, slots=True)
class Root:
    """A tensor that is not a view. Other tensors may be views of it.

    Attributes:
        name: llama.cpp's name.
        shape: its shape.
        node: its index among the graph's nodes; None for an input of the graph.
        output: whether it is read after the call.
        weight: whether it is a tensor of the model's file.
    """

    name: str
    shape: Shape
    node: int | None
    output: bool
    weight: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a tensor: the offset in a root in bytes, and the root's number in `Graph.roots`."""

    root: int
    offset: int


@dataclass(frozen=True, slots=True)
class NodePlacements:
    """The places of a node's tensors; `ExportedNode` has the tensors.

    Attributes:
        inputs: the places of the inputs; None for an absent one.
        output: the place of the result: a new root, or another root's memory.
    """

    inputs: tuple[Placement | None, ...]
    output: Placement


@dataclass(frozen=True, slots=True)
class Graph:
    """The graph of one call.

    Attributes:
        sizes: the call's sizes: `n_tokens`, `n_outputs`, `n_seqs`, and with a cache `n_kv` and `n_kv_swa`.
        context: the context's settings, such as `n_ctx` and `flash_attn`.
        nodes: in the order in which they are computed.
        names: llama.cpp's names of the nodes.
        wires: the places of each node's tensors.
        roots: the memory of the tensors, by number.
        devices: the number of devices over which llama.cpp splits tensors; 1: no split.
        of: the devices that compute this graph.
        zeroed: `all_reduce` nodes whose summand this device does not compute, because its slices are empty: the program that runs
            them sets the summand to 0.
        unread: roots read by a result without elements, such as the one after the last layer of a call without outputs. The value
            is the number of nodes, because that result is in no group. ggml counts it among their readers. Sums over devices
            without other readers are left out.
        differing: nodes that another device computes with other shapes or other memory; all nodes if devices compute different
            ops, or if a device computes no summand. All devices run one program for a sum, so no group with a sum has such a node.
        parts: nodes that compute one sequence's part of one of llama.cpp's nodes, or join such parts (`kernelgen.model.streams`).
    """

    sizes: Mapping[str, int]
    context: Mapping[str, Any]
    nodes: tuple[ExportedNode, ...]
    names: tuple[str, ...]
    wires: tuple[NodePlacements, ...] = ()
    roots: Mapping[int, Root] = field(default_factory=dict)
    devices: int = 1
    of: Ints = (0,)
    zeroed: frozenset[int] = frozenset()
    unread: Mapping[int, int] = field(default_factory=dict)
    differing: frozenset[int] = frozenset()
    parts: frozenset[int] = frozenset()

    def with_params(self, change: Callable[[ExportedNode], Mapping[str, ParamValue]]) -> Graph:
        """Returns the graph with other parameters of its nodes, those that `change` returns; the same object if there are none."""
        nodes = tuple(_with_params(node, params) if (params := change(node)) else node for node in self.nodes)
        return self if nodes == self.nodes else replace(self, nodes=nodes)

    @property
    def is_probe(self) -> bool:
        """Whether no call computes this graph: llama.cpp only calls supports_op with its nodes, before it samples on a device."""
        return bool(self.context.get("probe"))

    @property
    def is_piece(self) -> bool:
        """Whether this is a piece of a graph whose program examines nodes one by one (an eval callback)."""
        return bool(self.context.get("piece"))


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """The description of a model from its header.

    Attributes:
        architecture: llama.cpp's name of it.
        name: the name in the header; may be empty.
        parameters: the number of parameters.
        size: the size of the weights in bytes.
        layers: the number of layers.
        encoder, decoder, recurrent: whether it has or is one.
        description: a line of text; for a projector llama.cpp's name of its kind.
        n_ctx_train: the tokens of its longest context; 0 if it has none.
        target: of a recording, the target of the machine; may be empty.
        lnc: of a recording, the machine's physical cores per logical core; 0 if unknown.
    """

    architecture: str
    name: str
    parameters: int
    size: int
    layers: int
    encoder: bool
    decoder: bool
    recurrent: bool
    description: str = ""
    n_ctx_train: int = 0
    target: str = ""
    lnc: int = 0


def _with_params(node: ExportedNode, params: Mapping[str, ParamValue]) -> ExportedNode:
    op = ggml_ops.op(node.op)
    return unique(replace(node, words=op.encode({**op.decode(node.words), **params})))


def _at(tensors: list[dict[str, Any]], index: int) -> Placement:
    view = tensors[index].get("view")
    if view is None:
        return Placement(index, 0)
    root, offset = view
    if not (type(root) is int and type(offset) is int and 0 <= root < len(tensors) and offset >= 0):
        raise ValueError(f"tensor {tensors[index]['name']} is a view of {view}")
    return Placement(root, offset)


def _compared(graphs: Sequence[Graph]) -> Iterator[Graph]:
    """Yields the graphs of a call's devices with the nodes in which they differ."""
    for graph in graphs:
        everything = frozenset(range(len(graph.nodes)))
        if sum(len(other.of) for other in graphs) != graph.devices:
            yield replace(graph, differing=everything)  # a device is missing
        elif any(other.zeroed or not _has_ops_of(other, graph) for other in graphs) and len(graphs) > 1:
            yield replace(graph, differing=everything)
        else:
            contents = enumerate(zip(*map(_contents, graphs), strict=True))
            yield replace(graph, differing=frozenset(i for i, of_devices in contents if len(set(of_devices)) > 1))


def _has_ops_of(graph: Graph, other: Graph) -> bool:
    return len(graph.nodes) == len(other.nodes) and all(
        a.op == b.op for a, b in zip(graph.nodes, other.nodes, strict=True)
    )


def _contents(graph: Graph) -> Iterator[object]:
    """Yields each node with the places of its tensors."""
    for node, wires in zip(graph.nodes, graph.wires, strict=True):
        yield (
            node,
            tuple(
                None if at is None else (at.offset, graph.roots[at.root].shape, graph.roots[at.root].node)
                for at in (*wires.inputs, wires.output)
            ),
        )


class GraphReader:
    """Reads one export, line by line.

    Args:
        lines: the export.
        file: its name in messages.
    """

    def __init__(self, lines: Iterable[bytes], file: str) -> None:
        self._lines = enumerate(lines, 1)
        self._file = file
        self._shapes: dict[Any, Shape] = {}
        self._nodes: dict[Any, ExportedNode] = {}

    def model(self) -> ModelHeader:
        """Returns the model's description from the first line.

        Raises:
            KernelgenError: the export has another format or version.
        """
        number, line = next(self._lines, (1, b""))
        head = self._parse(number, line)
        if head.get("format") != FORMAT:
            raise self._error(number, "not an export of a model's graphs")
        if head.get("version") != VERSION:
            raise self._error(
                number, f"version {head.get('version')} of the format, and this kernelgen reads {VERSION}"
            )
        try:
            m = head["model"]
            return ModelHeader(
                str(m["architecture"]),
                str(m["name"]),
                int(m["parameters"]),
                int(m["bytes"]),
                int(m["layers"]),
                bool(m["encoder"]),
                bool(m["decoder"]),
                bool(m["recurrent"]),
                str(m.get("description", "")),
                int(m.get("context_length", 0)),
                str(head.get("target", "")),
                int(head.get("lnc", 0)),
            )
        except _WRONG as error:
            raise self._error(number, f"the model's description is invalid: {error!r}") from None

    def graphs(self) -> Iterator[Graph]:
        """Yields the graphs, after `model`.

        Raises:
            KernelgenError: a line is broken.
        """
        call: list[Graph] = []  # starts with device 0
        for number, line in self._lines:
            value = self._parse(number, line)
            try:
                graph = self._graph(value)
            except _WRONG as error:
                yield from _compared(call)
                raise self._error(number, f"the graph is invalid: {error!r}") from None
            if 0 in graph.of:
                yield from _compared(call)
                call = []
            call.append(graph)
        yield from _compared(call)

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise self._error(number, "not a JSON object")
        return value

    def _error(self, number: int, message: str) -> KernelgenError:
        return KernelgenError(Diagnostic(message, Location(self._file, number, 1)))

    def _graph(self, value: Mapping[str, Any]) -> Graph:
        tensors = value["tensors"]
        shapes = [self._shape(t) for t in tensors]
        nodes: list[ExportedNode] = []
        names = []
        wires = []
        zeroed = set()
        computed: dict[int, int] = {}
        places = [_at(tensors, index) for index in range(len(tensors))]
        unread: set[int] = set()
        readers: dict[int, set[bool]] = {}  # whether readers have elements
        for shape, t in zip(shapes, tensors, strict=True):
            for s in t.get("src", ()):
                readers.setdefault(s, set()).add(0 not in shape.ne)
        for index, t in enumerate(tensors):
            sources = t.get("src", ())
            if 0 in shapes[index].ne:
                unread.update(places[s].root for s in sources if s >= 0)
            idle = t["op"] == "all_reduce" and readers.get(index) == {False} and t.get("role") != "output"
            if t["op"] in VIEW_OPS or t.get("skipped") or 0 in shapes[index].ne or idle:
                continue  # nothing to compute
            key = (
                t["op"],
                tuple(None if s < 0 else shapes[s] for s in sources),
                shapes[index],
                tuple(t.get("params", ())),
                self._alias(tensors, shapes, index),
            )
            node = self._nodes.get(key)
            if node is None:
                words = key[3] + (0,) * (N_WORDS - len(key[3]))
                if len(words) != N_WORDS or not all(type(w) is int and -(2**31) <= w < 2**31 for w in words):
                    raise ValueError(f"op_params of {t['name']}")
                if not isinstance(key[0], str):
                    raise ValueError(f"op {key[0]}")
                node = self._nodes[key] = ExportedNode(key[0], key[1], key[2], words, key[4])
            computed[index] = len(nodes)
            if t["op"] == "all_reduce" and tensors[sources[0]].get("skipped"):
                zeroed.add(len(nodes))
            nodes.append(node)
            names.append(str(t["name"]))
            wires.append(NodePlacements(tuple(None if s < 0 else places[s] for s in sources), places[index]))
        roots = {
            at.root: Root(
                str(tensors[at.root]["name"]),
                shapes[at.root],
                computed.get(at.root),
                tensors[at.root].get("role") == "output",
                tensors[at.root].get("role") == "weight",
            )
            for at in places
        }
        # A view that is read after the call keeps its root.
        for t, at in zip(tensors, places, strict=True):
            if t.get("role") == "output" and not roots[at.root].output:
                roots[at.root] = replace(roots[at.root], output=True)
        sizes = {str(name): int(size) for name, size in value["sizes"].items()}
        split = value.get("split", {"devices": 1, "of": [0]})
        devices, of = int(split["devices"]), tuple(map(int, split["of"]))
        if not of or not all(0 <= device < devices for device in of):
            raise ValueError(f"split {split}")
        return Graph(
            sizes,
            dict(value["context"]),
            tuple(nodes),
            tuple(names),
            tuple(wires),
            roots,
            devices,
            of,
            frozenset(zeroed),
            dict.fromkeys(unread, len(nodes)),
        )

    def _shape(self, t: Mapping[str, Any]) -> Shape:
        key = (t["type"], *t["ne"], *t["nb"])
        shape = self._shapes.get(key)
        if shape is None:
            if t["type"] not in TYPES or len(key) != 9 or not all(type(n) is int for n in key[1:]):
                raise ValueError(f"tensor {t['name']}: {key}")
            shape = self._shapes[key] = Shape(t["type"], key[1:5], key[5:])
        return shape

    @staticmethod
    def _alias(tensors: list[dict[str, Any]], shapes: list[Shape], index: int) -> int | None:
        """Returns the source to whose memory an `…_inplace` node of ggml writes: its result is a view of that whole source."""
        view = tensors[index].get("view")
        if view is None or ggml_ops.op(tensors[index]["op"]).alias is not None:
            return None
        for i, source in enumerate(tensors[index].get("src", ())):
            if source >= 0 and source != index:
                place = tensors[source].get("view") or [source, 0]
                same = shapes[source].dtype == shapes[index].dtype
                if place == view and same and shapes[source].storage_bytes == shapes[index].storage_bytes:
                    return i
        return None
