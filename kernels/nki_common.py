"""Shared helpers of the NKI kernels: tiles in SBUF and PSUM, and tensors in device memory (HBM)."""

from collections.abc import Iterator

import nki.isa as nisa
import nki.language as nl
import numpy as np

from kernelgen.languages import targets
from kernelgen.targets import TARGETS

PARTITIONS = 128

RUN = 4096
"""Bytes of a row that one DMA reads, if the row has as many. Shorter reads reach at most half of the DMA's rate."""


def sbuf(shape, dtype=nl.float32):
    """Returns a new tile in SBUF; its first dimension is the partition dimension."""
    return nl.ndarray(shape, dtype, buffer=nl.sbuf)


def psum(shape, dtype=nl.float32):
    """Returns a new tile in PSUM."""
    return nl.ndarray(shape, dtype, buffer=nl.psum)


def hbm(shape, dtype):
    """Returns a new tensor that the kernel may return."""
    return nl.ndarray(shape, dtype, buffer=nl.shared_hbm)


def named(source, number):
    """Returns the view in HBM shifted by `number` steps of its tensor's first dimension.

    number: a tile with one integer, or None for no shift. A DMA reads the shift from a register and has no more descriptors
    than without a shift; XLA's gather of a matrix has descriptors for all matrices.
    """
    return source if number is None else source.ap(source.get_pattern(), scalar_offset=number)


def loaded(source, dtype=None, shape=None, number=None):
    """Loads a view in HBM into a new tile, in `dtype` (default: the view's) and `shape` (with as many elements).

    With `number`, a tile with one integer, it loads the view shifted by that many steps of the tensor's first dimension.
    """
    tile = sbuf(shape or source.shape, dtype or source.dtype)
    nisa.dma_copy(dst=tile, src=named(source, number))
    return tile


def turned_dtypes(dtype):
    """Returns two dtypes for transposing a tile of `dtype`: the input's, and the result's in PSUM.

    On gen2 the result is always F32; later generations keep the input's dtype. F32 on both sides works for targets of both
    kinds and for unknown targets.
    """
    single = np.dtype(np.float32)
    older = newer = False
    for target in targets():  # AWS's tracer accepts no comprehension
        newer = newer or TARGETS[target].neuron_core > 2
        older = older or TARGETS[target].neuron_core == 2
    if newer and not older:
        return dtype, dtype
    return (dtype if older and not newer else single), single


def turn(target, rows, number=None):
    """Writes rows in HBM, [n, k] of any n, transposed to a tile, [128, ⌈k / 128⌉, n]; for `number` see `loaded`.

    A DMA reads the rows in their order, and the tensor engine transposes them: 40 to 208 ns for 128 x 128 elements. A DMA that
    transposes moves each element separately; one with such steps took 37 us in a measurement.
    """
    n, k = rows.shape
    step = RUN // np.dtype(rows.dtype).itemsize
    for at, count in blocks(n, PARTITIONS):
        for first, width in blocks(k, step):
            part = loaded(rows[at : at + count, first : first + width], turned_dtypes(rows.dtype)[0], number=number)
            chunk = first // PARTITIONS
            turn_tile(target[:, chunk : chunk + -(-width // PARTITIONS), at : at + count], part)


def turn_tile(target, tile, scalar=False):
    """Writes a tile, [n, k] with n at most 128, transposed to another tile, [128, ⌈k / 128⌉, n].

    The tile has the first dtype of `turned_dtypes`. The vector engine copies from PSUM, or the scalar engine with `scalar`.
    """
    n, k = tile.shape
    for first, width in blocks(k, 4 * PARTITIONS):
        whole = psum((min(width, PARTITIONS), -(-width // PARTITIONS), n), turned_dtypes(tile.dtype)[1])  # a bank
        for at, p in blocks(width, PARTITIONS):
            nisa.nc_transpose(dst=whole[0:p, at // PARTITIONS], data=tile[:, first + at : first + at + p])
        chunk = first // PARTITIONS
        if width % PARTITIONS == 0:
            _copy(target[:, chunk : chunk + width // PARTITIONS], whole, scalar)
        else:
            for at, p in blocks(width, PARTITIONS):
                _copy(target[0:p, chunk + at // PARTITIONS], whole[0:p, at // PARTITIONS], scalar)


def turn_each(target, tiles):
    """Transposes adjacent tiles, [n, count, k] in the first dtype of `turned_dtypes`, and writes [128, ⌈k / 128⌉, count, n]."""
    n, count, k = tiles.shape
    for start, part in blocks(count, 4):  # a bank
        for first, width in blocks(k, PARTITIONS):
            whole = psum((width, part, n), turned_dtypes(tiles.dtype)[1])
            for i in range(part):
                nisa.nc_transpose(dst=whole[:, i], data=tiles[:, start + i, first : first + width])
            _copy(target[0:width, first // PARTITIONS, start : start + part], whole, True)


def turned(tile):
    """Returns the transpose [k, n], in PSUM, of a float32 tile [n, k]; n and k are at most 128."""
    made = psum(tile.shape[::-1])
    nisa.nc_transpose(dst=made, data=tile)
    return made


def _copy(target, source, scalar):
    if scalar:  # an activation: `tensor_copy` on this engine requires gen3
        nisa.activation(target, nl.copy, source)
    else:
        nisa.tensor_copy(dst=target, src=source)


def blocks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (start, length) of each block of `total` elements: full blocks in an NKI loop, then the remainder."""
    for i in nl.affine_range(total // size):
        yield i * size, size
    if total % size:
        yield total - total % size, total % size


def row_tiles(heads: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first row, rows, number) of each tile of `heads` heads with n rows each.

    If n is at least 128, each head has its own tiles, so that all heads have the same tiles.
    """
    if n < PARTITIONS:
        for start, p in blocks(heads * n, PARTITIONS):
            yield start, p, start // PARTITIONS
        return
    for head in nl.affine_range(heads):
        for start, p in blocks(n, PARTITIONS):
            yield head * n + start, p, head * -(-n // PARTITIONS) + start // PARTITIONS


def runs(start: int, length: int, period: int) -> list[tuple[int, int, int]]:
    """Splits rows into runs that lie within one period: (offset in the block, first row, number of rows)."""
    found = []
    row = start
    while row < start + length:
        count = min(period - row % period, start + length - row)
        found.append((row - start, row, count))
        row += count
    return found
