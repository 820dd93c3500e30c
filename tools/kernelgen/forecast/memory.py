"""What weights and the cache of a model take of device memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from kernelgen.dispatch.chips import Chip
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import WEIGHTS
from kernelgen.model.graphs import Graph, Root
from kernelgen.targets import TARGETS


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a core; what programs take (code, scratchpads, results) is not in it.

    Attributes:
        weights: those that a device has: not the embedding, which llama.cpp keeps on the CPU.
        cache: of keys and values, or states.
        device: memory of the logical core.
    """

    weights: int
    cache: int
    device: int

    @property
    def fits(self) -> bool:
        """Whether there is room for both."""
        return self.weights + self.cache <= self.device


def of_graph(graph: Graph, chip: Chip, cores: int, widened: Collection[TensorDesc] = ()) -> Memory:
    """Returns what a core has of a model.

    Args:
        graph: what a call computes.
        chip: of the target.
        cores: that weights and cache are split over evenly.
        widened: weights, as ggml has them, that are in the layout `bf16`.
    """
    shapes = {(weight.dtype, weight.ne) for weight in widened}
    weights: dict[int, int] = {}
    caches: dict[int, int] = {}
    for node, wires in zip(graph.nodes, graph.wires, strict=True):
        for number, at in enumerate(wires.inputs):
            root = None if at is None else graph.roots[at.root]
            if at is not None and root is not None and root.weight and not (node.op == "get_rows" and number == 0):
                wide = WEIGHTS.get(node.op) == number and (root.shape.dtype, root.shape.ne) in shapes
                weights[at.root] = max(weights.get(at.root, 0), _bytes(root, wide))
        root = graph.roots[wires.output.root]
        if root.node is None:  # given to the call, and written over
            caches[wires.output.root] = root.shape.storage_bytes
    device = TARGETS[chip.target].memory_gib * chip.lnc << 30
    return Memory(-(-sum(weights.values()) // cores), -(-sum(caches.values()) // cores), device)


def _bytes(root: Root, widened: bool) -> int:
    shape = root.shape
    if widened and TYPES[shape.dtype].quantized:
        return 2 * prod(shape.ne)
    return shape.storage_bytes
