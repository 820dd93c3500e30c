"""Matrix products in NKI, with weights in F32, F16 and BF16, and in packed Q8_0."""

import nki.isa as nisa
import nki.language as nl
from jax import lax

import nki
from kernelgen.emitters import emitter
from kernelgen.ggml.weight_layouts import TRANSPOSED
from kernelgen.languages.nki import inline

from .common import PREC_F32, result
from .nki_common import PARTITIONS, RUN, blocks, hbm, loaded, psum, sbuf, turn, turn_tile

ROWS = 4 * PARTITIONS
"""Rows of `b` at once: their part of the result is in four of PSUM's eight banks."""

COLUMNS = 512
"""Rows of `a` whose products with 128 rows of `b` fill a bank of PSUM."""

ROOM = 152 * 1024
"""Bytes of each partition of SBUF that rows take; the other 24 KiB of trn1's are for tiles that pass by."""

PASSING = 8 * 1024
"""Bytes more that tiles take which pass by in the dtype of the weights: 4 KiB of 128 of their rows, and these transposed."""

Q8_BLOCK, Q8_BYTES = 32, 34
"""Elements of a block of ggml's Q8_0, and its bytes: a scale in F16 and 32 numbers of 8 bits."""


@nki.jit
def _products(a, b, each, turned):
    """The products of matrices: `b[i] @ a[j].T`, where each outer matrix of `a` serves `each` of `b`.

    a: [A, G, m, k], or [A, G, k, m] where it is `turned`, or [A, G, m, bytes] u8 of Q8_0; b: [A * each, G, n, k], of the type of
    `a`, or bf16 or f32 for Q8_0. Returns [A * each, G, n, m] f32. The rows of `b` stay in SBUF, transposed; those of `a` pass by
    once per `ROWS` of them.
    """
    outer, groups, m = a.shape[0], a.shape[1], a.shape[3 if turned else 2]
    n, k = b.shape[2:]
    weights = _turned if turned else _packed if a.dtype == nl.uint8 else _plain
    most, columns = _sizes(k, 4 if b.dtype == nl.float32 else 2, a.dtype == nl.uint8)
    y = hbm((outer * each, groups, n, m), nl.float32)
    for i in nl.affine_range(outer):
        for r in nl.affine_range(each):
            for g in nl.affine_range(groups):
                for start, rows in blocks(n, most):
                    x = sbuf((min(k, PARTITIONS), -(-k // PARTITIONS), rows), b.dtype)
                    turn(x, b[i * each + r, g, start : start + rows])
                    # Longer runs for few rows: their sums are in as many banks of PSUM as those of many.
                    banks = ROWS // PARTITIONS // -(-rows // PARTITIONS) if turned else 1
                    for column, width in blocks(m, banks * columns):
                        part = y[i * each + r, g, start : start + rows, column : column + width]
                        _product(*weights(a[i, g], column, width, k, b.dtype), x, part, k)
    return y


def _sizes(k, itemsize, packed):
    """Returns how many rows of `b` and of `a` fit into SBUF, transposed, beside what unpacks 128 rows of Q8_0."""
    line = itemsize * -(-k // PARTITIONS)  # of a partition
    if not packed:
        return min(ROWS, (ROOM - PASSING) // line // 64 * 64), COLUMNS
    most = (ROOM - k * 21 // 4) // (2 * line) // 64 * 64
    return min(ROWS, most), min(COLUMNS, most)


def _plain(a, column, width, k, dtype):
    """Returns what gives `width` rows of `a` from row `column`, and of how many elements of each at most.

    It takes the first of these elements and their number, and returns them transposed: [128, ⌈size / 128⌉, width].
    """

    def part(first, size):
        tile = sbuf((min(size, PARTITIONS), -(-size // PARTITIONS), width), a.dtype)
        turn(tile, a[column : column + width, first : first + size])
        return tile

    return part, RUN // (4 if a.dtype == nl.float32 else 2)


def _turned(a, column, width, k, dtype):
    """As `_plain`, of weights [k, m], which are transposed as they lie."""

    def part(first, size):
        tile = sbuf((min(size, PARTITIONS), -(-size // PARTITIONS), width), a.dtype)
        for at, p in blocks(size, PARTITIONS):
            source = a[first + at : first + at + p, column : column + width]
            nisa.dma_copy(dst=tile[0:p, at // PARTITIONS], src=source)
        return tile

    return part, 2 * PARTITIONS


def _packed(a, column, width, k, dtype):
    """As `_plain`, of Q8_0: rows are unpacked on the vector engine, transposed by the tensor engine, and rounded to `dtype`."""
    turned = sbuf((min(k, PARTITIONS), -(-k // PARTITIONS), width), dtype)
    for at, rows in blocks(width, PARTITIONS):
        turn_tile(turned[:, :, at : at + rows], _unpacked(a[column + at : column + at + rows], k))
    return (lambda first, size: turned), k


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


def _product(weights, most, x, target, k):
    """Writes the product of transposed rows and weights, of which `most` elements are there at once, to HBM: [rows, width] f32."""
    tiles = []  # AWS's tracer takes no comprehension
    rows, columns = target.shape
    for at in range(0, rows, PARTITIONS):
        for column in range(0, columns, COLUMNS):
            place = target[at : min(at + PARTITIONS, rows), column : min(column + COLUMNS, columns)]
            tiles.append((at, column, place, psum(place.shape)))
    for first, size in blocks(k, most):
        part = weights(first, size)
        for start, p in blocks(size, PARTITIONS):
            for at, column, place, sums in tiles:
                count, width = place.shape
                moving = part[0:p, start // PARTITIONS, column : column + width]
                stationary = x[0:p, (first + start) // PARTITIONS, at : at + count]
                nisa.nc_matmul(dst=sums, stationary=stationary, moving=moving, accumulate=first + start > 0)
    for _, _, place, sums in tiles:
        done = sbuf(place.shape)
        nisa.tensor_copy(dst=done, src=sums)
        nisa.dma_copy(dst=place, src=done)


@emitter(
    "mul_mat",
    types=("f32 f16 bf16, float", "q8_0, float"),
    language="nki",
    layouts="transposed",
    where=("b_ne0 <= 16384", "b_ne2 * b_ne3 * (a_ne1 // 512 + 1) * (b_ne1 // 512 + 1) * (b_ne0 // 128 + 1) <= 8192"),
)
def mul_mat(a, b, *, prec: int = 0, hint: int = 0, prec_src1: int = 0, inputs, out):
    """The product of `b` and the transpose of `a`, accumulated in float32: dst[n, m] = sum over k of b[n, k] * a[m, k].

    `b` is first rounded to the type of `a` (F16, BF16). Weights in Q8_0 are unpacked in SBUF and rounded to bfloat16, and so is
    `b`; where `prec_src1` asks for F32, both are float32.

    a: [A3, A2, m, k] f32, f16, bf16 or q8_0, [A3, A2, k, m] when it is stored transposed; b: [B3, B2, n, k] f32, f16 or
    bf16; A3 divides B3 and A2 divides B2, and each matrix of `a` serves that many of `b`. Returns [B3, B2, n, m] f32.
    """
    del prec, hint
    packed = "float32" if prec_src1 == PREC_F32 else "bfloat16"
    b = lax.convert_element_type(b, packed if a.dtype == "uint8" else a.dtype)
    a3, a2, rows = a.shape[:3]
    b3, b2, n, k = b.shape
    a = lax.reshape(a, (a3, a2, rows, a.size // (a3 * a2 * rows)))
    # Matrices side by side that share one of `a` are rows of one.
    b = lax.reshape(b, (b3, a2, b2 // a2 * n, k))
    return result(inline(_products, a, b, each=b3 // a3, turned=inputs[0].layout == TRANSPOSED)[0], out)
