"""Marks a graph's attention as `causal`: its kernels leave out keys that the mask hides (`kernelgen.ggml.causality`).

The backend finds groups in the same way (`backend/ggml-neuron/select/group_search.cpp`), if the mask hides all of these keys.
"""

from __future__ import annotations

from dataclasses import replace

from kernelgen.model.graphs import ExportedNode, Graph
from kernelgen.model.kernel_formulas import KernelFormula

_OP, _MASK, _PARAM = "flash_attn_ext", 3, "causal"


def with_causality(graph: Graph) -> Graph:
    """Returns a graph in which attention with a mask is causal; the same object if it has none."""
    return graph.with_params(lambda node: {_PARAM: True} if _has_mask(node) else {})


def causal_kernel(kernel: KernelFormula) -> KernelFormula:
    """Returns the causal form of a kernel; the same object if it is not attention with a mask."""
    if not _has_mask(kernel):
        return kernel
    return replace(kernel, params=tuple(sorted({**dict(kernel.params), _PARAM: True}.items())))


def _has_mask(node: ExportedNode | KernelFormula) -> bool:
    return node.op == _OP and len(node.inputs) > _MASK and node.inputs[_MASK] is not None
