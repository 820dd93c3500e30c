"""Finds the nodes of a graph that run in groups, for reports, by the backend's rules
(`backend/ggml-neuron/select/group_search.cpp`).

From each node on, the longest group with a kernel is taken, and the search continues after it. A group's shapes are the graph's
own, as with GGML_NEURON_EXACT=1. The backend also computes groups of fewer tokens or of a shorter cache by kernels for more
(`select/group_lengths.cpp`), and groups of more tokens in chunks (`select/group_pieces.cpp`); this module does not.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from kernelgen.model.any_numbers import with_any_numbers
from kernelgen.model.causal import with_causality
from kernelgen.model.first_cells import with_first_cells
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import readers_of, segment_spec
from kernelgen.model.repeats import Segment
from kernelgen.model.streams import split_streams
from kernelgen.spec.kernel import GraphSpec, KernelSpec, TensorPlace


class UngroupedReason(enum.IntEnum):
    """The reason why a node is in no group; among several, the last one counts."""

    OP = 0
    PLACE = 1
    CUT = 2
    WIRING = 3
    RESULT = 4

    @property
    def words(self) -> str:
        """The reason in the backend's words."""
        return _WORDS[self]


_WORDS = (
    "no group has such a node",
    "their groups have other nodes beside them",
    "their part of the graph ends before the group does",
    "their group is wired in another way",
    "another result of their group is used outside of it",
)


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups of a graph.

    Attributes:
        groups: the groups, in the order of the graph.
        outside: (number, reason) of each node in no group.
        sizes: number of graph nodes in each group: fewer than its kernel's nodes if the kernel has one for each sequence.
        starts: number of the first node of each group.
    """

    groups: tuple[GraphSpec, ...]
    outside: tuple[tuple[int, UngroupedReason], ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def nodes(self) -> int:
        """The number of nodes in groups."""
        return sum(self.sizes)


class Groups:
    """The available graph kernels, for a search in graphs.

    Args:
        specs: the kernels.
    """

    def __init__(self, specs: Iterable[GraphSpec]) -> None:
        self._patterns: dict[KernelSpec, dict[tuple[KernelSpec, ...], set[GraphSpec]]] = defaultdict(dict)
        self._members: set[KernelSpec] = set()
        for spec in specs:
            kernels = tuple(node.kernel for node in spec.nodes)
            self._patterns[kernels[0]].setdefault(kernels, set()).add(spec)
            self._members.update(kernels)
        self._nodes: dict[int, tuple[Hashable, KernelSpec | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._members)

    def find(self, graph: Graph) -> Grouping:
        """Returns the nodes of a graph that run in groups. This includes groups with separate attention and writes for each of
        several sequences with separate caches, if all parts of a node are in one group.
        """
        found, _ = self._find(graph, range(len(graph.nodes)))
        outside = {i for i, _ in found.outside}
        left = {i for i in range(len(graph.nodes)) if i not in outside}
        while True:
            split, originals = split_streams(graph, left)
            if split is graph:
                return found
            parts = Counter(originals)
            grouping, groups = self._find(split, originals)
            together = {i for group in groups for i, n in group.items() if n == parts[i]}
            apart = {i for i, n in parts.items() if n > 1 and i not in together}
            if not apart:
                return grouping
            left |= apart

    def _find(self, graph: Graph, originals: Sequence[int]) -> tuple[Grouping, list[Counter[int]]]:
        """Returns the same for a graph as it is, with the nodes of each group by their numbers in `originals`."""
        # As it is, and for kernels with only the first cells of a cache; before both, for those with causal attention; and all of
        # these for kernels for any numbers.
        plain = (graph, with_first_cells(graph))
        own = (*map(with_causality, plain), *plain)
        graphs = (*own, *map(with_any_numbers, own))
        ways = [(way, [self._token(node) for node in way.nodes]) for way in graphs]
        known = [any(token in self._members for token in tokens) for tokens in zip(*(t for _, t in ways), strict=True)]
        reasons = [UngroupedReason.PLACE if one else UngroupedReason.OP for one in known]
        readers = readers_of(graph)
        groups, outside = [], []
        nodes: list[Counter[int]] = []
        at = 0
        while at < len(known):
            tried = (self._at(way, tokens, at, readers, reasons) for way, tokens in ways)
            group = next((found for found in tried if found is not None), None)
            if group is None:
                outside.append((originals[at], reasons[at]))
                at += 1
            else:
                groups.append(group)
                nodes.append(Counter(originals[at : at + len(group.nodes)]))
                at += len(group.nodes)
        return Grouping(tuple(groups), tuple(outside), tuple(map(len, nodes)), tuple(map(min, nodes))), nodes

    def _token(self, node: Hashable) -> KernelSpec | None:
        # A reader gives equal nodes as one object; keeping it keeps its id unique.
        known = self._nodes.get(id(node))
        if known is None:
            try:
                spec = node.spec()  # type: ignore[attr-defined]
            except (TypeError, ValueError):
                spec = None
            known = self._nodes[id(node)] = (node, spec)
        return known[1]

    def _at(
        self,
        graph: Graph,
        tokens: list[KernelSpec | None],
        first: int,
        readers: dict[int, int],
        reasons: list[UngroupedReason],
    ) -> GraphSpec | None:
        """Returns the longest group that starts with a node; records why others do not."""
        token = tokens[first]
        patterns = self._patterns.get(token) if token is not None else None
        for kernels in sorted(patterns or (), key=len, reverse=True):
            end = first + len(kernels)
            if tuple(tokens[first:end]) != kernels[: len(tokens) - first]:
                continue
            if end > len(tokens):
                _note(reasons, first, len(tokens), UngroupedReason.CUT)
                continue
            assert patterns is not None
            try:
                spec = segment_spec(graph, Segment(first, end), readers)
            except ValueError:
                _note(reasons, first, end, UngroupedReason.WIRING)
                continue
            if spec in patterns[kernels]:
                return spec
            apart = next((other for other in patterns[kernels] if _has_slots_of(spec, other)), None)
            if apart is not None:
                return apart
            same = any(_wiring(spec) == _wiring(other) for other in patterns[kernels])
            _note(reasons, first, end, UngroupedReason.RESULT if same else UngroupedReason.WIRING)
        return None


def _note(reasons: list[UngroupedReason], first: int, end: int, reason: UngroupedReason) -> None:
    reasons[first:end] = [max(known, reason) for known in reasons[first:end]]


def _has_slots_of(spec: GraphSpec, kernel: GraphSpec) -> bool:
    """Returns whether a kernel computes a group that has one tensor where the kernel has several slots."""
    if len(kernel.slots) <= len(spec.slots):
        return False
    whole: dict[int, tuple[int, int]] = {}  # for a kernel's slot: (slot of the group, its start in it)

    def same(a: TensorPlace | None, b: TensorPlace | None) -> bool:
        if a is None or b is None or not (a.slot and b.slot):
            return a == b
        return whole.setdefault(b.index, (a.index, a.offset - b.offset)) == (a.index, a.offset - b.offset)

    for one, other in zip(spec.nodes, kernel.nodes, strict=True):
        places = [(one.place, other.place)]
        for a, b in zip(one.inputs, other.inputs, strict=True):
            places.append((None if a is None else a.place, None if b is None else b.place))
        if one.escapes != other.escapes or not all(same(a, b) for a, b in places):
            return False
    written = {whole[slot][0] for slot in kernel.written}
    uses = Counter(slot for slot, _ in whole.values())
    return all(uses[slot] == 1 for slot in written)


def _wiring(spec: GraphSpec) -> Hashable:
    """Returns a group's structure without what is visible outside it."""
    return tuple(replace(node, escapes=False) for node in spec.nodes), spec.slots
