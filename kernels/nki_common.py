"""What the kernels in NKI share: tiles, and tensors that lie in the memory of the device."""

from collections.abc import Iterator

import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128


def sbuf(shape, dtype=nl.float32):
    """Returns a new tile in SBUF; its first dimension is the partitions'."""
    return nl.ndarray(shape, dtype, buffer=nl.sbuf)


def psum(shape, dtype=nl.float32):
    """Returns a new tile in PSUM."""
    return nl.ndarray(shape, dtype, buffer=nl.psum)


def hbm(shape, dtype):
    """Returns a new tensor that the kernel may return."""
    return nl.ndarray(shape, dtype, buffer=nl.shared_hbm)


def loaded(source, dtype=None, shape=None):
    """Returns a tile with what a view in HBM holds, in a dtype (its own by default) and a shape of as many elements."""
    tile = sbuf(shape or source.shape, dtype or source.dtype)
    nisa.dma_copy(dst=tile, src=source)
    return tile


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
