"""Makes graph kernels from segments of a model's graphs, with formulas where possible."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.model import repeats
from kernelgen.model.formulas import Fitter, Formula
from kernelgen.model.graphs import ExportedNode, Graph, Placement, Shape
from kernelgen.model.kernel_formulas import KernelFormula, Point, RequestedKernel, TensorFormula, fit_tensor
from kernelgen.model.repeats import Segment
from kernelgen.model.sizes import NAMES
from kernelgen.spec import products
from kernelgen.spec.kernel import GraphSpec, UnnumberedNode, UnnumberedTensor
from kernelgen.targets import MAX_INSTRUCTIONS

Cut = Callable[[Graph], list[Segment]]


def _steps(graph: Graph) -> list[Segment]:
    """Returns a whole graph as one segment, or as segments of as many layers as neuronx-cc's limit of instructions allows."""
    found: list[Segment] = []
    for segment in repeats.whole(graph):
        parts = [p for p in repeats.layers(graph) if segment.start <= p.start and p.end <= segment.end]
        counts = [sum(map(instructions, graph.nodes[part.start : part.end])) for part in parts]
        if sum(counts) <= MAX_INSTRUCTIONS or sum(map(len, parts)) != len(segment):
            found.append(segment)
            continue
        total = 0
        for part, count in zip(parts, counts, strict=True):
            if total and total + count <= MAX_INSTRUCTIONS:
                found[-1] = Segment(found[-1].start, part.end)
                total += count
            else:
                found.append(part)
                total = count
    return found


def instructions(node: ExportedNode) -> int:
    """Returns an estimate of a node's instructions, as in `kernelgen.spec.products`."""
    weights = node.inputs[0] if node.inputs else None
    if weights is None:
        return 0
    return products.instructions(node.op, weights.ne, TYPES[weights.dtype].quantized, node.output.ne)


def _parts(graph: Graph, *, sums: bool) -> list[Segment]:
    """Cuts a graph at its sums over devices; a graph without sums into layers.

    Args:
        graph: the graph.
        sums: whether a segment begins with the sum before it; otherwise each sum is a segment of its own.
    """
    found = [i for i, node in enumerate(graph.nodes) if node.op == "all_reduce"]
    return repeats.at(graph, {*found, *([] if sums else [i + 1 for i in found])}) if found else repeats.layers(graph)


def _apart(cut: Cut, graph: Graph) -> list[Segment]:
    """Returns the segments of a cut, divided so that each sum over devices shares a segment only with allowed nodes.

    All devices run one program for a sum, so its segment ends where devices compute different nodes. On a device that computes
    no summand, the summand's memory is undefined until the runtime writes zeros right before the sum: such a sum is alone.
    """
    found = []
    for segment in cut(graph):
        edges = {segment.start, segment.end}
        for i in range(segment.start, segment.end):
            if graph.nodes[i].op == "all_reduce":
                edges.update(_beside(graph, segment, i))
        found += [Segment(a, b) for a, b in itertools.pairwise(sorted(edges))]
    return found


def _beside(graph: Graph, segment: Segment, place: int) -> tuple[int, int]:
    """Returns the range of nodes that may be in one program with the sum at `place`."""
    if place in graph.zeroed or place in graph.differing:
        return place, place + 1
    differing = [i for i in graph.differing if segment.start <= i < segment.end]
    start = max((i + 1 for i in differing if i < place), default=segment.start)
    return start, min((i for i in differing if i > place), default=segment.end)


FUSE = ("layer", "layers:N", "step", "parts", "parts+sums", "none")
"""The ways to cut graphs: the values of `kernelgen model --fuse`."""


def cut_of(fuse: str) -> Cut | None:
    """Returns the function that cuts graphs for a value of FUSE; None for `none`.

    Raises:
        ValueError: `fuse` is not in FUSE.
    """
    if match := re.fullmatch(r"layers:0*([1-9][0-9]{0,3})", fuse):
        return functools.partial(_apart, functools.partial(repeats.layers, at_once=int(match[1])))
    cuts: Mapping[str, Cut | None] = {
        "layer": repeats.layers,
        "step": _steps,
        "parts": functools.partial(_parts, sums=False),
        "parts+sums": functools.partial(_parts, sums=True),
        "none": None,
    }
    if fuse not in cuts:
        raise ValueError(f"{fuse!r} is not one of {', '.join(FUSE)}, with N from 1 to 9999")
    cut = cuts[fuse]
    return None if cut is None else functools.partial(_apart, cut)


# --- a segment of one graph ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wire:
    """The place of a tensor: the number of a slot or of a node of the segment, and an offset in its memory in bytes."""

    slot: bool
    index: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """A segment with its slots numbered.

    Attributes:
        inputs: for each node, the places of its inputs.
        into: for each node, the place to which it writes its result; None for memory of its own.
        escapes: for each node, whether its result is read outside the segment.
        slots: the root of each slot.
    """

    inputs: tuple[tuple[_Wire | None, ...], ...]
    into: tuple[_Wire | None, ...]
    escapes: tuple[bool, ...]
    slots: tuple[int, ...]

    @property
    def structure(self) -> object:
        """Everything but the offsets, which are formulas."""
        wires = [
            [w and (w.slot, w.index) for w in (*inputs, into)]
            for inputs, into in zip(self.inputs, self.into, strict=True)
        ]
        return wires, self.escapes, len(self.slots)


def readers_of(graph: Graph) -> dict[int, int]:
    """Returns the last node that reads each root. Results without elements read after all nodes (`Graph.unread`)."""
    found = dict(graph.unread)
    for i, wires in enumerate(graph.wires):
        for at in wires.inputs:
            if at is not None and graph.roots[at.root].node != i:  # ggml_cast names its own result
                found[at.root] = max(i, found.get(at.root, i))
    return found


def _cut(graph: Graph, segment: Segment, readers: Mapping[int, int], apart: bool) -> _Cut:
    numbers: dict[tuple[int, int | None], int] = {}
    numbered = (_layer(name, None) for name in graph.names[segment.start : segment.end])
    layer = next((number for number in numbered if number is not None), None)

    def wire(at: Placement) -> _Wire:
        root = graph.roots[at.root]
        if root.node is not None and segment.start <= root.node < segment.end:
            return _Wire(False, root.node - segment.start, at.offset)
        key = at.root, layer if apart and root.weight else None
        return _Wire(True, numbers.setdefault(key, len(numbers)), at.offset)

    inputs, into, escapes = [], [], []
    for i in range(segment.start, segment.end):
        wires = graph.wires[i]
        layer = _layer(graph.names[i], layer)
        inputs.append(tuple(None if at is None else wire(at) for at in wires.inputs))
        root = graph.roots[wires.output.root]
        own = root.node == i
        into.append(None if own else wire(wires.output))
        read = readers.get(wires.output.root)
        # A result that no node reads is a result of the graph.
        escapes.append(own and (root.output or read is None or read >= segment.end))
    return _Cut(tuple(inputs), tuple(into), tuple(escapes), tuple(root for root, _ in numbers))


def _layer(name: str, before: int | None) -> int | None:
    """Returns the number of the layer in llama.cpp's name of a node, or `before` if the name has none."""
    match = re.search(r"-([0-9]+)$", name.partition(" (")[0])
    return int(match[1]) if match else before


def _content(graph: Graph, segment: Segment, cut: _Cut) -> Hashable:
    """Returns a segment's content without its place in the graph: segments with equal content are the same graph kernel."""
    shapes = tuple(graph.roots[slot].shape for slot in cut.slots)
    return cut.inputs, cut.into, cut.escapes, shapes, tuple(graph.nodes[segment.start : segment.end])


def segment_spec(
    graph: Graph, segment: Segment, readers: Mapping[int, int] | None = None, *, apart: bool = False
) -> GraphSpec:
    """Returns the graph kernel of a segment.

    Args:
        graph: the graph.
        segment: its nodes.
        readers: the result of `readers_of`.
        apart: whether each layer has its own slot for a weight that several layers read. A file has such a weight once, and
            llama.cpp loads it once or once for each layer: a kernel with separate slots computes both.

    Raises:
        ValueError: the segment is not a group, or no kernel can have one of its tensors.
    """
    cut = _cut(graph, segment, readers_of(graph) if readers is None else readers, apart)
    nodes = []
    for i, inputs, into, escapes in zip(range(len(segment)), cut.inputs, cut.into, cut.escapes, strict=True):
        node = graph.nodes[segment.start + i]
        output = _desc(node.output)
        nodes.append(
            UnnumberedNode(
                node.op,
                tuple(
                    None if w is None or s is None else _loose(w, _desc(s))
                    for w, s in zip(inputs, node.inputs, strict=True)
                ),
                output,
                ggml_ops.op(node.op).decode(node.words),
                None if into is None else _loose(into, output),
                escapes,
            )
        )
    return GraphSpec.make(nodes)


def _desc(shape: Shape) -> TensorDesc:
    return TensorDesc.make(shape.ne, shape.dtype, shape.nb)


def _loose(wire: _Wire, tensor: TensorDesc) -> UnnumberedTensor:
    return UnnumberedTensor(f"slot{wire.index}" if wire.slot else wire.index, wire.offset, tensor)


# --- with formulas --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reference:
    """A tensor in a slot or a node's memory, at any size. `UnnumberedTensor` is the same at one size."""

    slot: bool
    index: int
    offset: Formula
    tensor: TensorFormula

    def at(self, point: Point) -> UnnumberedTensor:
        """Returns the reference at these sizes."""
        return _loose(_Wire(self.slot, self.index, self.offset.value(point)), self.tensor.at(point))


@dataclass(frozen=True, slots=True)
class NodeFormula:
    """A node at any size. `UnnumberedNode` is the same at one size. The name is for readers."""

    op: str
    inputs: tuple[Reference | None, ...]
    output: TensorFormula
    params: tuple[tuple[str, ParamValue | Formula], ...]
    into: Reference | None
    escapes: bool
    name: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class SlotFormula:
    """The whole root of a slot at any size. The name is for readers."""

    tensor: TensorFormula
    name: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class GraphFormula:
    """A graph kernel at any size."""

    nodes: tuple[NodeFormula, ...]
    slots: tuple[SlotFormula, ...]

    def at(self, point: Point) -> GraphSpec:
        """Returns the graph kernel at these sizes.

        Raises:
            ValueError: the nodes are not a group at these sizes.
        """
        return GraphSpec.make(
            UnnumberedNode(
                node.op,
                tuple(None if r is None else r.at(point) for r in node.inputs),
                node.output.at(point),
                {name: v.value(point) if isinstance(v, Formula) else v for name, v in node.params},
                None if node.into is None else node.into.at(point),
                node.escapes,
            )
            for node in self.nodes
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The sizes on which it depends, in the order of `NAMES`."""
        used = {name for formula in self._formulas() for name in formula.names}
        return tuple(name for name in NAMES if name in used)

    def _formulas(self) -> Iterator[Formula]:
        for slot in self.slots:
            yield from slot.tensor.formulas
        for node in self.nodes:
            yield from node.output.formulas
            yield from (v for _, v in node.params if isinstance(v, Formula))
            for reference in (*node.inputs, node.into):
                if reference is not None:
                    yield reference.offset
                    yield from reference.tensor.formulas


@dataclass
class GraphEntry(RequestedKernel[GraphFormula]):
    """A graph kernel with the calls that need it. The name is for readers.

    Attributes:
        targets: the targets that have it; empty if all have it.
        fallback: whether its nodes have kernels of their own.
    """

    targets: tuple[str, ...] = ()
    fallback: bool = True

    def specs(self) -> set[GraphSpec]:
        """The graph kernels at all its sizes."""
        return {self.kernel.at(point) for point in self.values.values()}


def fit(
    graphs: Sequence[Graph],
    points: Sequence[Point],
    kernels: Sequence[KernelFormula | None],
    cut: Cut,
    fitter: Fitter,
) -> tuple[list[GraphFormula], bool]:
    """Returns the graph kernels of graphs with the same sequence of ops, each once, and whether these are all.

    Args:
        graphs: the graphs.
        points: the sizes of each graph.
        kernels: the formula of each node; None if it has none.
        cut: cuts a graph.
        fitter: a fitter for these points.
    """
    segments = cut(graphs[0])
    readers = [readers_of(graph) for graph in graphs]
    found: dict[GraphFormula, None] = {}
    complete = all(cut(graph) == segments for graph in graphs[1:])
    if not complete:
        return [], False
    met = set()
    for segment in segments:
        if len(segment) == 1:  # the kernel of its op does the same
            continue
        own = kernels[segment.start : segment.end]
        cuts = [_cut(g, segment, r, True) for g, r in zip(graphs, readers, strict=True)]
        same = tuple(_content(g, segment, c) for g, c in zip(graphs, cuts, strict=True))
        if same in met:  # a layer like another one
            continue
        met.add(same)
        made = _fit(cuts, graphs, segment, own, fitter)
        try:
            right = made is not None and all(
                made.at(point) == segment_spec(graph, segment, r, apart=True)
                for graph, point, r in zip(graphs, points, readers, strict=True)
            )
        except ValueError:  # a tensor without elements, or a node that no group can have
            continue
        if made is None or not right:
            complete = False
        else:
            found.setdefault(made)
    return list(found), complete


def _fit(
    cuts: Sequence[_Cut],
    graphs: Sequence[Graph],
    segment: Segment,
    kernels: Sequence[KernelFormula | None],
    fitter: Fitter,
) -> GraphFormula | None:
    first = cuts[0]
    if any(cut.structure != first.structure for cut in cuts):
        return None
    names = _Names()
    slots = []
    for k in range(len(first.slots)):
        roots = [graph.roots[cut.slots[k]] for cut, graph in zip(cuts, graphs, strict=True)]
        tensor = fit_tensor([root.shape for root in roots], fitter)
        if tensor is None:
            return None
        slots.append(SlotFormula(tensor, names.of(roots[0].name, "input")))
    nodes = []
    for i, kernel in enumerate(kernels):
        if kernel is None:
            return None
        references: list[Reference | None] = []
        for j, tensor in enumerate((*kernel.inputs, kernel.output)):
            wires = [(*cut.inputs[i], None)[j] if j < len(kernel.inputs) else cut.into[i] for cut in cuts]
            offset = fitter.fit([0 if w is None else w.offset for w in wires])
            if offset is None:
                return None
            wire = wires[0]
            references.append(
                None if wire is None or tensor is None else Reference(wire.slot, wire.index, offset, tensor)
            )
        *inputs, into = references
        name = names.of(graphs[0].names[segment.start + i], kernel.op)
        nodes.append(NodeFormula(kernel.op, tuple(inputs), kernel.output, kernel.params, into, first.escapes[i], name))
    return GraphFormula(tuple(nodes), tuple(slots))


class _Names:
    """Makes unique names of tensors from llama.cpp's names without the numbers of layers."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def of(self, name: str, otherwise: str) -> str:
        """Returns a name for a tensor; based on `otherwise` if llama.cpp's name is empty, generated or unusable."""
        name = re.sub(r"^Meta\([^)]*\)#(.*)#[0-9]+$", r"\1", name)  # an input of several devices
        name = name.partition(" (")[0]
        name = re.sub(r"^blk\.[0-9]+\.", "", name)
        name = re.sub(r"-[0-9]+$|_l[0-9]+$", "", name)
        name = re.sub("[^A-Za-z0-9_.-]", "_", name)
        if re.fullmatch("(node|leaf)_[0-9]+|", name) or not re.match("[A-Za-z_]", name):
            name = otherwise
        chosen, n = name, 1
        while chosen in self._taken:
            n += 1
            chosen = f"{name}.{n}"
        self._taken.add(chosen)
        return chosen
