"""Chooses the layout of weights with which a token is fastest, for each target: `kernelgen model --weights auto`.

Only products by weights differ between layouts, so only these are forecast, from their shapes (`kernelgen.forecast.products`).
Weights of one shape and type share their kernels, and so their layout.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernelgen.dispatch.chips import Chip
from kernelgen.forecast.memory import Memory, of_graph
from kernelgen.forecast.products import added, of_product
from kernelgen.forecast.time import of_work
from kernelgen.forecast.work import of_one_core
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import BF16, WEIGHTS, of_type
from kernelgen.model.graphs import Graph

AS_GGML = "as ggml has them"

EQUAL = 1.01
"""Times with a smaller ratio count as equal; then weights stay in ggml's form."""

DIGITS = 6
"""Significant digits compared of the gain per byte; later digits are rounding of sums."""

ROOM = 16
"""Memory / ROOM is reserved for programs, their results and scratchpads, which the forecast does not include."""

_CORES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of cores for which a message reports whether a layout fits."""

Widened = frozenset[TensorDesc]
"""Weights, in ggml's form, that have the layout `bf16`; the others stay in ggml's form."""


class Products:
    """Products by weights in a call.

    Args:
        graph: the call's graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bytes: dict[TensorDesc, int] = {}
        """Total bytes by shape and type of quantized weights that may have the layout `bf16`."""
        self._counts: Counter[tuple[str, TensorDesc, TensorDesc]] = Counter()
        seen: set[int] = set()
        for node, wires in zip(graph.nodes, graph.wires, strict=True):
            number = WEIGHTS.get(node.op)
            at = None if number is None else wires.inputs[number]
            if number is None or at is None or not graph.roots[at.root].weight or node.empty:
                continue
            with contextlib.suppress(ValueError):  # a tensor that no kernel has
                *inputs, output = node.tensors()
                weight = inputs[number]
                assert weight is not None and output is not None
                self._counts[node.op, weight, output] += 1
                matrix = node.op != "mul_mat" or weight.ne[2] * weight.ne[3] == 1
                if at.root not in seen and BF16 in of_type(weight.dtype) and weight.contiguous and matrix:
                    seen.add(at.root)
                    self.bytes[weight] = self.bytes.get(weight, 0) + weight.storage_bytes

    def ms(self, chip: Chip, cores: int, widened: Widened, only: TensorDesc | None = None) -> float:
        """Returns the milliseconds of all products, or only of products by weights of one shape and type."""
        works = (
            (of_product(op, weight.in_layout(BF16) if weight in widened else weight, output), count)
            for (op, weight, output), count in self._counts.items()
            if only in (None, weight)
        )
        time = of_work(of_one_core(added(works), cores), chip)
        return (time.total - time.launch) / 1e3

    def added_bytes(self, widened: Widened) -> int:
        """Returns the number of bytes by which weights grow in the layout `bf16`."""
        return sum(_widened_bytes(weight, self.bytes[weight]) - self.bytes[weight] for weight in widened)


def _widened_bytes(weight: TensorDesc, size: int) -> int:
    kind = TYPES[weight.dtype]
    return size // kind.size * kind.block * 2


@dataclass(frozen=True, slots=True)
class Option:
    """Possible layouts of the weights.

    Attributes:
        widened: weights in the layout `bf16`.
        ms: milliseconds of a call's products by weights.
        memory: memory on a core.
        cores: the least number of cores, of 1, 2, 4, …, that have room; None if 64 do not.
    """

    widened: Widened
    ms: float
    memory: Memory
    cores: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice for a call's products on a target.

    Attributes:
        chip: its figures.
        n_tokens: number of the call's tokens.
        cores: number of cores that share weights and cache.
        options: by name, in order of preference: all weights in ggml's form, all in `bf16`, and some if that does not
            fit.
    """

    chip: Chip
    n_tokens: int
    cores: int
    options: Mapping[str, Option]

    @property
    def name(self) -> str:
        """The fastest option that fits, the first among equals; ggml's form if none fits."""
        fitting = {name: one for name, one in self.options.items() if has_room(one.memory)}
        least = min((one.ms for one in fitting.values()), default=0.0)
        return next((name for name, one in fitting.items() if one.ms <= EQUAL * least), next(iter(self.options)))

    @property
    def chosen(self) -> Option:
        """The option with that name."""
        return self.options[self.name]

    @property
    def layouts(self) -> tuple[str, ...]:
        """The value of `weights` in a manifest: layouts, or mappings for layouts of some weights."""
        if self.name in (AS_GGML, BF16):
            return (BF16,) * (self.name == BF16)
        named = ", ".join(f'"{one}"' for one in sorted(map(str, self.chosen.widened)))
        return (f"{{{BF16}: [{named}]}}",)

    @property
    def text(self) -> str:
        """The choice and its alternatives, in a line."""
        rest = [name for name in self.options if name != self.name]
        cores = "one core" if self.cores == 1 else f"{self.cores} cores"
        return (
            f"weights {self.name}, by a forecast of the products of {self.n_tokens} token{'s' * (self.n_tokens > 1)} "
            f"by weights on {cores}: {'; '.join(map(self._one, [self.name, *rest]))}; modelled, not measured"
        )

    def _one(self, name: str) -> str:
        one = self.options[name]
        held = (one.memory.weights + one.memory.cache) / (1 << 30)
        parts = [f"{held:.1f} of {one.memory.device >> 30} GiB"]
        if not has_room(one.memory):
            parts.append(f"fits over {one.cores} cores" if one.cores else f"does not fit {_CORES[-1]} cores")
        return f"{name} {one.ms:.1f} ms ({', '.join(parts)})"


def has_room(memory: Memory) -> bool:
    """Returns whether the weights, the cache and the reserve of `ROOM` fit."""
    return memory.weights + memory.cache <= memory.device - memory.device // ROOM


def said(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Returns one line per choice, from (target, text): a line starts with all targets that it applies to."""
    targets: dict[str, list[str]] = {}
    for target, text in texts:
        targets.setdefault(text, []).append(target)
    return [f"{', '.join(of)}: {text}" for text, of in targets.items()]


def choose(graph: Graph, chips: Sequence[Chip], cores: int = 1) -> list[Choice]:
    """Returns the choice for each target; empty if no weight is quantized.

    Args:
        graph: the graph of a call; of one token, if there is one.
        chips: figures of the targets.
        cores: number of cores that share weights, heads and cache.
    """
    products = Products(graph)
    return [_choice(products, chip, cores) for chip in chips] if products.bytes else []


def _choice(products: Products, chip: Chip, cores: int) -> Choice:
    whole = of_graph(products.graph, chip, 1)

    def memory(widened: Widened, n: int) -> Memory:
        weights = whole.weights + products.added_bytes(widened)
        return Memory(-(-weights // n), -(-whole.cache // n), whole.device)

    def option(widened: Widened) -> Option:
        fewest = next((n for n in _CORES if has_room(memory(widened, n))), None)
        return Option(widened, products.ms(chip, cores, widened), memory(widened, cores), fewest)

    everything = frozenset(products.bytes)
    options = {AS_GGML: option(frozenset()), BF16: option(everything)}
    if has_room(options[AS_GGML].memory) and not has_room(options[BF16].memory):
        gains = {
            weight: (products.ms(chip, cores, frozenset(), weight) - products.ms(chip, cores, everything, weight))
            / products.added_bytes(frozenset([weight]))
            for weight in products.bytes
        }
        # weights of one type often gain the same per byte, except for the last digits: then the larger ones first
        order = sorted(products.bytes, key=lambda one: (-products.added_bytes(frozenset([one])), str(one)))
        some: Widened = frozenset()
        for weight in sorted(order, key=lambda one: float(f"{-gains[one]:.{DIGITS}g}")):
            if gains[weight] > 0 and has_room(memory(some | {weight}, cores)):
                some |= {weight}
        if some:
            options[f"{BF16} for {len(some)} of {len(everything)} shapes and types"] = option(some)
    return Choice(chip, products.graph.sizes.get("n_tokens", 1), cores, options)
