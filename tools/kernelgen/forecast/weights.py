"""Which layout of weights a token is quickest with, on each target: `kernelgen model --weights auto`.

Only products by weights differ between layouts, so these alone are forecast, from their shapes (`kernelgen.forecast.products`).
Weights of one shape and type have one layout, as they have their kernels in common.
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
"""Times whose ratio is less are equal; then weights stay as ggml has them."""

DIGITS = 6
"""As many digits of what weights gain for a byte are compared; those behind them are rounding of sums."""

ROOM = 16
"""A part in so many of the memory is left for programs, their results and scratchpads, which the forecast does not know."""

_CORES = (1, 2, 4, 8, 16, 32, 64)
"""Up to how many cores a message says whether a layout fits."""

Widened = frozenset[TensorDesc]
"""Weights, as ggml has them, that are in the layout `bf16`; the others are as ggml has them."""


class Products:
    """Products of a call by weights.

    Args:
        graph: what the call computes.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bytes: dict[TensorDesc, int] = {}
        """By quantized weights that may be in the layout `bf16` the bytes of all of that shape and type."""
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
        """Returns the milliseconds of the products, all of them or those by weights of one shape and type."""
        works = (
            (of_product(op, weight.in_layout(BF16) if weight in widened else weight, output), count)
            for (op, weight, output), count in self._counts.items()
            if only in (None, weight)
        )
        time = of_work(of_one_core(added(works), cores), chip)
        return (time.total - time.launch) / 1e3

    def added_bytes(self, widened: Widened) -> int:
        """Returns by how many bytes weights grow in the layout `bf16`."""
        return sum(_widened_bytes(weight, self.bytes[weight]) - self.bytes[weight] for weight in widened)


def _widened_bytes(weight: TensorDesc, size: int) -> int:
    kind = TYPES[weight.dtype]
    return size // kind.size * kind.block * 2


@dataclass(frozen=True, slots=True)
class Option:
    """Layouts that weights may have.

    Attributes:
        widened: weights in the layout `bf16`.
        ms: of a call's products by weights.
        memory: what a core holds.
        cores: the fewest, of 1, 2, 4, …, that hold it; None where 64 do not.
    """

    widened: Widened
    ms: float
    memory: Memory
    cores: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    """What a target takes for a call's products.

    Attributes:
        chip: its figures.
        n_tokens: of the call.
        cores: over how many weights and cache are split.
        options: by what they are called, in order of preference: all weights as ggml has them, all of them in `bf16`, and where
            that does not fit, some.
    """

    chip: Chip
    n_tokens: int
    cores: int
    options: Mapping[str, Option]

    @property
    def name(self) -> str:
        """The quickest option that fits, of equals the first; as ggml has them, where nothing fits."""
        fitting = {name: one for name, one in self.options.items() if has_room(one.memory)}
        least = min((one.ms for one in fitting.values()), default=0.0)
        return next((name for name, one in fitting.items() if one.ms <= EQUAL * least), next(iter(self.options)))

    @property
    def chosen(self) -> Option:
        """The option of that name."""
        return self.options[self.name]

    @property
    def layouts(self) -> tuple[str, ...]:
        """The value of `weights` in a manifest: layouts, or as mappings those of some weights."""
        if self.name in (AS_GGML, BF16):
            return (BF16,) * (self.name == BF16)
        named = ", ".join(f'"{one}"' for one in sorted(map(str, self.chosen.widened)))
        return (f"{{{BF16}: [{named}]}}",)

    @property
    def text(self) -> str:
        """The choice and what others give, in a line."""
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
    """Returns whether there is room for the weights and the cache, and for `ROOM`."""
    return memory.weights + memory.cache <= memory.device - memory.device // ROOM


def said(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Returns lines of what each target takes, of (target, text): a line begins with the targets that it is the same for."""
    targets: dict[str, list[str]] = {}
    for target, text in texts:
        targets.setdefault(text, []).append(target)
    return [f"{', '.join(of)}: {text}" for text, of in targets.items()]


def choose(graph: Graph, chips: Sequence[Chip], cores: int = 1) -> list[Choice]:
    """Returns what each target takes; nothing where no weight is quantized.

    Args:
        graph: what a call computes; one of one token, where there is one.
        chips: of the targets.
        cores: over how many weights, heads and cache are split.
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
        # weights of one type often gain the same for a byte, except for the last digits: then the larger ones first
        order = sorted(products.bytes, key=lambda one: (-products.added_bytes(frozenset([one])), str(one)))
        some: Widened = frozenset()
        for weight in sorted(order, key=lambda one: float(f"{-gains[one]:.{DIGITS}g}")):
            if gains[weight] > 0 and has_room(memory(some | {weight}, cores)):
                some |= {weight}
        if some:
            options[f"{BF16} for {len(some)} of {len(everything)} shapes and types"] = option(some)
    return Choice(chip, products.graph.sizes.get("n_tokens", 1), cores, options)
