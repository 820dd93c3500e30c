"""Matrix products in NKI, with weights in F32, F16 and BF16, and in packed Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and the K types."""

import nki.isa as nisa
import nki.language as nl
from jax import lax

import nki
from kernelgen.emitters import emitter
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import TRANSPOSED
from kernelgen.languages.nki import inline

from .common import PREC_F32, result
from .nki_common import PARTITIONS, RUN, blocks, hbm, loaded, psum, sbuf, turn, turn_tile, turned_dtypes

ROWS = 4 * PARTITIONS
"""Rows of `b` at once: their part of the result is in four of PSUM's eight banks."""

COLUMNS = 512
"""Rows of `a` whose products with 128 rows of `b` fill a bank of PSUM."""

ROOM = 152 * 1024
"""Bytes of each partition of SBUF that rows take; the other 24 KiB of trn1's are for tiles that pass by."""

PASSING = 8 * 1024
"""Bytes more that tiles take which pass by in the dtype of the weights: 4 KiB of 128 of their rows, and these transposed."""

PIECE = 2048
"""Elements of a row that are unpacked at once, a multiple of every format's block."""

UNPACKING = 12 * PIECE
"""Bytes that tiles take which unpack `PIECE` elements of each of 128 rows: these in float32, in bytes, their scales, and more."""


@nki.jit
def _products(a, b, each, turned, packed):
    """The products of matrices: `b[i] @ a[j].T`, where each outer matrix of `a` serves `each` of `b`.

    a: [A, G, m, k], or [A, G, k, m] where it is `turned`, or [A, G, m, bytes] u8 of the format that `packed` names, else "";
    b: [A * each, G, n, k], of the type of `a`, or bf16 or f32 where that is packed. Returns [A * each, G, n, m] f32. The rows of
    `b` stay in SBUF, transposed; those of `a` pass by once per `ROWS` of them.
    """
    outer, groups, m = a.shape[0], a.shape[1], a.shape[3 if turned else 2]
    n, k = b.shape[2:]
    weights = _turned if turned else _packed if packed else _plain
    most, columns = _sizes(k, 4 if b.dtype == nl.float32 else 2, a.shape[3] if packed else 0)
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
                        _product(*weights(a[i, g], column, width, k, b.dtype, packed), x, part, k)
    return y


def _sizes(k, itemsize, packed):
    """Returns how many rows of `b` and of `a` fit into SBUF, transposed, beside what unpacks 128 rows of `packed` bytes."""
    line = itemsize * -(-k // PARTITIONS)  # of a partition
    if not packed:
        return min(ROWS, (ROOM - PASSING) // line // 64 * 64), COLUMNS
    most = (ROOM - packed - UNPACKING) // (2 * line) // 64 * 64
    return min(ROWS, most), min(COLUMNS, most)


def _plain(a, column, width, k, dtype, packed):
    """Returns what gives `width` rows of `a` from row `column`, and of how many elements of each at most.

    It takes the first of these elements and their number, and returns them transposed: [128, ⌈size / 128⌉, width].
    """

    def part(first, size):
        tile = sbuf((min(size, PARTITIONS), -(-size // PARTITIONS), width), a.dtype)
        turn(tile, a[column : column + width, first : first + size])
        return tile

    return part, RUN // (4 if a.dtype == nl.float32 else 2)


def _turned(a, column, width, k, dtype, packed):
    """As `_plain`, of weights [k, m], which are transposed as they lie."""

    def part(first, size):
        tile = sbuf((min(size, PARTITIONS), -(-size // PARTITIONS), width), a.dtype)
        for at, p in blocks(size, PARTITIONS):
            source = a[first + at : first + at + p, column : column + width]
            nisa.dma_copy(dst=tile[0:p, at // PARTITIONS], src=source)
        return tile

    return part, 2 * PARTITIONS


def _packed(a, column, width, k, dtype, packed):
    """As `_plain`, of packed rows: the vector engine unpacks them and rounds to `dtype`, and the tensor engine transposes them.

    The scalar engine copies from PSUM, as the vector engine has the more to do.
    """
    block, size_of_block = TYPES[packed].block, TYPES[packed].size
    turned = sbuf((min(k, PARTITIONS), -(-k // PARTITIONS), width), dtype)
    for at, rows in blocks(width, PARTITIONS):
        taken = loaded(a[column + at : column + at + rows]).reshape((rows, k // block, size_of_block))
        for first, size in blocks(k, PIECE):
            numbers = sbuf((rows, size // block, block), turned_dtypes(dtype)[0])
            _unpack(numbers, taken[:, first // block : (first + size) // block], packed)
            chunk = first // PARTITIONS
            part = turned[:, chunk : chunk + -(-size // PARTITIONS), at : at + rows]
            turn_tile(part, numbers.reshape((rows, size)), scalar=True)
    return (lambda first, size: turned), k


def _unpack(numbers, taken, packed):
    """Writes what is in blocks, [rows, blocks, bytes] u8, as numbers: [rows, blocks, elements]."""
    if packed == "q4_0":
        _q4_0(numbers, taken)
    elif packed == "q4_1":
        _linear(numbers, _nibbles(taken, 4), taken)
    elif packed == "q5_0":
        _q5_0(numbers, taken)
    elif packed == "q5_1":
        _linear(numbers, _five(taken, 4, 8), taken)
    elif packed == "q2_K":
        _q2_k(numbers, taken)
    elif packed == "q3_K":
        _q3_k(numbers, taken)
    elif packed == "q4_K":
        _scaled(numbers, _halves(taken, 16), *_k_scales(taken))
    elif packed == "q5_K":
        _q5_k(numbers, taken)
    elif packed == "q6_K":
        _q6_k(numbers, taken)
    else:
        _q8_0(numbers, taken)


def _half(taken, at):
    """Returns the F16 number at byte `at` of each block: [rows, blocks, 1] f32."""
    number = sbuf((taken.shape[0], taken.shape[1], 1))
    nisa.tensor_copy(dst=number, src=taken[:, :, at : at + 2].view(nl.float16))
    return number


def _nibbles(taken, at):
    """Returns the lower halves of 16 bytes from `at` on of each block, then the upper ones: [rows, blocks, 32] u8."""
    codes = sbuf((taken.shape[0], taken.shape[1], 32), nl.uint8)
    nisa.tensor_scalar(codes[:, :, 0:16], taken[:, :, at : at + 16], nl.bitwise_and, 15)
    nisa.tensor_scalar(codes[:, :, 16:32], taken[:, :, at : at + 16], nl.right_shift, 4)
    return codes


def _q4_0(numbers, taken):
    scales = _half(taken, 0).broadcast(2, 32)
    nisa.scalar_tensor_tensor(numbers, _nibbles(taken, 2), nl.subtract, 8.0, nl.multiply, scales)


def _q5_0(numbers, taken):
    scales = _half(taken, 0).broadcast(2, 32)
    nisa.scalar_tensor_tensor(numbers, _five(taken, 2, 6), nl.subtract, 16.0, nl.multiply, scales)


def _linear(numbers, codes, taken):
    """Writes codes, [rows, blocks, 32], times the first F16 number of their block, plus the second."""
    exact = sbuf(numbers.shape)
    nisa.tensor_tensor(exact, codes, _half(taken, 0).broadcast(2, 32), nl.multiply)
    nisa.tensor_tensor(numbers, exact, _half(taken, 2).broadcast(2, 32), nl.add)


def _five(taken, high, low):
    """Returns numbers of five bits, [rows, blocks, 32] u8: 32 bits from byte `high` on are their top bits."""
    codes = _nibbles(taken, low)
    top = sbuf((*taken.shape[:2], 4, 8), nl.uint8)
    for i in range(8):
        _field(top[:, :, :, i], taken[:, :, high : high + 4], i, 1, 4)
    nisa.tensor_tensor(codes, codes, top.reshape(codes.shape), nl.bitwise_or)
    return codes


def _field(target, source, start, width, to):
    """Writes `width` bits of bytes from bit `start` on as bits from bit `to` on; none is shifted out of its byte."""
    op, by = (nl.left_shift, to - start) if to > start else (nl.right_shift, start - to)
    nisa.tensor_scalar(target, source, nl.bitwise_and, ((1 << width) - 1) << start, op1=op, operand1=by)


def _q8_0(numbers, taken):
    scales = _half(taken, 0).broadcast(2, 32)
    nisa.tensor_tensor(numbers, taken[:, :, 2:34].view(nl.int8), scales, nl.multiply)


def _halves(taken, at):
    """Returns the lower halves of each 32 of 128 bytes from `at` on, and after them their upper ones: [rows, blocks, 256] u8."""
    codes = sbuf((*taken.shape[:2], 256), nl.uint8)
    for i in range(4):
        two = taken[:, :, at + 32 * i : at + 32 * i + 32]
        nisa.tensor_scalar(codes[:, :, 64 * i : 64 * i + 32], two, nl.bitwise_and, 15)
        nisa.tensor_scalar(codes[:, :, 64 * i + 32 : 64 * i + 64], two, nl.right_shift, 4)
    return codes


def _pairs(taken, at):
    """Returns the four fields of two bits of each 32 of 64 bytes from `at` on, lowest first: [rows, blocks, 256] u8."""
    codes = sbuf((*taken.shape[:2], 256), nl.uint8)
    for i in range(8):
        four = taken[:, :, at + 32 * (i // 4) : at + 32 * (i // 4) + 32]
        _field(codes[:, :, 32 * i : 32 * i + 32], four, 2 * (i % 4), 2, 0)
    return codes


def _with_top(codes, taken, at, to):
    """Sets bit `to` of 256 numbers: that of the i-th 32 of them is bit i of 32 bytes from `at` on."""
    top = sbuf(codes.shape, nl.uint8)
    for i in range(8):
        _field(top[:, :, 32 * i : 32 * i + 32], taken[:, :, at : at + 32], i, 1, to)
    nisa.tensor_tensor(codes, codes, top, nl.bitwise_or)
    return codes


def _scaled(numbers, codes, scales, minima):
    """Writes codes, [rows, blocks, 256] u8, times the scale of their run, minus its minimum: [rows, blocks * runs, 1] f32 each."""
    size = codes.size // scales.size
    runs = (codes.shape[0], scales.shape[1], size)
    exact = sbuf(runs)
    nisa.tensor_tensor(exact, codes.reshape(runs), scales.broadcast(2, size), nl.multiply)
    nisa.tensor_tensor(numbers.reshape(runs), exact, minima.broadcast(2, size), nl.subtract)


def _q2_k(numbers, taken):
    rows, count = taken.shape[:2]
    both = []
    for op, operand, half in ((nl.bitwise_and, 15, 80), (nl.right_shift, 4, 82)):
        codes, factors = sbuf((rows, count, 16), nl.uint8), sbuf((rows, count, 16))
        nisa.tensor_scalar(codes, taken[:, :, 0:16], op, operand)
        nisa.tensor_tensor(factors, codes, _half(taken, half).broadcast(2, 16), nl.multiply)
        both.append(factors.reshape((rows, count * 16, 1)))
    _scaled(numbers, _pairs(taken, 16), *both)


def _q3_k(numbers, taken):
    rows, count = taken.shape[:2]
    # Sixteen scales of 6 bits in 12 bytes: the lower halves of eight, the upper ones, and two more bits of each in four.
    codes, top = sbuf((rows, count, 16), nl.uint8), sbuf((rows, count, 16), nl.uint8)
    nisa.tensor_scalar(codes[:, :, 0:8], taken[:, :, 96:104], nl.bitwise_and, 15)
    nisa.tensor_scalar(codes[:, :, 8:16], taken[:, :, 96:104], nl.right_shift, 4)
    for i in range(4):
        _field(top[:, :, 4 * i : 4 * i + 4], taken[:, :, 104:108], 2 * i, 2, 4)
    nisa.tensor_tensor(codes, codes, top, nl.bitwise_or)
    scales = sbuf((rows, count, 16))
    half = _half(taken, 108).broadcast(2, 16)
    nisa.scalar_tensor_tensor(scales, codes, nl.subtract, 32.0, nl.multiply, half)
    _signed(numbers, _with_top(_pairs(taken, 32), taken, 0, 2), 4.0, scales)


def _signed(numbers, codes, zero, scales):
    """Writes codes, [rows, blocks, 256] u8, less `zero`, times the scale of their run of 16: [rows, blocks, 16] f32."""
    rows, count = codes.shape[:2]
    runs = (rows, count * 16, 16)
    by_run = scales.reshape((rows, count * 16, 1)).broadcast(2, 16)
    nisa.scalar_tensor_tensor(numbers.reshape(runs), codes.reshape(runs), nl.subtract, zero, nl.multiply, by_run)


def _q5_k(numbers, taken):
    _scaled(numbers, _with_top(_halves(taken, 48), taken, 16, 4), *_k_scales(taken))


def _k_scales(taken):
    """Returns the scales and minima of Q4_K and Q5_K, of 6 bits each in bytes 4 to 15: [rows, blocks * 8, 1] f32 each."""
    rows, count = taken.shape[:2]
    high = taken[:, :, 12:16]
    both = []
    for i in range(2):
        # The first four are in the lower bits of four bytes; the others have their upper two bits there, the rest in `high`.
        low = taken[:, :, 4 + 4 * i : 8 + 4 * i]
        codes = sbuf((rows, count, 8), nl.uint8)
        nisa.tensor_scalar(codes[:, :, 0:4], low, nl.bitwise_and, 63)
        upper = sbuf((rows, count, 4), nl.uint8)
        nisa.tensor_scalar(upper, low, nl.right_shift, 2, op1=nl.bitwise_and, operand1=48)
        lower = sbuf((rows, count, 4), nl.uint8)
        if i == 0:
            nisa.tensor_scalar(lower, high, nl.bitwise_and, 15)
        else:
            nisa.tensor_scalar(lower, high, nl.right_shift, 4)
        nisa.tensor_tensor(codes[:, :, 4:8], lower, upper, nl.bitwise_or)
        factors = sbuf((rows, count, 8))
        nisa.tensor_tensor(factors, codes, _half(taken, 2 * i).broadcast(2, 8), nl.multiply)
        both.append(factors.reshape((rows, count * 8, 1)))
    return both


def _q6_k(numbers, taken):
    rows, count = taken.shape[:2]
    codes, upper = sbuf((rows, count, 256), nl.uint8), sbuf((rows, count, 256), nl.uint8)
    for half in range(2):
        first = 128 * half
        low = taken[:, :, 64 * half : 64 * half + 64]
        nisa.tensor_scalar(codes[:, :, first : first + 64], low, nl.bitwise_and, 15)
        nisa.tensor_scalar(codes[:, :, first + 64 : first + 128], low, nl.right_shift, 4)
        # Two bits of each byte are bits 4 and 5 of a number.
        high = taken[:, :, 128 + 32 * half : 160 + 32 * half]
        for i in range(4):
            _field(upper[:, :, first + 32 * i : first + 32 * i + 32], high, 2 * i, 2, 4)
    nisa.tensor_tensor(codes, codes, upper, nl.bitwise_or)
    scales = sbuf((rows, count, 16))
    nisa.tensor_tensor(scales, taken[:, :, 192:208].view(nl.int8), _half(taken, 208).broadcast(2, 16), nl.multiply)
    _signed(numbers, codes, 32.0, scales)


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
    types=("f32 f16 bf16, float", "q4_0 q4_1 q5_0 q5_1 q8_0 q2_K q3_K q4_K q5_K q6_K, float"),
    language="nki",
    layouts="transposed",
    where=("b_ne0 <= 16384", "b_ne2 * b_ne3 * (a_ne1 // 512 + 1) * (b_ne1 // 512 + 1) * (b_ne0 // 128 + 1) <= 8192"),
)
def mul_mat(a, b, *, prec: int = 0, hint: int = 0, prec_src1: int = 0, inputs, out):
    """The product of `b` and the transpose of `a`, accumulated in float32: dst[n, m] = sum over k of b[n, k] * a[m, k].

    `b` is first rounded to the type of `a` (F16, BF16). Packed weights are unpacked in SBUF and rounded to bfloat16, and so is
    `b`; where `prec_src1` asks for F32, both are float32.

    a: [A3, A2, m, k] f32, f16, bf16 or packed, [A3, A2, k, m] when it is stored transposed; b: [B3, B2, n, k] f32, f16 or
    bf16; A3 divides B3 and A2 divides B2, and each matrix of `a` serves that many of `b`. Returns [B3, B2, n, m] f32.
    """
    del prec, hint
    packed = inputs[0].dtype if TYPES[inputs[0].dtype].quantized else ""
    single = "float32" if prec_src1 == PREC_F32 else "bfloat16"
    b = lax.convert_element_type(b, single if packed else a.dtype)
    a3, a2, rows = a.shape[:3]
    b3, b2, n, k = b.shape
    a = lax.reshape(a, (a3, a2, rows, a.size // (a3 * a2 * rows)))
    # Matrices side by side that share one of `a` are rows of one.
    b = lax.reshape(b, (b3, a2, b2 // a2 * n, k))
    turned = inputs[0].layout == TRANSPOSED
    return result(inline(_products, a, b, each=b3 // a3, turned=turned, packed=packed)[0], out)
