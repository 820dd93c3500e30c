"""Knobs: an author's hints for an array's placement and a loop's tiling. They are checked and recorded, and change no value.

The HLO does not depend on them: they go into the kernel's notes, which `kernelgen inspect` prints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kernelgen.languages.numpy.places import place, refused
from kernelgen.languages.numpy.scope import TRACE, Trace
from kernelgen.languages.numpy.tensor import TracedArray
from kernelgen.targets import PARTITIONS, PSUM_BANK_BYTES, TARGETS

MEM_SPACES = ("Hbm", "Psum", "Sbuf", "SharedHbm")


class Annotated:
    """An array with a chain of hints: `knob.knob(x).tile_op(tile_size=[8, 8]).layout(mem_space="Sbuf")`."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def tile_op(self, *, tile_size: Sequence[int] | int | None = None) -> Annotated:
        """Sets the tiling of the loops of the operation that computes the array.

        Args:
            tile_size: an entry per loop: the dimensions of an elementwise operation's result, the dimensions of a reduction's
                input, or rows, columns and the length of sums of a matrix product.
        """
        trace = _traced(self._tensor)
        if trace is not None and tile_size is not None:
            kind, loops = _loops(self._tensor)
            self._tensor.tile = sizes = _tile("tile_size", tile_size, loops, f"the loops of this {kind}")
            _record(trace, self._tensor, {"tile_op": {"tile_size": sizes}})
        return self

    def layout(
        self,
        *,
        mem_space: str | None = None,
        partition_dim: int | None = None,
        tile_size: Sequence[int] | int | None = None,
    ) -> Annotated:
        """Sets the placement of the array.

        Args:
            mem_space: `Hbm`, `Psum`, `Sbuf` or `SharedHbm`.
            partition_dim: the dimension that lies across partitions.
            tile_size: number of adjacent elements in each dimension.
        """
        trace = _traced(self._tensor)
        if trace is not None:
            found = _layout(self._tensor, mem_space, partition_dim)
            if tile_size is not None:
                found["tile_size"] = sizes = _tile("tile_size", tile_size, self._tensor.shape, "the array's dimensions")
                _in_memory(trace, self._tensor, sizes, found)
            if found:
                _record(trace, self._tensor, {"layout": found})
        return self


class Knob:
    """`knob(x, …)` gives hints for an array and returns it; `knob.knob(x)` starts a chain of hints, `knob.fuse(…)` fuses loops."""

    def __call__(
        self,
        tensor: Any,
        *,
        partition_dim: int | None = None,
        mem_space: str | None = None,
        tile_size: Sequence[int] | int | None = None,
        reduction_tile: Sequence[int] | int | None = None,
    ) -> Any:
        """Returns the array.

        Args:
            tensor: the array.
            partition_dim: the dimension that lies across partitions.
            mem_space: `Hbm`, `Psum`, `Sbuf` or `SharedHbm`.
            tile_size: tile sizes of the loops over the result's dimensions, one each.
            reduction_tile: tile sizes of the loops over summed dimensions, one each.
        """
        trace = _traced(tensor)
        if trace is None:
            return tensor
        found: dict[str, Any] = _layout(tensor, mem_space, partition_dim)
        kind, loops = tensor.iterations or ("array", tensor.shape)
        if reduction_tile is not None:
            reduced = [loops[-1]] if kind == "matmul" else _reduced(loops, tensor.shape) if kind == "reduction" else []
            if not reduced:
                raise refused("reduction_tile: this array is not made by a reduction or a matrix product")
            found["reduction_tile"] = _tile("reduction_tile", reduction_tile, reduced, "what is summed up")
        if tile_size is not None:
            # Tile sizes of loops over sums are in their own argument, or all are in one.
            count = 1 if isinstance(tile_size, int) else len(tile_size)
            if kind in ("matmul", "reduction") and count == len(loops) != tensor.ndim:
                found["tile_size"] = _tile("tile_size", tile_size, loops, "the loops")
            else:
                found["tile_size"] = sizes = _tile("tile_size", tile_size, tensor.shape, "the array's dimensions")
                _in_memory(trace, tensor, sizes, found)
        if found:
            _record(trace, tensor, {"knob": found})
        return tensor

    def knob(self, tensor: Any) -> Annotated:
        """Returns an object that takes an array's hints in a chain."""
        return Annotated(tensor)

    def fuse(self, *tensors: Any) -> None:
        """Fuses the loops of several operations. Each has the same `tile_op`."""
        if len(tensors) < 2:
            raise refused(f"knob.fuse joins the loops of two arrays or more, not of {len(tensors)}")
        trace = TRACE.get()
        if trace is None or not all(isinstance(t, TracedArray) for t in tensors):
            return
        for number, tensor in enumerate(tensors):
            if tensor.tile is None:
                raise refused(f"knob.fuse: array {number} has no tile_op", "give each of them the same tile_op first")
        sizes = [(t.tile, list(_loops(t)[1])) for t in tensors]
        for number, size in enumerate(sizes[1:], 1):
            if size != sizes[0]:
                one, other = (f"{loops} by {tile}" for tile, loops in (size, sizes[0]))
                raise refused(
                    f"knob.fuse: the loops of array {number} are {one}, those of array 0 are {other}",
                    "only equal loops can be one",
                )
        tile, loops = sizes[0]
        trace.knobs.append({"fuse": len(tensors), "tile_size": tile, "loops": loops, **_where()})


knob = Knob()


def _traced(tensor: Any) -> Trace | None:
    """Returns the trace of a tensor; None for a NumPy array, which hints do not apply to."""
    return TRACE.get() if isinstance(tensor, TracedArray) else None


def _tile(name: str, value: Sequence[int] | int, loops: Sequence[int], what: str) -> list[int]:
    """Returns tile sizes as a list, after checking that there is one for each of some loops, at most as large as it."""
    sizes = [value] if isinstance(value, int) else list(value)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise refused(f"{name}: expected numbers of at least 1, not {sizes}")
    if len(sizes) != len(loops):
        raise refused(
            f"{name}: {len(sizes)} entries for {len(loops)}: {what} are {list(loops)}", f"{name} has an entry for each"
        )
    for k, (size, n) in enumerate(zip(sizes, loops, strict=True)):
        if size > n:
            raise refused(
                f"{name}: entry {k} is {size}, and {what} are {list(loops)}", "a tile is not larger than what it cuts"
            )
    return sizes


def _loops(tensor: TracedArray) -> tuple[str, tuple[int, ...]]:
    if tensor.parameter is not None:
        raise refused("tile_op: a parameter is not made by an operation", "give the hint for the result of one")
    # An operation that moves elements has one loop per dimension of its result.
    return tensor.iterations or ("copy", tensor.shape)


def _reduced(loops: Sequence[int], shape: Sequence[int]) -> list[int]:
    left = list(shape)
    found = []
    for n in loops:
        if left and left[0] == n:
            left.pop(0)
        else:
            found.append(n)
            if left and left[0] == 1:
                left.pop(0)
    return found


def _layout(tensor: TracedArray, mem_space: str | None, partition_dim: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if mem_space is not None:
        if mem_space not in MEM_SPACES:
            raise refused(f"mem_space: {mem_space!r} is not one of {', '.join(MEM_SPACES)}")
        found["mem_space"] = mem_space
    if partition_dim is not None:
        if not isinstance(partition_dim, int) or not 0 <= partition_dim < max(tensor.ndim, 1):
            raise refused(f"partition_dim: {partition_dim} is not a dimension of an array of rank {tensor.ndim}")
        kind = tensor.iterations[0] if tensor.iterations else "array"
        if partition_dim and kind not in ("elementwise", "reduction"):
            raise refused(
                f"partition_dim: {partition_dim} of an array that is not made by an elementwise operation or a reduction",
                "only these may have another partition dimension than 0",
            )
        found["partition_dim"] = partition_dim
    return found


def _in_memory(trace: Trace, tensor: TracedArray, sizes: Sequence[int], layout: dict[str, Any]) -> None:
    """Checks that a tile fits into its memory."""
    space = layout.get("mem_space")
    across = layout.get("partition_dim", 0)
    if space not in ("Sbuf", "Psum") or not sizes:
        return
    if sizes[across] > PARTITIONS:
        raise refused(
            f"tile_size: {sizes[across]} elements of dimension {across} lie across partitions, and there are {PARTITIONS}"
        )
    in_partition = math.prod(sizes) // sizes[across] * tensor.itemsize
    if space == "Psum" and in_partition > PSUM_BANK_BYTES:
        raise refused(f"tile_size: {in_partition} bytes in a partition, and a bank of PSUM has {PSUM_BANK_BYTES}")
    for target in trace.targets or ("trn1",):
        limit = TARGETS[target].sbuf_bytes
        if in_partition > limit:
            raise refused(f"tile_size: {in_partition} bytes in a partition, and SBUF of {target} has {limit}")


def _where() -> dict[str, Any]:
    where = place()
    return {"line": where.line} if where else {}


def _record(trace: Trace, tensor: TracedArray, hint: dict[str, Any]) -> None:
    trace.knobs.append({"array": f"{tensor.dtype.name}{list(tensor.shape)}", **hint, **_where()})
