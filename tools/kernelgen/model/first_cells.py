"""Restricts writes to a cache to its first cells, the ones in use, so that no kernel depends on the cache's length.

A call writes to cells that it then reads, and llama.cpp reads a cache up to the last cell in use. So a kernel for SET_ROWS has only
the rows that attention reads. The backend uses it if the row numbers show that the call writes no other row
(`neuron_row_condition` in `backend/ggml-neuron/select/causality.h`), and finds groups in the same way (`select/group_search.cpp`).
"""

from __future__ import annotations

from dataclasses import replace

from kernelgen.ggml.types import TYPES
from kernelgen.model.graphs import ExportedNode, Graph, Shape, unique

_INTO = 2
"""The source of SET_ROWS to which it writes."""


def with_first_cells(graph: Graph) -> Graph:
    """Returns a graph whose writes have only the first rows.

    A write stays unchanged if a reader of the cache has larger strides than a row: these depend on the cache's length. Values
    without flash attention have such strides, and caches of several sequences.
    """
    nodes, roots = list(graph.nodes), dict(graph.roots)
    for i, node in enumerate(graph.nodes):
        n = _rows(graph, i) if node.op == "set_rows" else 0
        if not n:
            continue
        nodes[i] = _with_rows(node, n)
        root = graph.wires[i].output.root
        if roots[root].shape == node.output:
            roots[root] = replace(roots[root], shape=nodes[i].output)
    return replace(graph, nodes=tuple(nodes), roots=roots)


def _rows(graph: Graph, i: int) -> int:
    """Returns the number of rows of a SET_ROWS result up to the last row that is read; 0 if the write needs all rows."""
    into, at, place = graph.nodes[i].inputs[_INTO], graph.wires[i].inputs[_INTO], graph.wires[i].output
    if into is None or at is None or at != place or into.ne[2:] != (1, 1):
        return 0
    row = into.nb[1]
    if row != _row_bytes(into):
        return 0
    end = at.offset
    for node, wires in zip(graph.nodes, graph.wires, strict=True):
        if node.op == "set_rows":
            continue
        for t, where in zip(node.inputs, wires.inputs, strict=True):
            if t is None or where is None or where.root != at.root:
                continue
            if any(n > 1 and nb > row for n, nb in zip(t.ne[1:], t.nb[1:], strict=True)):
                return 0
            end = max(end, where.offset + t.storage_bytes)
    n = -(-(end - at.offset) // row)
    return n if n < into.ne[1] else 0


def _row_bytes(t: Shape) -> int:
    return t.ne[0] // TYPES[t.dtype].block * TYPES[t.dtype].size


def _with_rows(node: ExportedNode, n: int) -> ExportedNode:
    old = node.output
    size = n * old.nb[1]
    output = Shape(old.dtype, (old.ne[0], n, 1, 1), (*old.nb[:2], size, size))
    return unique(replace(node, inputs=(*node.inputs[:_INTO], output), output=output))
