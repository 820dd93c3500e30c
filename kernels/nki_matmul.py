"""Matrix products in NKI, with weights in F32, F16 and BF16, and in packed Q4_0, Q4_1, Q8_0, Q4_K and Q6_K."""

import nki.isa as nisa
import nki.language as nl
from jax import lax

import nki
from kernelgen.emitters import emitter
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import TRANSPOSED
from kernelgen.languages.nki import inline

from .common import PREC_F32, result
from .matmul import by_expert, take
from .nki_common import PARTITIONS, RUN, blocks, hbm, loaded, named, psum, sbuf, turn, turn_tile, turned_dtypes

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
    y = hbm((outer * each, groups, b.shape[2], m), nl.float32)
    for i in nl.affine_range(outer):
        for r in nl.affine_range(each):
            for g in nl.affine_range(groups):
                _matrices(y[i * each + r, g], a[i, g], b[i * each + r, g], turned, packed)
    return y


@nki.jit
def _chosen_products(a, b, numbers, turned, packed):
    """The products of matrices with those that numbers choose: `b[i] @ a[numbers[i]].T`. Others than these are not read.

    a: [E, m, k], or [E, k, m] where it is `turned`, or [E, m, bytes] u8 of the format that `packed` names, else ""; b: [n, rows,
    k], of the type of `a`, or bf16 or f32 where that is packed; numbers: [1, n] i32, below E. Returns [n, rows, m] f32.
    """
    n, rows = b.shape[:2]
    y = hbm((n, rows, a.shape[2 if turned else 1]), nl.float32)
    chosen = loaded(numbers)
    for i in nl.affine_range(n):
        _matrices(y[i], a[0], b[i], turned, packed, chosen[0:1, i : i + 1])
    return y


def _matrices(y, a, b, turned, packed, number=None):
    """Writes `b @ a.T`, [n, m], of matrices in HBM; with `number`, a tile, of the matrix that is that many after `a`."""
    (n, m), k = y.shape, b.shape[1]
    weights = _turned if turned else _packed if packed else _plain
    most, columns = _sizes(k, 4 if b.dtype == nl.float32 else 2, a.shape[1] if packed else 0)
    for start, rows in blocks(n, most):
        x = sbuf((min(k, PARTITIONS), -(-k // PARTITIONS), rows), b.dtype)
        turn(x, b[start : start + rows])
        # Longer runs for few rows: their sums are in as many banks of PSUM as those of many.
        banks = ROWS // PARTITIONS // -(-rows // PARTITIONS) if turned else 1
        for column, width in blocks(m, banks * columns):
            part = y[start : start + rows, column : column + width]
            _product(*weights(a, column, width, k, b.dtype, packed, number), x, part, k)


def _sizes(k, itemsize, packed):
    """Returns how many rows of `b` and of `a` fit into SBUF, transposed, beside what unpacks 128 rows of `packed` bytes."""
    line = itemsize * -(-k // PARTITIONS)  # of a partition
    if not packed:
        return min(ROWS, (ROOM - PASSING) // line // 64 * 64), COLUMNS
    most = (ROOM - packed - UNPACKING) // (2 * line) // 64 * 64
    return min(ROWS, most), min(COLUMNS, most)


def _plain(a, column, width, k, dtype, packed, number):
    """Returns what gives `width` rows of `a` from row `column`, and of how many elements of each at most.

    It takes the first of these elements and their number, and returns them transposed: [128, ⌈size / 128⌉, width].
    """

    def part(first, size):
        tile = sbuf((min(size, PARTITIONS), -(-size // PARTITIONS), width), a.dtype)
        turn(tile, a[column : column + width, first : first + size], number)
        return tile

    return part, RUN // (4 if a.dtype == nl.float32 else 2)


def _turned(a, column, width, k, dtype, packed, number):
    """As `_plain`, of weights [k, m], which are transposed as they lie."""

    def part(first, size):
        tile = sbuf((min(size, PARTITIONS), -(-size // PARTITIONS), width), a.dtype)
        for at, p in blocks(size, PARTITIONS):
            source = a[first + at : first + at + p, column : column + width]
            nisa.dma_copy(dst=tile[0:p, at // PARTITIONS], src=named(source, number))
        return tile

    return part, 2 * PARTITIONS


def _packed(a, column, width, k, dtype, packed, number):
    """As `_plain`, of packed rows: the vector engine unpacks them and rounds to `dtype`, and the tensor engine transposes them.

    The scalar engine copies from PSUM, as the vector engine has the more to do.
    """
    block, size_of_block = TYPES[packed].block, TYPES[packed].size
    turned = sbuf((min(k, PARTITIONS), -(-k // PARTITIONS), width), dtype)
    for at, rows in blocks(width, PARTITIONS):
        taken = loaded(a[column + at : column + at + rows], number=number).reshape((rows, k // block, size_of_block))
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
        _q4_1(numbers, taken)
    elif packed == "q4_K":
        _q4_k(numbers, taken)
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


def _q4_1(numbers, taken):
    exact = sbuf(numbers.shape)
    nisa.tensor_tensor(exact, _nibbles(taken, 4), _half(taken, 0).broadcast(2, 32), nl.multiply)
    nisa.tensor_tensor(numbers, exact, _half(taken, 2).broadcast(2, 32), nl.add)


def _q8_0(numbers, taken):
    scales = _half(taken, 0).broadcast(2, 32)
    nisa.tensor_tensor(numbers, taken[:, :, 2:34].view(nl.int8), scales, nl.multiply)


def _q4_k(numbers, taken):
    rows, count = taken.shape[:2]
    codes = sbuf((rows, count, 8, 32), nl.uint8)
    for i in range(4):
        two = taken[:, :, 16 + 32 * i : 48 + 32 * i]
        nisa.tensor_scalar(codes[:, :, 2 * i], two, nl.bitwise_and, 15)
        nisa.tensor_scalar(codes[:, :, 2 * i + 1], two, nl.right_shift, 4)
    scales, minima = _k_scales(taken)
    exact = sbuf((rows, count * 8, 32))
    nisa.tensor_tensor(exact, codes.reshape((rows, count * 8, 32)), scales.broadcast(2, 32), nl.multiply)
    nisa.tensor_tensor(numbers.reshape((rows, count * 8, 32)), exact, minima.broadcast(2, 32), nl.subtract)


def _k_scales(taken):
    """Returns the scales and minima of Q4_K, of 6 bits each in bytes 4 to 15: [rows, blocks * 8, 1] f32 each."""
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
        # Two bits of each byte are bits 4 and 5 of a number; none is shifted out of its byte.
        high = taken[:, :, 128 + 32 * half : 160 + 32 * half]
        fields = ((3, nl.left_shift, 4), (12, nl.left_shift, 2), (48, nl.right_shift, 0), (192, nl.right_shift, 2))
        for i in range(4):
            mask, op, by = fields[i]
            place = upper[:, :, first + 32 * i : first + 32 * i + 32]
            nisa.tensor_scalar(place, high, nl.bitwise_and, mask, op1=op, operand1=by)
    nisa.tensor_tensor(codes, codes, upper, nl.bitwise_or)
    scales = sbuf((rows, count, 16))
    nisa.tensor_tensor(scales, taken[:, :, 192:208].view(nl.int8), _half(taken, 208).broadcast(2, 16), nl.multiply)
    runs = (rows, count * 16, 16)
    by_run = scales.reshape((rows, count * 16, 1)).broadcast(2, 16)
    nisa.scalar_tensor_tensor(numbers.reshape(runs), codes.reshape(runs), nl.subtract, 32.0, nl.multiply, by_run)


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
    types=("f32 f16 bf16, float", "q4_0 q4_1 q8_0 q4_K q6_K, float"),
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
    packed, single = _types(inputs[0].dtype, prec_src1)
    b = lax.convert_element_type(b, single)
    a3, a2, rows = a.shape[:3]
    b3, b2, n, k = b.shape
    a = lax.reshape(a, (a3, a2, rows, a.size // (a3 * a2 * rows)))
    # Matrices side by side that share one of `a` are rows of one.
    b = lax.reshape(b, (b3, a2, b2 // a2 * n, k))
    turned = inputs[0].layout == TRANSPOSED
    return result(inline(_products, a, b, each=b3 // a3, turned=turned, packed=packed)[0], out)


def _types(dtype, prec_src1):
    """Returns the name of a packed type, "" for another, and the type that `b` is rounded to."""
    if not TYPES[dtype].quantized:
        return "", {"f16": "float16", "bf16": "bfloat16"}.get(dtype, "float32")
    return dtype, "float32" if prec_src1 == PREC_F32 else "bfloat16"


@emitter(
    "mul_mat_id",
    types=("f32 f16 bf16, float, i32", "q4_0 q4_1 q8_0 q4_K q6_K, float, i32"),
    language="nki",
    layouts="transposed",
    where=(
        "b_ne0 <= 16384",
        "ids_ne1 <= 32",
        # Between half of what is less, pairs or experts, and that.
        "ids_ne0 * ids_ne1 * a_ne2 // (ids_ne0 * ids_ne1 + a_ne2) * (a_ne1 // 512 + 1) * (b_ne0 // 128 + 1) <= 7168",
    ),
)
def mul_mat_id(a, b, ids, *, prec: int = 0, prec_src1: int = 0, inputs, out):
    """Each token's product with the weights of the experts that `ids` names for it: dst[t, u] = a[ids[t, u]] b[t, u mod B].

    As in JAX, rows that share an expert are a block. A DMA reads its weights from where a register says, in as many descriptors and
    bytes as a product of one matrix: what the kernel takes grows with the experts that tokens choose, or all where pairs of a token
    and an expert are more than these, and not with how many lie in memory.

    Rounding is that of `mul_mat`.

    a: [1, E, m, k] f32, f16, bf16 or packed, or [1, E, k, m] when it is stored transposed; b: [1, T, B, k] f32, f16 or bf16, B
    dividing U; ids: [1, 1, T, U] i32, each below E. Returns [1, T, U, m] f32.
    """
    del prec
    packed, single = _types(inputs[0].dtype, prec_src1)
    n_experts, rows, pairs = a.shape[1], a.shape[2], ids.size
    m = inputs[0].ne[1]

    def taken(size):
        """Rows that pass by: of weights, and of `b`, which are gathered, written and read again."""
        return (n_experts + (pairs - n_experts) // size) * (m + 3 * size)

    size = min((2**i for i in range(8)), key=taken)
    b, numbers, chosen, place = by_expert(lax.convert_element_type(b, single), ids, n_experts, size)
    a = lax.reshape(a, (n_experts, rows, a.size // (n_experts * rows)))
    turned = inputs[0].layout == TRANSPOSED
    b = take(b, lax.reshape(numbers, (numbers.size,)))
    b = lax.reshape(b, (*numbers.shape, b.shape[1]))
    y = inline(_chosen_products, a, b, chosen[None, :], turned=turned, packed=packed)[0]
    return result(y if place is None else take(lax.reshape(y, (numbers.size, m)), place), out)
