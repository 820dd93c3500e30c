"""Finds attention without a cache in a graph: in encoders, and in decoders to an encoder's results.

Its keys are computed, so kernels of its single nodes have exactly the call's number of tokens. The same is true of the mean of all
tokens (`--pooling mean`). Together with the products or the norm that compute their sources, these nodes are a group, and group
kernels for more tokens can compute it (`backend/ggml-neuron/select/group_lengths.h`).
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgen.model.graphs import Graph
from kernelgen.model.repeats import Segment

_KEYS = 1
"""The source of FLASH_ATTN_EXT with the keys."""
_SCORED = ("scale", "tanh", "add")
"""Ops between the product of keys and queries and SOFT_MAX."""

_NORMS = ("norm", "rms_norm")


def segments(graph: Graph) -> list[Segment]:
    """Returns a segment for each such attention or mean, with the nodes that compute its sources."""
    found: list[Segment] = []
    for end, operands in sorted(_ends(graph)):
        least = found[-1].end if found else 0
        start = min(_sources(graph, operands, least), default=end)
        if start < end and all(node.op != "all_reduce" for node in graph.nodes[start:end]):
            found.append(Segment(start, end + 1))
    return found


def _ends(graph: Graph) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields the last node of each such attention or mean, and the nodes that read its sources."""
    for i, node in enumerate(graph.nodes):
        if node.op == "flash_attn_ext":
            if _is_computed(graph, i, _KEYS):
                yield i, (i,)
        elif node.op == "mul_mat":
            rows = _producer(graph, i, 0)
            weights = graph.wires[i].inputs[1]
            if rows is not None and graph.nodes[rows].op == "cont" and weights and _producer(graph, i, 1) is None:
                yield i, (i,)
        elif node.op == "soft_max":
            scores = _producer(graph, i, 0)
            while scores is not None and graph.nodes[scores].op in _SCORED:
                scores = _producer(graph, scores, 0)
            if scores is None or graph.nodes[scores].op != "mul_mat" or not _is_computed(graph, scores, 0):
                continue
            values = _reader(graph, i, "mul_mat")
            if values is not None:
                heads = _reader(graph, values, "cont")
                yield (values if heads is None else heads), (scores, i, values)


def _producer(graph: Graph, i: int, source: int) -> int | None:
    at = graph.wires[i].inputs[source]
    return None if at is None else graph.roots[at.root].node


def _is_computed(graph: Graph, i: int, source: int) -> bool:
    """Whether a source of a node is a result of the graph in memory of its own.

    A copy of a cache in another type does not count.
    """
    before = _producer(graph, i, source)
    while before is not None and graph.nodes[before].op == "cpy":
        before = _producer(graph, before, 0)
    return before is not None


def _reader(graph: Graph, i: int, op: str) -> int | None:
    """Returns the first node of an op that reads a node's result."""
    root = graph.wires[i].output.root
    readers = (
        j
        for j in range(i + 1, len(graph.nodes))
        if graph.nodes[j].op == op and any(at is not None and at.root == root for at in graph.wires[j].inputs)
    )
    return next(readers, None)


def _sources(graph: Graph, nodes: tuple[int, ...], least: int) -> Iterator[int]:
    """Yields nodes and the nodes that compute their sources, back to norms and products by weights, none before `least`."""
    stack, seen = list(nodes), set(nodes)
    while stack:
        i = stack.pop()
        yield i
        op = graph.nodes[i].op
        if op in _NORMS or (op == "mul_mat" and not _is_computed(graph, i, 0)):
            continue
        for source in range(len(graph.nodes[i].inputs)):
            before = _producer(graph, i, source)
            if before is not None and before >= least and before not in seen:
                seen.add(before)
                stack.append(before)
