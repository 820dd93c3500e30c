"""Turns numbers that a program's user chooses, such as an adapter's scale or a temperature, into run-time inputs of kernels.

The backend finds kernels in the same way (`backend/ggml-neuron/select/numbers.h`).
"""

from __future__ import annotations

from dataclasses import replace

from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import ANY
from kernelgen.model.graphs import ExportedNode, Graph


class AnyNumbers:
    """Makes such graphs. Equal nodes are one object, as in the graphs of `GraphReader`."""

    def __init__(self) -> None:
        self._nodes: dict[ExportedNode, ExportedNode] = {}

    def of(self, graph: Graph) -> Graph:
        """Returns a graph whose kernels take all possible numbers at run time; the same object if there are none."""
        nodes = tuple(self._node(node) if ggml_ops.op(node.op).opens else node for node in graph.nodes)
        return graph if nodes == graph.nodes else replace(graph, nodes=nodes)

    def _node(self, node: ExportedNode) -> ExportedNode:
        op = ggml_ops.op(node.op)
        words = op.encode({**op.decode(node.words), **{p.name: ANY for p in op.opens}})
        one = replace(node, words=words)
        return self._nodes.setdefault(one, one)
