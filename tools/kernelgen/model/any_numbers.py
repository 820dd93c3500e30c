"""Turns numbers that a program's user chooses, such as an adapter's scale or a temperature, into run-time inputs of kernels.

The backend finds kernels in the same way (`backend/ggml-neuron/select/numbers.h`).
"""

from __future__ import annotations

from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import ANY
from kernelgen.model.graphs import Graph


def with_any_numbers(graph: Graph) -> Graph:
    """Returns a graph whose kernels take all possible numbers at run time; the same object if there are none."""
    return graph.with_params(lambda node: dict.fromkeys((p.name for p in ggml_ops.op(node.op).opens), ANY))
