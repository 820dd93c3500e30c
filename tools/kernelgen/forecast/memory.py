"""The device memory of a model's weights and cache."""

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
    """Bytes on a core, without programs (code, scratchpads, results).

    Attributes:
        weights: the weights on a device: without the embedding, which llama.cpp keeps on the CPU.
        cache: keys and values, or states.
        device: memory of the logical core.
    """

    weights: int
    cache: int
    device: int

    @property
    def fits(self) -> bool:
        """Whether both fit."""
        return self.weights + self.cache <= self.device


def of_graph(graph: Graph, chip: Chip, cores: int, widened: Collection[TensorDesc] = ()) -> Memory:
    """Returns a model's memory on a core.

    Args:
        graph: the graph of a call.
        chip: figures of the target.
        cores: number of cores that share weights and cache evenly.
        widened: weights in a larger layout: `bf16` if they name none.
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
        if root.node is None:  # an input of the call that it overwrites
            caches[wires.output.root] = root.shape.storage_bytes
    device = TARGETS[chip.target].memory_gib * chip.lnc << 30
    return Memory(-(-sum(weights.values()) // cores), -(-sum(caches.values()) // cores), device)


def _bytes(root: Root, layout: str) -> int:
    """Returns the bytes of a weight: ggml reserves at least a tensor's own size."""
    shape = root.shape
    if layout not in of_type(shape.dtype):
        return shape.storage_bytes
    return max(shape.storage_bytes, stored_bytes(layout, shape.dtype, shape.ne))
