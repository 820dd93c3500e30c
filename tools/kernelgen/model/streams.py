"""Splits attention of several sequences with separate caches into one node per sequence, so that each cache is a slot.

llama.cpp computes attention of such a call in one node whose last axis is the sequences. Its strides over the caches depend on a
cache's length. This module replaces each write to the caches and each attention by one node per sequence, and joins the results
with CONCAT. A sequence's part of the caches, of the row numbers and of the mask becomes an input of the graph, as in a call of one
sequence. Without flash attention it splits every node from the product of keys and queries to CONT.
The backend splits a call's graph in the same way (`backend/ggml-neuron/select/streams.h`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from kernelgen.ggml.ops import N_WORDS
from kernelgen.ggml.types import TYPES
from kernelgen.model.graphs import ExportedNode, Graph, NodePlacements, Placement, Root, Shape, unique

_ROWS, _NUMBERS, _INTO = range(3)
"""The sources of SET_ROWS."""
_Q, _K, _V, _MASK = range(4)
"""The sources of FLASH_ATTN_EXT."""
_TOKENS = 2
"""The axis of the tokens in the result of FLASH_ATTN_EXT."""
_ROWS_OF_HEADS = 1
"""The axis of the tokens in the result without flash attention, where a token's heads are one row."""
_SOFT_MAX_MASK = 1
_BETWEEN = ("soft_max", "scale", "tanh")
"""Ops of attention without flash attention besides products and CONT."""


@dataclass(frozen=True, slots=True)
class _Caches:
    """The caches of sequences in a root.

    Attributes:
        stride: bytes of one cache.
        first: the number of the call's first cache.
        n: the number of the call's caches.
    """

    stride: int
    first: int
    n: int


@dataclass
class _Made:
    """A graph that is built node by node."""

    nodes: list[ExportedNode] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    wires: list[NodePlacements] = field(default_factory=list)

    def add(self, node: ExportedNode, name: str, wires: NodePlacements) -> int:
        self.nodes.append(node)
        self.names.append(name)
        self.wires.append(wires)
        return len(self.nodes) - 1


def with_streams(graph: Graph) -> Graph:
    """Returns a graph with one attention per sequence; the same graph if it has no attention of several caches."""
    return split_streams(graph)[0]


def split_streams(graph: Graph, left: Set[int] = frozenset()) -> tuple[Graph, Sequence[int]]:
    """Returns such a graph, and for each of its nodes the number of the original node. Nodes in `left` are not split."""
    unfused = list(_unfused(graph, left))
    caches = dict(_caches(graph, left, unfused))
    if not caches:
        return graph, range(len(graph.nodes))
    splitting = _Splitting(graph, caches, left, unfused)
    return splitting.run(), splitting.originals


@dataclass(frozen=True, slots=True)
class _Unfused:
    """Attention without flash attention: its nodes, and the ones among them whose first source is caches."""

    nodes: tuple[int, ...]
    reading: frozenset[int]

    @property
    def last(self) -> int:
        return self.nodes[-1]


def _caches(graph: Graph, left: Set[int], unfused: Sequence[_Unfused]) -> Iterator[tuple[int, _Caches]]:
    """Yields the roots with caches that attention of several sequences reads, except for attention that is not split."""
    found: dict[int, _Caches | None] = {}

    def note(t: Shape | None, at: Placement | None, is_split: bool) -> None:
        if t is None or at is None or not _is_of_several(graph, t, at):
            return
        here = _Caches(t.nb[3], at.offset // t.nb[3], t.ne[3])
        known = found.setdefault(at.root, here)
        found[at.root] = here if known == here and is_split else None

    for i, (node, wires) in enumerate(zip(graph.nodes, graph.wires, strict=True)):
        for source in (_K, _V) if node.op == "flash_attn_ext" and i not in left else ():
            note(node.inputs[source], wires.inputs[source], _is_split(graph, node, wires))
    for attention in unfused:
        for i in attention.reading:
            note(graph.nodes[i].inputs[0], graph.wires[i].inputs[0], True)
    yield from ((root, caches) for root, caches in found.items() if caches)


def _is_of_several(graph: Graph, t: Shape, at: Placement) -> bool:
    """Whether a tensor is a view of the caches of one or several of a root's sequences."""
    size = graph.roots[at.root].shape.storage_bytes
    return size > t.nb[3] > 0 == size % t.nb[3]


def _unfused(graph: Graph, left: Set[int]) -> Iterator[_Unfused]:
    """Yields each attention without flash attention of several sequences with separate caches, unless its end is in `left`."""
    readers: dict[int, int] | None = None
    for last, (node, wires) in enumerate(zip(graph.nodes, graph.wires, strict=True)):
        heads = node.inputs[0] if node.op == "cont" and last not in left else None
        if heads is None or node.output.ne[1:] != (heads.ne[2] * heads.ne[3], 1, 1):
            continue
        readers = readers or Counter(at.root for w in graph.wires for at in w.inputs if at is not None)
        found = [last]
        reading = set()
        at = wires.inputs[0]
        while at is not None and (i := graph.roots[at.root].node) is not None:
            one, own = graph.nodes[i], graph.wires[i]
            between = readers[at.root] == 1 and not graph.roots[at.root].output and own.output == Placement(at.root, 0)
            if not between or one.output.ne[3] != heads.ne[3] or one.op not in ("mul_mat", *_BETWEEN):
                break
            found.append(i)
            at = own.inputs[0]
            if one.op == "soft_max" and not _is_masked(graph, one, own):
                break
            if one.op == "mul_mat":
                a, b, at = one.inputs[0], own.inputs[1], own.inputs[1]
                before = graph.roots[b.root].node if b is not None else None
                op = "" if before is None else graph.nodes[before].op
                first = op not in ("soft_max", "mul_mat")
                if first or op == "soft_max":
                    given = own.inputs[0]
                    if a is None or given is None or a.ne[3] != heads.ne[3] or not _is_of_several(graph, a, given):
                        break
                    if graph.roots[given.root].node is not None:
                        break
                    reading.add(i)
                if first:
                    if any(graph.nodes[j].op == "soft_max" for j in found):
                        yield _Unfused(tuple(reversed(found)), frozenset(reading))
                    break


def _is_masked(graph: Graph, node: ExportedNode, wires: NodePlacements) -> bool:
    """Whether a SOFT_MAX has a mask of all sequences that is an input of the graph."""
    mask = node.inputs[_SOFT_MAX_MASK] if len(node.inputs) > _SOFT_MAX_MASK else None
    at = wires.inputs[_SOFT_MAX_MASK] if mask is not None else None
    if mask is None or at is None:
        return False
    rows = mask.ne[0] * TYPES[mask.dtype].size
    dense = mask.ne[2] == 1 and mask.nb[3] == rows * mask.ne[1]
    return dense and mask.ne[3] == node.output.ne[3] and at.offset == 0 and graph.roots[at.root].node is None


def _is_split(graph: Graph, node: ExportedNode, wires: NodePlacements) -> bool:
    """Whether attention is of sequences with separate caches, reads the whole mask, and fills the memory of its result."""
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
    """Splits one graph."""

    def __init__(
        self,
        graph: Graph,
        caches: Mapping[int, _Caches],
        left: Set[int],
        unfused: Sequence[_Unfused],
    ) -> None:
        self._graph, self._caches, self._left = graph, caches, left
        self.originals: list[int] = []
        self._made = _Made()
        self._roots = dict(graph.roots)
        self._parts: dict[tuple[int, int], int] = {}  # the root of a root's part, by its offset
        self._number = itertools.count(max(graph.roots) + 1)
        self._between: dict[int, list[int]] = {}  # the roots of a root's sequences
        self._unfused = {
            i: attention
            for attention in unfused
            if all(w is not None and w.root in caches for j in attention.reading for w in graph.wires[j].inputs[:1])
            for i in attention.nodes
        }

    def run(self) -> Graph:
        graph = self._graph
        place = [0] * (len(graph.nodes) + 1)
        for i, node in enumerate(graph.nodes):
            place[i] = len(self._made.nodes)
            if i in self._unfused:
                self._attend_without(i)
            elif i in self._left or not self._split(node, graph.names[i], graph.wires[i]):
                self._made.add(node, graph.names[i], graph.wires[i])
            self.originals += [i] * (len(self._made.nodes) - place[i])
            own = graph.roots[graph.wires[i].output.root]
            if graph.wires[i].output.root in self._between:
                del self._roots[graph.wires[i].output.root]
            elif own.node == i:
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
            parts=frozenset(
                j for begin, end in itertools.pairwise(place) if end - begin > 1 for j in range(begin, end)
            ),
        )

    def _split(self, node: ExportedNode, name: str, wires: NodePlacements) -> bool:
        """Adds a node for each sequence. Returns False if the node is not of several sequences."""
        if node.op == "set_rows":
            return self._write(node, name, wires)
        return node.op == "flash_attn_ext" and self._attend(node, name, wires)

    def _part(self, root: int, begin: int, shape: Shape) -> int:
        """Returns the root of a part of `root`, which is an input of the graph."""
        if (root, begin) not in self._parts:
            self._parts[root, begin] = next(self._number)
            whole = self._graph.roots[root]
            self._roots[self._parts[root, begin]] = Root(whole.name, shape, None, False, whole.weight)
        return self._parts[root, begin]

    def _cache(self, root: int, i: int, row: Shape) -> tuple[Placement, int]:
        """Returns the place of the cache of the call's i-th sequence, and its number of rows."""
        caches = self._caches[root]
        rows = caches.stride // row.nb[1]
        begin = (caches.first + i) * caches.stride
        return Placement(self._part(root, begin, _matrix(row, rows)), 0), rows

    def _write(self, node: ExportedNode, name: str, wires: NodePlacements) -> bool:
        """Adds a write for each sequence. Returns False if the node does not write to the caches of several sequences."""
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
                unique(replace(node, inputs=(_matrix(rows, tokens), of_each, output), output=output)),
                name,
                NodePlacements(
                    (Placement(given.root, given.offset + i * tokens * rows.nb[1]), Placement(own, 0), cache), cache
                ),
            )
        return True

    def _attend(self, node: ExportedNode, name: str, wires: NodePlacements) -> bool:
        """Adds attention for each sequence, and joins the results. Returns False if it is not of several caches."""
        q, k, v, mask = node.inputs[:4]
        at = wires.inputs
        where = at[_K], at[_V]
        if not (q and k and v and mask and where[0] and where[1]):
            return False
        if where[0].root not in self._caches or where[1].root not in self._caches:
            return False
        parts = [_first(t) for t in (q, k, v, mask)]
        output = _first(node.output)
        own = unique(replace(node, inputs=(*parts, *node.inputs[4:]), output=output))
        results: list[Placement] = []
        for i in range(q.ne[3]):
            caches = []
            for t, whole in ((k, where[0]), (v, where[1])):
                row = Shape(t.dtype, (t.ne[0], t.ne[1], 1, 1), t.nb)
                cache, _ = self._cache(whole.root, i, row)
                caches.append(Placement(cache.root, whole.offset % self._caches[whole.root].stride))
            begin = at[_Q], at[_MASK]
            assert begin[0] and begin[1]
            inputs = (
                Placement(begin[0].root, begin[0].offset + i * q.nb[3]),
                *caches,
                Placement(self._part(begin[1].root, i * mask.nb[3], parts[_MASK]), 0),
                *at[4:],
            )
            results.append(Placement(next(self._number), 0))
            self._roots[results[-1].root] = Root(
                name, output, self._made.add(own, name, NodePlacements(inputs, results[-1])), False
            )
        self._join(results, output, name, wires.output, _TOKENS)
        return True

    def _join(self, results: Sequence[Placement], output: Shape, name: str, place: Placement, axis: int) -> None:
        """Adds the CONCATs that join the results of sequences along `axis`; the last one writes to `place`."""
        if len(results) == 1:
            self._made.wires[-1] = replace(self._made.wires[-1], output=place)
            del self._roots[results[0].root]
            return
        joined, shape = results[0], output
        for i, result in enumerate(results[1:], 1):
            longer = _longer(output, i + 1, axis)
            last = i == len(results) - 1
            to = place if last else Placement(next(self._number), 0)
            words = (axis, *(0,) * (N_WORDS - 1))
            concat = unique(ExportedNode("concat", (shape, output), longer, words, None))
            number = self._made.add(concat, name, NodePlacements((joined, result), to))
            self._roots[to.root] = (
                replace(self._roots[to.root], shape=longer, node=number) if last else Root(name, longer, number, False)
            )
            joined, shape = to, longer

    def _attend_without(self, i: int) -> None:
        """Adds a node of attention without flash attention for each sequence, and after the last node joins the results."""
        node, name, wires = self._graph.nodes[i], self._graph.names[i], self._graph.wires[i]
        attention = self._unfused[i]
        n = self._graph.nodes[attention.nodes[0]].output.ne[3]
        ends = i == attention.last
        output = _matrix(node.output, node.output.ne[1] // n) if ends else _first(node.output)
        own = unique(replace(node, inputs=tuple(t and _first(t) for t in node.inputs), output=output))
        results: list[Placement] = []
        for sequence in range(n):
            inputs = tuple(
                None
                if t is None or at is None
                else self._source(t, at, sequence, cache=j == 0 and i in attention.reading, part=node.op == "soft_max")
                for j, (t, at) in enumerate(zip(node.inputs, wires.inputs, strict=True))
            )
            results.append(Placement(next(self._number), 0))
            number = self._made.add(own, name, NodePlacements(inputs, results[-1]))
            self._roots[results[-1].root] = Root(name, output, number, False)
        if ends:
            self._join(results, output, name, wires.output, _ROWS_OF_HEADS)
        else:
            self._between[wires.output.root] = [at.root for at in results]

    def _source(self, t: Shape, at: Placement, i: int, *, cache: bool, part: bool) -> Placement:
        """Returns the place of the i-th sequence's part of a source.

        Args:
            t: the source.
            at: its place.
            i: the sequence.
            cache: whether the source is caches.
            part: whether each sequence's part becomes an input of the graph.
        """
        if cache:
            row = Shape(t.dtype, (t.ne[0], t.ne[1], 1, 1), t.nb)
            return Placement(self._cache(at.root, i, row)[0].root, at.offset % self._caches[at.root].stride)
        if at.root in self._between:
            return Placement(self._between[at.root][i], at.offset)
        if t.ne[3] == 1:
            return at
        if part:
            return Placement(self._part(at.root, i * t.nb[3], _first(t)), 0)
        return Placement(at.root, at.offset + i * t.nb[3])


def _first(t: Shape) -> Shape:
    """Returns the first sequence's part of a tensor."""
    return Shape(t.dtype, (*t.ne[:3], 1), (*t.nb[:3], t.nb[2] * t.ne[2]))


def _longer(t: Shape, n: int, axis: int) -> Shape:
    ne = (t.ne[0], t.ne[1] * n if axis == 1 else t.ne[1], t.ne[2] * n if axis == 2 else t.ne[2], 1)
    nb2 = t.nb[1] * ne[1] if axis == 1 else t.nb[2]
    return Shape(t.dtype, ne, (*t.nb[:2], nb2, nb2 * ne[2]))


def _matrix(t: Shape, rows: int, columns: int | None = None) -> Shape:
    """Returns a matrix of `rows` rows of a tensor; with `columns`, of contiguous rows of that many elements."""
    ne = t.ne[0] if columns is None else columns
    row = t.nb[1] if columns is None else columns * t.nb[0]
    return Shape(t.dtype, (ne, rows, 1, 1), (t.nb[0], row, row * rows, row * rows))
