"""What weights and the cache of a model take of device memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kernelgen.dispatch.chips import Chip
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.weight_layouts import BF16, WEIGHTS, of_type, stored_bytes
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
        widened: weights in another layout that takes more memory: `bf16` where they name none.
    """
    layouts: dict[tuple[str, tuple[int, ...]], str] = {
        (weight.dtype, weight.ne): weight.layout or BF16 for weight in widened
    }
    weights: dict[int, int] = {}
    caches: dict[int, int] = {}
    for node, wires in zip(graph.nodes, graph.wires, strict=True):
        for number, at in enumerate(wires.inputs):
            root = None if at is None else graph.roots[at.root]
            if at is not None and root is not None and root.weight and not (node.op == "get_rows" and number == 0):
                taken = layouts.get((root.shape.dtype, root.shape.ne), "") if WEIGHTS.get(node.op) == number else ""
                weights[at.root] = max(weights.get(at.root, 0), _bytes(root, taken))
        root = graph.roots[wires.output.root]
        if root.node is None:  # given to the call, and written over
            caches[wires.output.root] = root.shape.storage_bytes
    device = TARGETS[chip.target].memory_gib * chip.lnc << 30
    return Memory(-(-sum(weights.values()) // cores), -(-sum(caches.values()) // cores), device)


def _bytes(root: Root, layout: str) -> int:
    """Returns what a weight takes: ggml reserves no less for a tensor than its own size."""
    shape = root.shape
    if layout not in of_type(shape.dtype):
        return shape.storage_bytes
    return max(shape.storage_bytes, stored_bytes(layout, shape.dtype, shape.ne))
