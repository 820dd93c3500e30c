"""Rewrites attention's products with a cache into calls of the simulator's library, which reads the cache in place.

A cache stores the vectors of all heads of a cell together, but the product of a head reads its vectors cell by cell. XLA would copy
the whole cache in that order and as float32, after writing a new token's row into another copy. The library's functions
(backend/simulator/src/attention*) read each vector in place: from the cache, or from the row to be written. Results differ only in
the order of sums.

This rewrite changes only the simulator's copy of the HLO, and only if the library is loaded (`weights.load`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelgen.hlo import proto
from kernelgen.simulator import weights
from kernelgen.simulator.updates import Update, same_bytes
from kernelgen.simulator.writing import BF16, F32, Module, Writer, become_reshape, call

F16 = 10
"""XLA's number of the element type."""

TYPES = (F16, BF16, F32)
"""The types of a cache, by the library's numbers (`cache_type` in attention.h)."""

MAX_ROWS = 32
"""The most rows of a head. With many more, XLA's matrix product is faster, although it copies the cache first."""

MIN_ELEMENTS = 1 << 12
"""The fewest elements of the cache. With fewer, the call takes longer than it saves."""

STEP = 16
"""The number of elements of a vector that the functions process at a time."""


def rewrite(hlo: bytes) -> bytes:
    """Returns a serialized `HloModuleProto` that computes the same, its products with a cache rewritten.

    It returns `hlo` if no library is loaded.

    Raises:
        ValueError: `hlo` is not a module.
    """
    if not weights.is_loaded():
        return hlo
    module = proto.parse(hlo, Module)
    writer = Writer(module)
    found = False
    for computation in module.computations:
        by_id = {i.id: i for i in computation.instructions}
        products = {i.id: _product(i, by_id) for i in computation.instructions if i.opcode == "dot"}
        if not any(products.values()):
            continue
        found = True
        writer.out = []
        for instruction in computation.instructions:
            if (product := products.get(instruction.id)) is not None:
                product.write(instruction, writer)
            writer.out.append(instruction)
        computation.ClearField("instructions")
        computation.instructions.extend(writer.out)
    return proto.serialize(module) if found else hlo


@dataclass(frozen=True)
class Vectors:
    """An array in memory, and a view of it with other axes.

    Attributes:
        array: the instruction that produces it.
        update: the update that is written to it before it is read; None for none.
        view: the axes and their strides, as a NumPy array with one byte per element.
    """

    array: Any
    update: Update | None
    view: np.ndarray[Any, Any]

    @staticmethod
    def of(instruction: Any, by_id: Mapping[int, Any]) -> Vectors | None:
        """Returns the array whose elements an instruction returns; None if it changes elements or needs a copy."""
        steps = []
        while instruction.opcode in ("reshape", "transpose") or _is_exact(instruction, by_id):
            steps.append(instruction)
            instruction = by_id[instruction.operand_ids[0]]
        if instruction.shape.element_type not in TYPES or not all(instruction.shape.dimensions):
            return None
        view = _view(tuple(instruction.shape.dimensions))
        for step in reversed(steps):
            if step.opcode == "transpose":
                view = view.transpose(tuple(step.dimensions))
            elif (reshaped := _reshaped(view, tuple(step.shape.dimensions))) is not None:
                view = reshaped
            else:
                return None
        update = Update.of(instruction, by_id)
        return Vectors(same_bytes(update.array, by_id) if update else instruction, update, view)


def _is_exact(instruction: Any, by_id: Mapping[int, Any]) -> bool:
    """Returns whether an instruction converts a cache's type to float32, which is exact."""
    if instruction.opcode != "convert" or instruction.shape.element_type != F32:
        return False
    return by_id[instruction.operand_ids[0]].shape.element_type in TYPES


@dataclass(frozen=True)
class Product:
    """A product of rows and the vectors of a cache, for each head.

    Attributes:
        rows: the instruction that produces the rows.
        order: the rows' axes in this order: heads, rows, the contracted one.
        vectors: the cache.
        sums: whether a result is the sum of vectors, each times an element of a row; else it is the product of a vector and a row.
        heads, n_rows, cells, depth: sizes; `depth` is the length of a vector.
        head_stride, cell_stride: the strides of heads and cells in elements.
    """

    rows: Any
    order: tuple[int, ...]
    vectors: Vectors
    sums: bool
    heads: int
    n_rows: int
    cells: int
    depth: int
    head_stride: int
    cell_stride: int

    def write(self, dot: Any, writer: Writer) -> None:
        """Writes the instructions that compute the product; `dot` becomes the last one."""
        rows = writer.floats(self.rows)
        if self.order != tuple(range(len(self.order))):
            shape = tuple(rows.shape.dimensions)
            rows = writer.add(dot, "transpose", tuple(shape[a] for a in self.order), rows)
            rows.dimensions.extend(self.order)
        operands = [self.vectors.array, rows]
        update = self.vectors.update
        if update is not None:
            operands += [update.part, update.first(writer)]
        options = (
            *(int(self.sums), TYPES.index(self.vectors.array.shape.element_type)),
            *(self.heads, self.n_rows, self.cells, self.depth, self.head_stride, self.cell_stride),
            *(update.size if update else 0, 0),
        )
        shape = (self.heads, self.n_rows, self.depth if self.sums else self.cells)
        become_reshape(dot, call(writer, dot, weights.ATTENTION, shape, operands, options))


def _product(dot: Any, by_id: Mapping[int, Any]) -> Product | None:
    """Returns a `dot` as a product; None if it can't be rewritten."""
    if dot.shape.element_type != F32:
        return None
    rows, matrix = (by_id[i] for i in dot.operand_ids)
    numbers = dot.dot
    if len(numbers.lhs_contracting) != 1 or rows.shape.element_type not in TYPES:
        return None
    (summed,), batch = numbers.lhs_contracting, tuple(numbers.lhs_batch)
    shape = tuple(rows.shape.dimensions)
    free = tuple(a for a in range(len(shape)) if a not in (*batch, summed))
    heads, n_rows = (math.prod(shape[a] for a in axes) for axes in (batch, free))
    vectors = Vectors.of(matrix, by_id)
    if vectors is None or n_rows > MAX_ROWS or not (heads > 1 or vectors.update):
        return None
    (along,), of_heads = numbers.rhs_contracting, tuple(numbers.rhs_batch)
    others = tuple(a for a in range(vectors.view.ndim) if a not in (*of_heads, along))
    sizes = heads, math.prod(vectors.view.shape[a] for a in others), shape[summed]
    view = _reshaped(vectors.view.transpose(*of_heads, *others, along), sizes)
    if view is None:
        return None
    sums = view.strides[2] != 1
    if sums:
        view = view.swapaxes(1, 2)
    _, cells, depth = view.shape
    strides = view.strides[:2]
    grain = (vectors.update.grain, vectors.update.size) if vectors.update else ()
    whole = all(n % depth == 0 for n in (*strides, *grain))
    if view.strides[2] != 1 or depth % STEP or not whole or view.size < MIN_ELEMENTS:
        return None
    return Product(rows, (*batch, *free, summed), vectors, sums, heads, n_rows, cells, depth, *strides)


def _view(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns an array with the strides of a row-major array. Its elements must not be read."""
    strides = [math.prod(shape[a + 1 :]) for a in range(len(shape))]
    return np.lib.stride_tricks.as_strided(np.empty(1, np.int8), shape, strides)


def _reshaped(view: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
    """Returns a view with another shape; None if that needs another order of elements."""
    made = view.view()
    try:
        made.shape = shape
    except AttributeError:
        return None
    return made
