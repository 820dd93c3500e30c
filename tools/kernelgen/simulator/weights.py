"""Rewrites products by quantized weights into calls of the simulator's library, which are several times as fast.

XLA compiles the HLO that unpacks a weight to a loop that finds the bytes of each element separately. The library's functions
(backend/simulator/src/weights*) unpack 16 elements at a time with AVX-512, and 8 with AVX2. They replace only the HLO of
kernels/dequantize.py: the instructions that unpack the weight must be exactly the same, for a matrix of any size (`digest`,
`forms.FORMS`). Elements have the same bits, so results differ only in the order of sums.

This rewrite changes only the simulator's copy of the HLO, and only if the library is loaded (`load`).
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernelgen.hlo import proto
from kernelgen.simulator import forms
from kernelgen.simulator.products import MatrixOperand
from kernelgen.simulator.writing import BF16, F32, U8, U32, Module, Writer, become_reshape, call, set_shape

LIBRARY_VARIABLE = "NEURON_SIMULATOR_LIBRARY"
"""The environment variable with the library's path. libnrt, which is that library, sets it for the helper."""

TARGET = "nrt_simulator_weights"
"""The function's name in the library and in custom calls."""

ATTENTION = "nrt_simulator_attention"
"""The name of the function for `attention`."""

TYPES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
    *("q2_K", "q3_K", "q4_K", "q5_K", "q6_K"),
    *("iq4_nl", "iq4_xs", "mxfp4"),
    *("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"),
    *("tq1_0", "tq2_0", "nvfp4", "q1_0", "q2_0"),
)
"""The types, by the library's numbers (`weight_type` in weights.h)."""

POINTS = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s"), 8),
    **dict.fromkeys(("iq3_xxs", "iq3_s"), 4),
}
"""Elements of a lattice point, by type, for types whose elements come from a lattice."""

MAX_ROWS = 32
"""The most rows. With many more, XLA's matrix product is faster, although it unpacks the weight first."""

MIN_ELEMENTS = 1 << 12
"""The fewest elements of the matrix. With fewer, the call takes longer than it saves."""

_loaded = False


def load(path: str) -> bool:
    """Registers the functions of a library with XLA. Returns whether it did, which requires AVX2.

    Args:
        path: the path of the simulator's libnrt.
    """
    global _loaded
    if not _has_avx2():
        return False
    if not _loaded:
        try:
            library = ctypes.CDLL(path)
            functions = {name: getattr(library, name) for name in (TARGET, ATTENTION)}
        except (OSError, AttributeError):
            return False
        from jaxlib import xla_client

        for name, function in functions.items():
            capsule = _new_capsule(ctypes.cast(function, ctypes.c_void_p), b"xla._CUSTOM_CALL_TARGET", None)
            xla_client.register_custom_call_target(name, capsule, platform="cpu", api_version=0)
        _loaded = True
    return True


def is_loaded() -> bool:
    """Returns whether the functions are registered."""
    return _loaded


def _has_avx2() -> bool:
    """Returns whether the processor has AVX2, FMA and F16C, which the functions require. The library detects AVX-512 itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return {"avx2", "fma", "f16c"} <= set(flags)


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def rewrite(hlo: bytes) -> bytes:
    """Returns a serialized `HloModuleProto` that computes the same, its products by quantized weights rewritten.

    It omits the instructions that unpacked a weight and have no other use. This includes the gathers of a lattice, whose indices
    are in bounds. It returns `hlo` if no library is loaded.

    Raises:
        ValueError: `hlo` is not a module.
    """
    if not _loaded:
        return hlo
    module = proto.parse(hlo, Module)
    writer = Writer(module)
    reductions = _reductions(module)
    found = False
    for computation in module.computations:
        by_id = {i.id: i for i in computation.instructions}
        products = {i.id: _product(i, by_id, reductions) for i in computation.instructions}
        if not any(products.values()):
            continue
        found = True
        before = _used(computation.instructions, computation.root_id)
        writer.out = []
        for instruction in computation.instructions:
            if (product := products[instruction.id]) is not None:
                _write(instruction, product, writer)
            writer.out.append(instruction)
        unused = before - _used(writer.out, computation.root_id)
        computation.ClearField("instructions")
        computation.instructions.extend(i for i in writer.out if i.opcode == "parameter" or i.id not in unused)
    return proto.serialize(module) if found else hlo


def _used(instructions: Iterable[Any], root: int) -> set[int]:
    """Returns the ids of the instructions on which the root depends."""
    by_id = {i.id: i for i in instructions}
    used: set[int] = set()
    ahead = [root]
    while ahead:
        number = ahead.pop()
        if number not in used:
            used.add(number)
            ahead += [*by_id[number].operand_ids, *by_id[number].control_predecessor_ids]
    return used


@dataclass(frozen=True)
class Weight:
    """A quantized weight whose elements are rounded to bfloat16, as an operand of a product.

    Attributes:
        blocks: the instruction that produces its bytes, [..., rows, blocks of a row, bytes of a block] u8.
        type: ggml's type.
        m: the number of rows.
        k: elements of a row.
        lattice: the HLO's words for the points of the type's lattice, [points] u16; None if it has no lattice.
    """

    blocks: Any
    type: str
    m: int
    k: int
    lattice: np.ndarray[Any, Any] | None = None

    def call(self, writer: Writer, rows: MatrixOperand) -> Any:
        """Returns a new call of the library that multiplies rows by the weight: [n, m] f32."""
        operands = [self.blocks, rows.made_by]
        if self.lattice is not None:
            operands.append(self._points(self.lattice, writer))
        short = rows.made_by.shape.element_type == BF16
        options = (TYPES.index(self.type), int(short), self.m, self.k, rows.free, 0)
        return call(writer, self.blocks, TARGET, (rows.free, self.m), operands, options)

    def _points(self, lattice: np.ndarray[Any, Any], writer: Writer) -> Any:
        """Returns a constant with the library's words for the points of a lattice."""
        values = points(lattice, POINTS[self.type])
        made = writer.add(self.blocks, "constant", values.shape, element_type=U32)
        set_shape(made.literal.shape, values.shape, U32)
        made.literal.u32s.extend(values.tolist())
        return made


def points(lattice: np.ndarray[Any, Any], n: int) -> np.ndarray[Any, Any]:
    """Converts words with `16 / n` bits for each code of a point, [points] u16, to words with 4 bits for each, [points] u32."""
    codes = (lattice[:, None] >> np.arange(0, 16, 16 // n)) & (2 ** (16 // n) - 1)
    words = codes.astype(np.uint32) << np.arange(0, 4 * n, 4, dtype=np.uint32)
    return np.asarray(np.bitwise_or.reduce(words, axis=1))


def _product(
    dot: Any, by_id: dict[int, Any], reductions: Mapping[int, str]
) -> tuple[MatrixOperand, Weight, bool] | None:
    """Returns the rows and the weight of a product, and whether the weight comes first; None for any other instruction."""
    if dot.opcode != "dot" or dot.shape.element_type != F32:
        return None
    numbers = dot.dot
    lhs, rhs = (by_id[i] for i in dot.operand_ids)
    sides = [
        MatrixOperand.of(lhs, list(numbers.lhs_contracting), list(numbers.lhs_batch)),
        MatrixOperand.of(rhs, list(numbers.rhs_contracting), list(numbers.rhs_batch)),
    ]
    for swapped in (False, True):
        rows, matrix = reversed(sides) if swapped else sides
        if rows is None or matrix is None or rows.free > MAX_ROWS or not (rows.last and matrix.last):
            continue
        if rows.made_by.shape.element_type not in (BF16, F32) or matrix.free * matrix.k < MIN_ELEMENTS:
            continue
        weight = _weight(matrix.made_by, by_id, reductions)
        if weight is not None and (weight.m, weight.k) == (matrix.free, matrix.k):
            return rows, weight, swapped
    return None


def _write(dot: Any, product: tuple[MatrixOperand, Weight, bool], writer: Writer) -> None:
    """Writes the instructions of a product; `dot` becomes the last one."""
    rows, weight, swapped = product
    result = weight.call(writer, rows)
    if swapped and rows.free > 1:
        result = writer.add(dot, "transpose", (weight.m, rows.free), result)
        result.dimensions.extend((1, 0))
    become_reshape(dot, result)


# --- recognizing the instructions that unpack a weight ---


_ELEMENTWISE = {
    *("add", "and", "bitcast-convert", "convert", "multiply", "or", "reshape", "select"),
    *("shift-left", "shift-right-logical", "subtract", "xor"),
}
"""Opcodes that are fully described by their operands and their result's shape."""


def _weight(operand: Any, by_id: dict[int, Any], reductions: Mapping[int, str]) -> Weight | None:
    """Returns the weight behind an operand of a product; None if there is none, or no function for its type."""
    made, rounded = operand, False
    while made.opcode in ("reshape", "convert"):
        before = by_id[made.operand_ids[0]]
        if made.opcode == "convert":
            if {made.shape.element_type, before.shape.element_type} != {BF16, F32}:
                break
            rounded = True
        made = before
    if made.shape.element_type != F32:
        return None
    found = digest(made, by_id, reductions)
    if found is None or (kind := forms.FORMS.get(found[0])) is None:
        return None
    _, blocks, table = found
    lattice = None if table is None else np.frombuffer(table.literal.u16s, "<u2")
    *_, m, n_blocks, _ = blocks.shape.dimensions
    k = n_blocks * math.prod(made.shape.dimensions[len(blocks.shape.dimensions) - 1 :])
    one = math.prod(blocks.shape.dimensions) == math.prod(blocks.shape.dimensions[-3:])
    return Weight(blocks, kind, m, k, lattice) if one and rounded else None


def digest(root: Any, by_id: dict[int, Any], reductions: Mapping[int, str]) -> tuple[str, Any, Any] | None:
    """Returns a digest of the computation that makes elements from the blocks of an array, the array, and its lookup table or None.

    The computation is the same for each block. The digest depends on every instruction between the array and the root, and on
    their attributes, but not on the array's axes before the last one. So computations with the same digest compute the same from
    each block.

    Args:
        root: the instruction that produces the elements; it has the array's axes except for the last one, then further axes.
        by_id: the computation's instructions.
        reductions: the result of `_reductions`.

    Returns:
        None if an instruction may not do the same to each block, or if there are several arrays or tables.
    """
    array, tables = _sliced(root, by_id)
    if array is None or array.shape.element_type != U8 or len(tables) > 1:
        return None
    axes = tuple(array.shape.dimensions)[:-1]
    if tuple(root.shape.dimensions)[: len(axes)] != axes:
        return None
    known: dict[int, str] = {array.id: f"array {array.shape.dimensions[-1]}"}
    ahead = [root]
    while ahead:
        instruction = ahead[-1]
        missing = [by_id[i] for i in instruction.operand_ids if i not in known]
        if missing and instruction.id not in known:
            ahead += missing
            continue
        ahead.pop()
        if instruction.id in known:
            continue
        words = _words(instruction, by_id, axes, reductions)
        if words is None:
            return None
        operands = [known[i] for i in instruction.operand_ids]
        known[instruction.id] = hashlib.sha256(repr((words, operands)).encode()).hexdigest()
    return known[root.id], array, next(iter(tables), None)


def _sliced(root: Any, by_id: dict[int, Any]) -> tuple[Any, list[Any]]:
    """Returns the array from which an instruction's slices come (None unless there is exactly one), and the lookup tables."""
    seen: set[int] = set()
    arrays: dict[int, Any] = {}
    tables: dict[int, Any] = {}
    ahead = [root]
    while ahead:
        instruction = ahead.pop()
        if instruction.id in seen:
            continue
        seen.add(instruction.id)
        operands = [by_id[i] for i in instruction.operand_ids]
        if instruction.opcode == "slice" and _is_part(operands[0], by_id):
            ahead += operands
        elif instruction.opcode == "slice":
            arrays[operands[0].id] = operands[0]
        elif instruction.opcode == "gather":
            tables[operands[0].id] = operands[0]
            ahead += operands
        elif instruction.opcode in _ELEMENTWISE | {"broadcast", "compare", "concatenate", "reduce"}:
            ahead += operands
        elif instruction.opcode != "constant":
            return None, []
    return next(iter(arrays.values())) if len(arrays) == 1 else None, list(tables.values())


def _is_part(array: Any, by_id: dict[int, Any]) -> bool:
    """Returns whether an array is a reshaped slice of some bytes of each block."""
    if array.opcode != "reshape" or (part := by_id[array.operand_ids[0]]).opcode != "slice":
        return False
    whole = by_id[part.operand_ids[0]].shape.dimensions
    return all((d.start, d.limit) == (0, n) for d, n in zip(part.slice_dimensions[:-1], whole[:-1], strict=True))


def _words(
    instruction: Any, by_id: dict[int, Any], axes: tuple[int, ...], reductions: Mapping[int, str]
) -> tuple[Any, ...] | None:
    """Describes an instruction without its operands and `axes`; None if it may not do the same to each block.

    Args:
        instruction: the instruction.
        by_id: the computation's instructions.
        axes: the first axes of the array of blocks.
        reductions: the result of `_reductions`.
    """
    n = len(axes)

    def shape(x: Any) -> tuple[Any, ...]:
        dimensions = tuple(x.shape.dimensions)
        return ("*", *dimensions[n:]) if dimensions[:n] == axes else ("=", *dimensions)

    opcode = instruction.opcode
    words = (opcode, instruction.shape.element_type, shape(instruction))
    operands = [by_id[i] for i in instruction.operand_ids]
    each = all(shape(x)[0] == "*" for x in (instruction, *operands))
    if opcode in _ELEMENTWISE:
        return words
    if opcode == "compare":
        return (*words, instruction.comparison_direction)
    if opcode == "constant":
        return (*words, instruction.literal.SerializeToString(deterministic=True))
    if opcode == "broadcast":
        to = tuple(instruction.dimensions)
        if shape(operands[0])[0] == "*":
            return (*words, "*", *(d - n for d in to[n:])) if to[:n] == tuple(range(n)) else None
        return (*words, "=", *to)
    if opcode == "slice" and each:
        whole = [(0, size, 1) for size in axes]
        ranges = [(d.start, d.limit, d.stride) for d in instruction.slice_dimensions]
        return (*words, *ranges[n:]) if ranges[:n] == whole else None
    if opcode == "concatenate" and each and instruction.dimensions[0] >= n:
        return (*words, instruction.dimensions[0] - n)
    if opcode == "reduce" and shape(operands[0])[0] == "*" and min(instruction.dimensions) >= n:
        operation = reductions.get(instruction.called_computation_ids[0])
        return (*words, operation, *(d - n for d in instruction.dimensions)) if operation else None
    if opcode == "gather" and operands[0].opcode == "constant" and shape(operands[1])[0] == "*":
        numbers = instruction.gather
        each = not numbers.offset_dims and numbers.index_vector_dim == len(operands[1].shape.dimensions) - 1
        sizes = (tuple(numbers.collapsed_slice_dims), tuple(numbers.start_index_map))
        return (*words, *sizes, *instruction.gather_slice_sizes) if each else None
    return None


def _reductions(module: Any) -> dict[int, str]:
    """Returns the operation of each computation that is a single operation of two parameters, by the computation's id."""
    found = {}
    for computation in module.computations:
        root = next(i for i in computation.instructions if i.id == computation.root_id)
        parameters = {i.id for i in computation.instructions if i.opcode == "parameter"}
        if (
            len(computation.instructions) == 3
            and len(parameters) == 2
            and set(root.operand_ids) == parameters
            and root.opcode in ("add", "and", "maximum", "minimum", "multiply", "or")
        ):
            found[computation.id] = root.opcode
    return found


def digests(hlo: bytes) -> list[str]:
    """Returns the digests of the operands of a module's products, for operands that have one.

    Raises:
        ValueError: `hlo` is not a module.
    """
    module = proto.parse(hlo, Module)
    reductions = _reductions(module)
    found = []
    for computation in module.computations:
        by_id = {i.id: i for i in computation.instructions}
        for dot in (i for i in computation.instructions if i.opcode == "dot"):
            for operand in (by_id[i] for i in dot.operand_ids):
                made = operand
                while made.opcode in ("reshape", "convert"):
                    made = by_id[made.operand_ids[0]]
                if (one := digest(made, by_id, reductions)) is not None:
                    found.append(one[0])
    return found
