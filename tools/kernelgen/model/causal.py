"""Marks a graph's attention as `causal`: its kernels leave out keys that the mask hides (`kernelgen.ggml.causality`).

The backend finds groups in the same way (`backend/ggml-neuron/select/group_search.cpp`), if the mask hides all of these keys.
"""

from __future__ import annotations

from dataclasses import replace

from kernelgen.ggml import ops as ggml_ops
from kernelgen.model.graphs import ExportedNode, Graph
from kernelgen.model.kernel_formulas import KernelFormula

_OP, _MASK, _PARAM = "flash_attn_ext", 3, "causal"


class Causal:
    """Makes such graphs. Equal nodes are one object, as in the graphs of `GraphReader`."""

    def __init__(self) -> None:
        self._nodes: dict[ExportedNode, ExportedNode] = {}

    def of(self, graph: Graph) -> Graph:
        """Returns a graph in which attention with a mask is causal; the same object if it has none."""
        nodes = tuple(self._node(node) if _has_mask(node) else node for node in graph.nodes)
        return graph if nodes == graph.nodes else replace(graph, nodes=nodes)

    def _node(self, node: ExportedNode) -> ExportedNode:
        if node not in self._nodes:
            op = ggml_ops.op(_OP)
            words = op.encode({**op.decode(node.words), _PARAM: True})
            self._nodes[node] = replace(node, words=words)
        return self._nodes[node]


def causal_kernel(kernel: KernelFormula) -> KernelFormula:
    """Returns the causal form of a kernel; the same object if it is not attention with a mask."""
    if not _has_mask(kernel):
        return kernel
    return replace(kernel, params=tuple(sorted({**dict(kernel.params), _PARAM: True}.items())))


def _has_mask(node: ExportedNode | KernelFormula) -> bool:
    return node.op == _OP and len(node.inputs) > _MASK and node.inputs[_MASK] is not None
