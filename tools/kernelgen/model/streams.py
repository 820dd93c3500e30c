"""Graphs in which attention of several sequences with a cache each is a node for each sequence, so that each cache is a slot.

llama.cpp computes attention of such a call in one node whose last axis is the sequences. Its strides over caches have a cache's
length. Here a write to the caches and attention are a node for each sequence, and CONCAT puts the results after one another. A
sequence's part of its cache, of the numbers of rows and of the mask is a tensor given to the graph, as in a call of one sequence.
The backend sees a call's graph alike (`backend/ggml-neuron/select/streams.h`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from kernelgen.ggml.ops import N_WORDS
from kernelgen.ggml.types import TYPES
from kernelgen.model.graphs import At, ExportedNode, Graph, Root, Shape, Wires

_ROWS, _NUMBERS, _INTO = range(3)
"""The sources of SET_ROWS."""
_Q, _K, _V, _MASK = range(4)
"""The sources of FLASH_ATTN_EXT."""
_TOKENS = 2
"""The axis of the tokens in the result of attention."""


@dataclass(frozen=True, slots=True)
class _Caches:
    """How a root is the caches of sequences: bytes of each, the first one that a call has, and how many."""

    stride: int
    first: int
    n: int


@dataclass
class _Made:
    """A graph as it is made, node by node."""

    nodes: list[ExportedNode] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    wires: list[Wires] = field(default_factory=list)

    def add(self, node: ExportedNode, name: str, wires: Wires) -> int:
        self.nodes.append(node)
        self.names.append(name)
        self.wires.append(wires)
        return len(self.nodes) - 1


class Streams:
    """Makes such graphs; equal nodes of them are one object, as those of a reader are."""

    def __init__(self) -> None:
        self._nodes: dict[ExportedNode, ExportedNode] = {}

    def of(self, graph: Graph) -> Graph:
        """Returns a graph whose attention is of one sequence each, or the graph as it was where it has none of several."""
        return self.split(graph)[0]

    def split(self, graph: Graph, left: Set[int] = frozenset()) -> tuple[Graph, Sequence[int]]:
        """Returns such a graph, and for each of its nodes the number of the one that it is (a part of). Those of `left` stay."""
        caches = dict(_caches(graph, left))
        if not caches:
            return graph, range(len(graph.nodes))
        splitting = _Splitting(graph, caches, self._nodes, left)
        return splitting.run(), splitting.originals


def _caches(graph: Graph, left: Set[int]) -> Iterator[tuple[int, _Caches]]:
    """Yields the roots that attention of several sequences reads, except for that of nodes that are left whole."""
    found: dict[int, _Caches | None] = {}
    for i, (node, wires) in enumerate(zip(graph.nodes, graph.wires, strict=True)):
        for source in (_K, _V) if node.op == "flash_attn_ext" and i not in left else ():
            t, at = node.inputs[source], wires.inputs[source]
            if t is None or at is None or t.ne[3] == 1:
                continue
            here = _Caches(t.nb[3], at.offset // t.nb[3], t.ne[3])
            known = found.setdefault(at.root, here)
            found[at.root] = here if known == here and _is_split(graph, node, wires) else None
    yield from ((root, caches) for root, caches in found.items() if caches)


def _is_split(graph: Graph, node: ExportedNode, wires: Wires) -> bool:
    """Whether attention is of sequences with a cache each: all of the mask, too, and each result fills its own memory."""
    q, k, v, mask = node.inputs[:4]
    where = wires.inputs[_MASK]
    if q is None or k is None or v is None or mask is None or where is None:
        return False
    rows = mask.ne[0] * TYPES[mask.dtype].size
    return (
        q.ne[3] == k.ne[3] == v.ne[3] == mask.ne[3]
        and mask.ne[2] == 1
        and where.offset == 0
        and mask.nb[3] == rows * mask.ne[1]
        and graph.roots[where.root].node is None
        and node.output.ne[3] == q.ne[3]
        and wires.output.offset == 0
    )


class _Splitting:
    """The making of one graph."""

    def __init__(
        self,
        graph: Graph,
        caches: Mapping[int, _Caches],
        nodes: dict[ExportedNode, ExportedNode],
        left: Set[int],
    ) -> None:
        self._graph, self._caches, self._known, self._left = graph, caches, nodes, left
        self.originals: list[int] = []
        self._made = _Made()
        self._roots = dict(graph.roots)
        self._parts: dict[tuple[int, int], int] = {}  # of a root's parts, their own
        self._number = itertools.count(max(graph.roots) + 1)

    def run(self) -> Graph:
        graph = self._graph
        place = [0] * (len(graph.nodes) + 1)
        for i, node in enumerate(graph.nodes):
            place[i] = len(self._made.nodes)
            split = self._attend if node.op == "flash_attn_ext" else self._write if node.op == "set_rows" else None
            if split is None or i in self._left or not split(node, graph.names[i], graph.wires[i]):
                self._made.add(node, graph.names[i], graph.wires[i])
            self.originals += [i] * (len(self._made.nodes) - place[i])
            own = graph.roots[graph.wires[i].output.root]
            if own.node == i:
                self._roots[graph.wires[i].output.root] = replace(own, node=len(self._made.nodes) - 1)
        place[-1] = len(self._made.nodes)
        return replace(
            graph,
            nodes=tuple(self._made.nodes),
            names=tuple(self._made.names),
            wires=tuple(self._made.wires),
            roots=self._roots,
            zeroed=frozenset(place[i] for i in graph.zeroed),
            unread={root: place[i] for root, i in graph.unread.items()},
            differing=frozenset(j for i in graph.differing for j in range(place[i], place[i + 1])),
        )

    def _node(self, node: ExportedNode) -> ExportedNode:
        return self._known.setdefault(node, node)

    def _part(self, root: int, begin: int, shape: Shape) -> int:
        """Returns the root of a part of a root that is given to the graph."""
        if (root, begin) not in self._parts:
            self._parts[root, begin] = next(self._number)
            whole = self._graph.roots[root]
            self._roots[self._parts[root, begin]] = Root(whole.name, shape, None, False, whole.weight)
        return self._parts[root, begin]

    def _cache(self, root: int, i: int, row: Shape) -> tuple[At, int]:
        """Returns where the cache of a call's sequence begins, and how many rows it has."""
        caches = self._caches[root]
        rows = caches.stride // row.nb[1]
        begin = (caches.first + i) * caches.stride
        return At(self._part(root, begin, _matrix(row, rows)), 0), rows

    def _write(self, node: ExportedNode, name: str, wires: Wires) -> bool:
        """Adds a write for each sequence. Returns False where it is not one to the caches of several."""
        caches = self._caches.get(wires.output.root)
        rows, numbers, into = node.inputs
        given, at, _ = wires.inputs
        assert rows and numbers and into and given and at
        if not caches or into.ne[2:] != (1, 1) or wires.output.offset or caches.stride % into.nb[1]:
            return False
        tokens, rest = divmod(rows.ne[1], caches.n)
        if rest or at.offset or self._graph.roots[at.root].node is not None:
            return False
        of_each = _matrix(numbers, 1, tokens)
        for i in range(caches.n):
            cache, n_rows = self._cache(wires.output.root, i, into)
            output = _matrix(into, n_rows)
            own = self._part(at.root, i * of_each.nb[1], of_each)
            self._made.add(
                self._node(replace(node, inputs=(_matrix(rows, tokens), of_each, output), output=output)),
                name,
                Wires((At(given.root, given.offset + i * tokens * rows.nb[1]), At(own, 0), cache), cache),
            )
        return True

    def _attend(self, node: ExportedNode, name: str, wires: Wires) -> bool:
        """Adds attention of each sequence, and what puts the results after one another. Returns False where it is of one."""
        q, k, v, mask = node.inputs[:4]
        at = wires.inputs
        where = at[_K], at[_V]
        if not (q and k and v and mask and where[0] and where[1]) or q.ne[3] == 1:
            return False
        if where[0].root not in self._caches or where[1].root not in self._caches:
            return False
        parts = [_first(t) for t in (q, k, v, mask)]
        output = _first(node.output)
        own = self._node(replace(node, inputs=(*parts, *node.inputs[4:]), output=output))
        results: list[At] = []
        for i in range(q.ne[3]):
            caches = []
            for t, whole in ((k, where[0]), (v, where[1])):
                row = Shape(t.dtype, (t.ne[0], t.ne[1], 1, 1), t.nb)
                cache, _ = self._cache(whole.root, i, row)
                caches.append(At(cache.root, whole.offset % self._caches[whole.root].stride))
            begin = at[_Q], at[_MASK]
            assert begin[0] and begin[1]
            inputs = (
                At(begin[0].root, begin[0].offset + i * q.nb[3]),
                *caches,
                At(self._part(begin[1].root, i * mask.nb[3], parts[_MASK]), 0),
                *at[4:],
            )
            results.append(At(next(self._number), 0))
            self._roots[results[-1].root] = Root(
                name, output, self._made.add(own, name, Wires(inputs, results[-1])), False
            )
        joined, shape = results[0], output
        for i, result in enumerate(results[1:], 1):
            longer = _longer(output, i + 1)
            last = i == len(results) - 1
            to = wires.output if last else At(next(self._number), 0)
            words = (_TOKENS, *(0,) * (N_WORDS - 1))
            concat = self._node(ExportedNode("concat", (shape, output), longer, words, None))
            number = self._made.add(concat, name, Wires((joined, result), to))
            self._roots[to.root] = (
                replace(self._roots[to.root], shape=longer, node=number) if last else Root(name, longer, number, False)
            )
            joined, shape = to, longer
        return True


def _first(t: Shape) -> Shape:
    """Returns the first sequence's part of a tensor."""
    return Shape(t.dtype, (*t.ne[:3], 1), (*t.nb[:3], t.nb[2] * t.ne[2]))


def _longer(t: Shape, n: int) -> Shape:
    ne = (*t.ne[:_TOKENS], t.ne[_TOKENS] * n, 1)
    return Shape(t.dtype, ne, (*t.nb[:3], t.nb[2] * ne[2]))


def _matrix(t: Shape, rows: int, columns: int | None = None) -> Shape:
    """Returns a matrix of a tensor's rows, of other ones."""
    ne = t.ne[0] if columns is None else columns
    row = t.nb[1] if columns is None else columns * t.nb[0]
    return Shape(t.dtype, (ne, rows, 1, 1), (t.nb[0], row, row * rows, row * rows))
