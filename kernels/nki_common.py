"""What the kernels in NKI share: tiles, and tensors that lie in the memory of the device."""

from collections.abc import Iterator

import nki.isa as nisa
import nki.language as nl
import numpy as np

from kernelgen.languages.emitting import targets
from kernelgen.targets import TARGETS

PARTITIONS = 128

RUN = 4096
"""Bytes of a row that a DMA reads at once, where there are as many: below, it reaches half of its rate or less."""


def sbuf(shape, dtype=nl.float32):
    """Returns a new tile in SBUF; its first dimension is the partitions'."""
    return nl.ndarray(shape, dtype, buffer=nl.sbuf)


def psum(shape, dtype=nl.float32):
    """Returns a new tile in PSUM."""
    return nl.ndarray(shape, dtype, buffer=nl.psum)


def hbm(shape, dtype):
    """Returns a new tensor that the kernel may return."""
    return nl.ndarray(shape, dtype, buffer=nl.shared_hbm)


def named(source, number):
    """Returns the view in HBM that is `number` steps of its tensor's first dimension on: a tile of one integer, None for none.

    A DMA finds it by a register, and has as many descriptors as without; XLA's gather of a matrix has some for all that there are.
    """
    return source if number is None else source.ap(source.get_pattern(), scalar_offset=number)


def loaded(source, dtype=None, shape=None, number=None):
    """Returns a tile with what a view in HBM holds, in a dtype (its own by default) and a shape of as many elements.

    With `number`, a tile of one integer, it is what lies there that many steps of the tensor's first dimension on.
    """
    tile = sbuf(shape or source.shape, dtype or source.dtype)
    nisa.dma_copy(dst=tile, src=named(source, number))
    return tile


def turned_dtypes(dtype):
    """Returns the dtypes in which a tile of a dtype is transposed, and which it has then, in PSUM.

    There gen2 has F32 alone, and later ones have the input's dtype. For targets of both, or not known, F32 on both sides is right.
    """
    single = np.dtype(np.float32)
    older = newer = False
    for target in targets():  # AWS's tracer takes no comprehension
        newer = newer or TARGETS[target].neuron_core > 2
        older = older or TARGETS[target].neuron_core == 2
    if newer and not older:
        return dtype, dtype
    return (dtype if older and not newer else single), single


def turn(target, rows, number=None):
    """Writes rows in HBM, [n, k], transposed to a tile of any n, [128, ⌈k / 128⌉, n]; for `number` see `loaded`.

    The rows are read as they lie, and the tensor engine transposes them: 40 to 208 ns for 128 x 128 elements. A DMA that transposes
    moves each element by itself; one with such steps was measured at 37 us.
    """
    n, k = rows.shape
    step = RUN // np.dtype(rows.dtype).itemsize
    for at, count in blocks(n, PARTITIONS):
        for first, width in blocks(k, step):
            part = loaded(rows[at : at + count, first : first + width], turned_dtypes(rows.dtype)[0], number=number)
            chunk = first // PARTITIONS
            turn_tile(target[:, chunk : chunk + -(-width // PARTITIONS), at : at + count], part)


def turn_tile(target, tile, scalar=False):
    """Writes a tile, [n, k] with n at most 128, of the first of `turned_dtypes`, transposed to another, [128, ⌈k / 128⌉, n].

    What copies from PSUM is the vector engine, or the `scalar` one.
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
    """Writes tiles side by side, [n, count, k] of the first of `turned_dtypes`, each transposed to [128, ⌈k / 128⌉, count, n]."""
    n, count, k = tiles.shape
    for start, part in blocks(count, 4):  # a bank
        for first, width in blocks(k, PARTITIONS):
            whole = psum((width, part, n), turned_dtypes(tiles.dtype)[1])
            for i in range(part):
                nisa.nc_transpose(dst=whole[:, i], data=tiles[:, start + i, first : first + width])
            _copy(target[0:width, first // PARTITIONS, start : start + part], whole, True)


def turned(tile):
    """Returns a tile of float32, [n, k] of at most 128 each, transposed in PSUM: [k, n]."""
    made = psum(tile.shape[::-1])
    nisa.nc_transpose(dst=made, data=tile)
    return made


def _copy(target, source, scalar):
    if scalar:  # an activation: `tensor_copy` on this engine is of gen3
        nisa.activation(target, nl.copy, source)
    else:
        nisa.tensor_copy(dst=target, src=source)


def blocks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (start, length) of the blocks that `total` elements are cut into: whole ones in a loop of NKI, then the rest."""
    for i in nl.affine_range(total // size):
        yield i * size, size
    if total % size:
        yield total - total % size, total % size


def row_tiles(heads: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first row, rows, number) of the tiles that heads of n rows each are cut into.

    Heads that fill the partitions are cut one by one, so that all of them are alike.
    """
    if n < PARTITIONS:
        for start, p in blocks(heads * n, PARTITIONS):
            yield start, p, start // PARTITIONS
        return
    for head in nl.affine_range(heads):
        for start, p in blocks(n, PARTITIONS):
            yield head * n + start, p, head * -(-n // PARTITIONS) + start // PARTITIONS


def runs(start: int, length: int, period: int) -> list[tuple[int, int, int]]:
    """Cuts rows into runs within one period: (rows before it in the block, its first row's number in the period, how many)."""
    found = []
    row = start
    while row < start + length:
        count = min(period - row % period, start + length - row)
        found.append((row - start, row, count))
        row += count
    return found
