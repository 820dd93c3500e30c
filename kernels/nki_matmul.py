"""Matrix products in NKI, with weights in F32, F16 and BF16, and in packed Q8_0."""

import nki.isa as nisa
import nki.language as nl
from jax import lax

import nki
from kernelgen.emitters import emitter
from kernelgen.languages.nki import inline

from .common import result
from .nki_common import PARTITIONS, blocks, hbm, loaded, psum, sbuf

ROWS = 4 * PARTITIONS
"""Rows of `b` at once: their part of the result is in four of PSUM's eight banks."""

COLUMNS = 512
"""Rows of `a` whose products with 128 rows of `b` fill a bank of PSUM."""

ROOM = 152 * 1024
"""Bytes of each partition of SBUF that rows take; the other 24 KiB of trn1's are for tiles that pass by."""

Q8_BLOCK, Q8_BYTES = 32, 34
"""Elements of a block of ggml's Q8_0, and its bytes: a scale in F16 and 32 numbers of 8 bits."""


@nki.jit
def _products(a, b, each):
    """The products of matrices: `b[i] @ a[j].T`, where each outer matrix of `a` serves `each` of `b`.

    a: [A, G, m, k], or [A, G, m, bytes] u8 of Q8_0; b: [A * each, G, n, k], of the type of `a` or f32. Returns
    [A * each, G, n, m] f32. The rows of `b` stay in SBUF, transposed; those of `a` pass by once per `ROWS` of them.
    """
    outer, groups, m, _ = a.shape
    n, k = b.shape[2:]
    weights = _packed if a.dtype == nl.uint8 else _plain
    most, columns = _sizes(k, 4 if b.dtype == nl.float32 else 2, a.dtype == nl.uint8)
    y = hbm((outer * each, groups, n, m), nl.float32)
    for i in nl.affine_range(outer):
        for r in nl.affine_range(each):
            for g in nl.affine_range(groups):
                for start, rows in blocks(n, most):
                    x = _transposed(b[i * each + r, g, start : start + rows], k)
                    for column, width in blocks(m, columns):
                        part = y[i * each + r, g, start : start + rows, column : column + width]
                        _product(weights(a[i, g], column, width, k), x, part, k)
    return y


def _sizes(k, itemsize, packed):
    """Returns how many rows of `b` and of `a` fit into SBUF, transposed, beside what unpacks 128 rows of Q8_0."""
    line = itemsize * -(-k // PARTITIONS)  # of a partition
    if not packed:
        return min(ROWS, ROOM // line // 64 * 64), COLUMNS
    most = (ROOM - k * 21 // 4) // (2 * line) // 64 * 64
    return min(ROWS, most), min(COLUMNS, most)


def _transposed(rows, k):
    """Returns rows with the contracted axis on the partitions: [128, ⌈k / 128⌉, rows]."""
    n = rows.shape[0]
    tile = sbuf((min(k, PARTITIONS), -(-k // PARTITIONS), n), rows.dtype)
    for start, p in blocks(k, PARTITIONS):
        nisa.dma_transpose(dst=tile[0:p, start // PARTITIONS], src=rows[:, start : start + p])
    return tile


def _plain(a, column, width, k):
    """Returns what gives `width` rows of `a` from row `column`, elements [start, start + p) of each, transposed: [p, width]."""

    def part(start, p):
        tile = sbuf((p, width), a.dtype)
        nisa.dma_transpose(dst=tile, src=a[column : column + width, start : start + p])
        return tile

    return part


def _packed(a, column, width, k):
    """As `_plain`, of Q8_0: rows are unpacked on the vector engine and transposed by the tensor engine."""
    depth = -(-k // PARTITIONS)
    turned = sbuf((min(k, PARTITIONS), depth, width))
    for at, rows in blocks(width, PARTITIONS):
        unpacked = _unpacked(a[column + at : column + at + rows], k)
        for start, p in blocks(k, PARTITIONS):
            block = psum((p, rows))
            nisa.nc_transpose(dst=block, data=unpacked[:, start : start + p])
            nisa.tensor_copy(dst=turned[0:p, start // PARTITIONS, at : at + rows], src=block)
    return lambda start, p: turned[0:p, start // PARTITIONS]


def _unpacked(rows, k):
    """Returns rows of Q8_0 as float32: [rows, k]."""
    count, size = rows.shape[0], k // Q8_BLOCK
    packed = loaded(rows).reshape((count, size, Q8_BYTES))
    scales = sbuf((count, size, 1))
    nisa.tensor_copy(dst=scales, src=packed[:, :, 0:2].view(nl.float16))
    numbers = sbuf((count, size, Q8_BLOCK))
    nisa.tensor_copy(dst=numbers, src=packed[:, :, 2:Q8_BYTES].view(nl.int8))
    nisa.tensor_tensor(numbers, numbers, scales.broadcast(2, Q8_BLOCK), nl.multiply)
    return numbers.reshape((count, k))


def _product(weights, x, target, k):
    """Writes the product of transposed rows and weights to HBM: [rows, width] f32."""
    rows, width = target.shape
    tiles = []
    for at in range(0, rows, PARTITIONS):
        count = min(PARTITIONS, rows - at)
        tiles.append((at, count, psum((count, width))))  # AWS's tracer takes no comprehension
    for start, p in blocks(k, PARTITIONS):
        moving = weights(start, p)
        for at, count, sums in tiles:
            stationary = x[0:p, start // PARTITIONS, at : at + count]
            nisa.nc_matmul(dst=sums, stationary=stationary, moving=moving, accumulate=start > 0)
    for at, count, sums in tiles:
        done = sbuf((count, width))
        nisa.tensor_copy(dst=done, src=sums)
        nisa.dma_copy(dst=target[at : at + count], src=done)


@emitter(
    "mul_mat",
    types=("f32 f16 bf16, float", "q8_0, float"),
    language="nki",
    where=("b_ne0 <= 16384", "b_ne2 * b_ne3 * (a_ne1 // 512 + 1) * (b_ne1 // 512 + 1) * (b_ne0 // 128 + 1) <= 8192"),
)
def mul_mat(a, b, *, prec: int = 0, hint: int = 0, prec_src1: int = 0, out):
    """The product of `b` and the transpose of `a`, accumulated in float32: dst[n, m] = sum over k of b[n, k] * a[m, k].

    `b` is first rounded to the type of `a` (F16, BF16). Weights in Q8_0 are unpacked to float32 in SBUF.

    a: [A3, A2, m, k] f32, f16, bf16 or q8_0; b: [B3, B2, n, k] f32, f16 or bf16; A3 divides B3 and A2 divides B2, and each
    matrix of `a` serves that many of `b`. Returns [B3, B2, n, m] f32.
    """
    del prec, hint, prec_src1
    b = lax.convert_element_type(b, "float32" if a.dtype == "uint8" else a.dtype)
    a3, a2, m = a.shape[:3]
    b3, b2, n, k = b.shape
    a = lax.reshape(a, (a3, a2, m, a.size // (a3 * a2 * m)))
    # Matrices side by side that share one of `a` are rows of one.
    b = lax.reshape(b, (b3, a2, b2 // a2 * n, k))
    return result(inline(_products, a, b, each=b3 // a3)[0], out)
