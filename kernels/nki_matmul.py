"""Matrix products in NKI for weights in F32, F16, BF16, packed Q4_0 to Q8_0 and Q2_K to Q6_K, and FP8 with a scale per tile."""

import jax.numpy as jnp
import nki.isa as nisa
import nki.language as nl
from jax import lax

import nki
from kernelgen.emitters import emitter
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import F8_TILES, TILE, TRANSPOSED
from kernelgen.languages.nki import inline

from .common import PREC_F32, result
from .matmul import by_expert, take
from .nki_common import PARTITIONS, RUN, blocks, hbm, loaded, named, psum, sbuf, turn, turn_tile, turned_dtypes
from .nki_common import turned as turned_back

ROWS = 4 * PARTITIONS
"""Rows of `b` per pass: their part of the result fills four of PSUM's eight banks."""

COLUMNS = 512
"""Rows of `a` whose products with 128 rows of `b` fill a bank of PSUM."""

ROOM = 152 * 1024
"""Bytes of each SBUF partition for rows; trn1's other 24 KiB hold tiles for a short time."""

PASSING = 8 * 1024
"""Further bytes for temporary tiles in the weights' dtype: 4 KiB of each of 128 rows, and their transpose."""

PIECE = 2048
"""Elements of a row that one step unpacks; a multiple of every format's block size."""

SCALES = 8192
"""Tile scales per partition that stay in SBUF."""

MANY = 32
"""With this many rows of `b` or more, the kernel scales the codes before the product: faster than scaling each row's tile sums."""

UNPACKING = 12 * PIECE
"""Bytes for unpacking `PIECE` elements of each of 128 rows: the elements as float32 and as bytes, their scales, and more."""


@nki.jit
def _products(a, b, each, turned, packed):
    """Computes the products `b[i] @ a[j].T`; `each` outer matrices of `b` share one of `a`.

    a: [A, G, m, k], or [A, G, k, m] if `turned`, or [A, G, m, bytes] u8 in the format `packed` ("" if not packed);
    b: [A * each, G, n, k] in the dtype of `a`, or bf16 or f32 if `a` is packed. Returns [A * each, G, n, m] f32. The rows of
    `b` stay in SBUF, transposed; the kernel reads the rows of `a` once per `ROWS` rows of `b`.
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
    """Computes the products `b[i] @ a[numbers[i]].T`, and reads only the chosen matrices.

    a: [E, m, k], or [E, k, m] if `turned`, or [E, m, bytes] u8 in the format `packed` ("" if not packed); b: [n, rows, k] in
    the dtype of `a`, or bf16 or f32 if `a` is packed; numbers: [1, n] i32, below E. Returns [n, rows, m] f32.
    """
    n, rows = b.shape[:2]
    y = hbm((n, rows, a.shape[2 if turned else 1]), nl.float32)
    chosen = loaded(numbers)
    for i in nl.affine_range(n):
        _matrices(y[i], a[0], b[i], turned, packed, chosen[0:1, i : i + 1])
    return y


@nki.jit
def _tiled_products(a, b, each, m):
    """Computes the products of `_products` for weights in the layout `f8_e4m3_128x128`.

    a: [A, G, bytes] u8, b: [A * each, G, n, k] bf16 or f32. Returns [A * each, G, n, m] f32.
    """
    outer, groups = a.shape[:2]
    n, k = b.shape[2:]
    y = hbm((outer * each, groups, n, m), nl.float32)
    chunks, tiles = -(-k // TILE), -(-m // TILE)
    span = max(SCALES // chunks * TILE // RUN, 1) * RUN
    line = (4 if b.dtype == nl.float32 else 2) * chunks + 4 * RUN // TILE  # bytes per partition of a row and its sums
    most = min(ROWS, (ROOM - 2 * PASSING - 4 * min(SCALES, chunks * tiles)) // line // 64 * 64)
    for i in nl.affine_range(outer):
        for g in nl.affine_range(groups):
            codes = a[i, g, 0 : chunks * TILE * m].reshape((chunks * TILE, m))
            for left, columns in blocks(m, span):
                some = -(-columns // TILE)
                scales = sbuf((TILE, chunks, 4 * some), nl.uint8)
                pattern = [[0, TILE], [4 * tiles, chunks], [1, 4 * some]]
                nisa.dma_copy(dst=scales, src=a[i, g].ap(pattern, offset=chunks * TILE * m + left // TILE * 4))
                for r in nl.affine_range(each):
                    for start, rows in blocks(n, most):
                        x = sbuf((min(k, PARTITIONS), chunks, rows), b.dtype)
                        turn(x, b[i * each + r, g, start : start + rows])
                        for at, width in blocks(columns, COLUMNS if rows >= MANY else RUN):
                            place = y[i * each + r, g, start : start + rows, left + at : left + at + width]
                            shown = scales.view(nl.float32)[:, :, at // TILE : -(-(at + width) // TILE)]
                            some = codes[:, left + at : left + at + width]
                            if rows >= MANY:
                                _product(*_scaled_codes(some, shown, b.dtype), x, place, k)
                            else:
                                _tiled(place, some, shown, x, k)
    return y


def _scaled_codes(codes, scales, dtype):
    """Does the work of `_plain` for FP8: vector and scalar engine multiply the codes by their tiles' scales and round to `dtype`.

    codes: [⌈k / 128⌉ * 128, width] u8 in HBM; scales: [128, ⌈k / 128⌉, ⌈width / 128⌉] f32.
    """
    width = codes.shape[1]
    half = min(-(-width // (2 * TILE)) * TILE, width)

    def part(first, size):
        tile = sbuf((min(size, TILE), -(-size // TILE), width), dtype)
        for at, p in blocks(size, TILE):
            stored = loaded(codes[first + at : first + at + p]).view(nl.float8_e4m3)
            target, factors = tile[0:p, at // TILE], scales[0:p, (first + at) // TILE]
            for column, columns in blocks(half, TILE):
                place = slice(column, column + columns)
                factor = factors[:, column // TILE : column // TILE + 1]
                nisa.tensor_scalar(target[:, place], stored[:, place], nl.multiply, factor)
            for column, columns in blocks(width - half, TILE):
                place = slice(half + column, half + column + columns)
                factor = factors[:, (half + column) // TILE : (half + column) // TILE + 1]
                nisa.activation(target[:, place], nl.copy, stored[:, place], scale=factor)
        return tile

    return part, 4 * TILE


def _tiled(target, codes, scales, x, k):
    """Writes products of fewer than `MANY` rows and FP8 weights to HBM, [rows, width] f32.

    The stored codes are the tensor engine's stationary operand; the vector engine multiplies each tile's sums by its scale.

    codes: [⌈k / 128⌉ * 128, width] u8 in HBM; scales: [128, ⌈k / 128⌉, ⌈width / 128⌉] f32; x: [128, ⌈k / 128⌉, rows] bf16 or f32.
    """
    rows, width = target.shape
    columns = -(-width // TILE)
    sums = sbuf((TILE, columns, rows))
    nisa.memset(sums, 0.0)
    at_once = COLUMNS // rows
    for first, p in blocks(k, TILE):
        chunk = first // TILE
        stored = loaded(codes[first : first + p]).view(nl.float8_e4m3)
        if x.dtype == nl.float32:  # if one operand is float32, both must be
            narrow, stored = stored, sbuf(stored.shape)
            nisa.tensor_copy(dst=stored, src=narrow)
        for at, count in blocks(width // TILE, at_once):
            _scaled(sums[:, at : at + count], stored, scales[:, chunk, at : at + count], x[0:p, chunk], at)
        if width % TILE:
            last = slice(columns - 1, columns)
            _scaled(
                sums[0 : width % TILE, last], stored, scales[0 : width % TILE, chunk, last], x[0:p, chunk], columns - 1
            )
    _turn_back(target, sums)


def _scaled(sums, stored, scales, x, first):
    """Adds the products of adjacent tiles, each times its scale, to `sums`: [width of a tile, tiles, rows].

    stored: [p, all columns] codes; scales: [width of a tile, tiles]; x: [p, rows]; `first` is the first tile's number.
    """
    width, count, rows = sums.shape
    products = psum((width, count, rows))
    for i in nl.affine_range(count):
        at = (first + i) * TILE
        nisa.nc_matmul(dst=products[:, i], stationary=stored[:, at : at + width], moving=x, accumulate=False)
    scaled = sbuf(sums.shape)
    nisa.tensor_tensor(scaled, products, scales.reshape((width, count, 1)).broadcast(2, rows), nl.multiply)
    nisa.tensor_tensor(sums, sums, scaled, nl.add)


def _turn_back(target, sums):
    """Transposes the sums of column tiles, [128, tiles, rows], and writes them to HBM: [rows, width] f32."""
    rows, width = target.shape
    whole, rest = width // TILE, width % TILE
    for row in nl.affine_range(rows):
        if whole:
            done = sbuf((whole, TILE))
            nisa.tensor_copy(dst=done, src=turned_back(sums[:, 0:whole, row]))
            nisa.dma_copy(dst=target[row, 0 : whole * TILE].reshape((whole, TILE)), src=done)
        if rest:
            done = sbuf((1, rest))
            nisa.tensor_copy(dst=done, src=turned_back(sums[0:rest, whole : whole + 1, row]))
            nisa.dma_copy(dst=target[row : row + 1, whole * TILE :], src=done)


def _matrices(y, a, b, turned, packed, number=None):
    """Writes `b @ a.T`, [n, m], of matrices in HBM. With `number`, a tile, it uses the matrix `number` places after `a`."""
    (n, m), k = y.shape, b.shape[1]
    weights = _turned if turned else _packed if packed else _plain
    most, columns = _sizes(k, 4 if b.dtype == nl.float32 else 2, a.shape[1] if packed else 0)
    for start, rows in blocks(n, most):
        x = sbuf((min(k, PARTITIONS), -(-k // PARTITIONS), rows), b.dtype)
        turn(x, b[start : start + rows])
        # With few rows, runs are longer: the sums then fill as many banks of PSUM as with many rows.
        banks = ROWS // PARTITIONS // -(-rows // PARTITIONS) if turned else 1
        for column, width in blocks(m, banks * columns):
            part = y[start : start + rows, column : column + width]
            _product(*weights(a, column, width, k, b.dtype, packed, number), x, part, k)


def _sizes(k, itemsize, packed):
    """Returns how many transposed rows of `b` and of `a` fit in SBUF beside the buffers that unpack 128 rows of `packed` bytes."""
    line = itemsize * -(-k // PARTITIONS)  # bytes per partition
    if not packed:
        return min(ROWS, (ROOM - PASSING) // line // 64 * 64), COLUMNS
    most = (ROOM - packed - UNPACKING) // (2 * line) // 64 * 64
    return min(ROWS, most), min(COLUMNS, most)


def _plain(a, column, width, k, dtype, packed, number):
    """Returns a function that loads `width` rows of `a` from row `column`, and the most elements per row it loads at once.

    The function takes the first element and the number of elements, and returns them transposed: [128, ⌈size / 128⌉, width].
    """

    def part(first, size):
        tile = sbuf((min(size, PARTITIONS), -(-size // PARTITIONS), width), a.dtype)
        turn(tile, a[column : column + width, first : first + size], number)
        return tile

    return part, RUN // (4 if a.dtype == nl.float32 else 2)


def _turned(a, column, width, k, dtype, packed, number):
    """Does the work of `_plain` for weights stored transposed, [k, m]."""

    def part(first, size):
        tile = sbuf((min(size, PARTITIONS), -(-size // PARTITIONS), width), a.dtype)
        for at, p in blocks(size, PARTITIONS):
            source = a[first + at : first + at + p, column : column + width]
            nisa.dma_copy(dst=tile[0:p, at // PARTITIONS], src=named(source, number))
        return tile

    return part, 2 * PARTITIONS


def _packed(a, column, width, k, dtype, packed, number):
    """Does the work of `_plain` for packed rows: vector and scalar engine unpack, and the tensor engine transposes.

    The vector engine does operations on bits and on two tiles. The scalar engine converts scales, copies bytes to word-aligned
    addresses, and rounds to `dtype` while it copies from PSUM. It multiplies some runs that have a scale and a minimum (`_first`).
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
    """Unpacks blocks, [rows, blocks, bytes] u8, to numbers, [rows, blocks, elements]."""
    if packed == "q4_0":
        _q4_0(numbers, taken)
    elif packed == "q4_1":
        _q4_1(numbers, taken)
    elif packed == "q5_0":
        _q5_0(numbers, taken)
    elif packed == "q5_1":
        _q5_1(numbers, taken)
    elif packed == "q2_K":
        _q2_k(numbers, taken)
    elif packed == "q3_K":
        _q3_k(numbers, taken)
    elif packed in ("q4_K", "q5_K"):
        _q4_k(numbers, taken, fifth=packed == "q5_K")
    elif packed == "q6_K":
        _q6_k(numbers, taken)
    else:
        _q8_0(numbers, taken)


def _half(taken, at, buffer=nl.psum):
    """Returns the F16 number at byte `at` of each block as [rows, blocks, 1] f32; the scalar engine converts it.

    The default buffer is PSUM: the vector engine reads PSUM and SBUF together at twice the rate of two operands in SBUF.
    """
    number = nl.ndarray((taken.shape[0], taken.shape[1], 1), nl.float32, buffer=buffer)
    nisa.activation(number, nl.copy, taken[:, :, at : at + 2].view(nl.float16))
    return number


def _words(taken, first, size):
    """Returns `size` bytes of each block from byte `first`, [rows, blocks, size] u8, aligned so that they can be read as u32.

    If the block size is not a multiple of 4, the scalar engine copies the bytes in pairs, which float32 holds exactly.
    """
    part = taken[:, :, first : first + size]
    if taken.shape[2] % 4 == 0:
        return part
    copied = sbuf(part.shape, nl.uint8)
    nisa.activation(copied.view(nl.uint16), nl.copy, part.view(nl.uint16))
    return copied


def _bits(target, source, first, count, to=0, word=nl.uint32):
    """Copies `count` bits of each byte from bit `first` to bit `to` of the target's byte, and zeroes the target's other bits.

    The vector engine processes words of one or four bytes (`word`); the mask applies to each byte.
    """
    target, source = target.view(word), source.view(word)
    mask = (((1 << count) - 1) << to) * (0x01010101 if word == nl.uint32 else 1)
    if to == first:
        nisa.tensor_scalar(target, source, nl.bitwise_and, mask)
    else:
        op = nl.left_shift if to > first else nl.right_shift
        nisa.tensor_scalar(target, source, op, abs(to - first), op1=nl.bitwise_and, operand1=mask)


def _upper(shape):
    """Returns a tile for the upper bits of bytes of a shape, four bytes per u32. It lies in PSUM, which is fast beside SBUF."""
    return psum((*shape[:-1], shape[-1] // 4), nl.uint32)


def _join(codes, upper):
    """Adds upper bits, given as bytes or words, to byte codes that lack these bits."""
    words = codes.view(nl.uint32)
    nisa.tensor_tensor(words, words, upper.view(nl.uint32), nl.bitwise_or)


def _fifth_bits(codes, source):
    """Adds the fifth bits of a block's 32 numbers, stored in order in four bytes, to codes of four bits."""
    upper = sbuf((*codes.shape[:2], 4, 8), nl.uint8)
    for i in range(8):
        _bits(upper[:, :, :, i], source, i, 1, to=4, word=nl.uint8)
    _join(codes, upper.reshape(codes.shape))
    return codes


def _nibbles(source, length):
    """Returns, for each `length` bytes, their lower halves and then their upper halves: [rows, blocks, 2 * bytes] u8."""
    rows, count, size = source.shape
    codes = sbuf((rows, count * size // length * 2, length), nl.uint8)
    halves = codes.reshape((rows, count, size // length, 2, length))
    for i in range(2):
        _bits(halves[:, :, :, i], source.reshape((rows, count, size // length, length)), 4 * i, 4)
    return codes.reshape((rows, count, 2 * size))


def _q4_0(numbers, taken):
    scales = _half(taken, 0).broadcast(2, 32)
    nisa.scalar_tensor_tensor(numbers, _nibbles(_words(taken, 2, 16), 16), nl.subtract, 8.0, nl.multiply, scales)


def _q4_1(numbers, taken):
    _each_times_and(numbers, _nibbles(taken[:, :, 4:20], 16), taken)


def _q5_0(numbers, taken):
    words = _words(taken, 2, 20)
    codes = _fifth_bits(_nibbles(words[:, :, 4:20], 16), words[:, :, 0:4])
    nisa.scalar_tensor_tensor(numbers, codes, nl.subtract, 16.0, nl.multiply, _half(taken, 0).broadcast(2, 32))


def _q5_1(numbers, taken):
    _each_times_and(numbers, _fifth_bits(_nibbles(taken[:, :, 8:24], 16), taken[:, :, 4:8]), taken)


def _each_times_and(numbers, codes, taken):
    """Writes codes times the first number of each block, with the second added."""
    mine = _first(taken.shape[1])
    theirs = _half(taken[:, mine:], 0, nl.sbuf) if mine < taken.shape[1] else None
    _times_and(numbers, codes, _half(taken[:, 0:mine], 0), theirs, _half(taken, 2), nl.add)


def _first(count):
    """Returns how many of `count` blocks the vector engine multiplies by their scales; the scalar engine multiplies the others.

    The vector engine does three eighths of a `PIECE`'s blocks: both engines then take about as long, and the HLO has a loop
    over the other 40 runs.
    """
    return count - count * 5 // 8


def _times_and(numbers, codes, scales, others_scales, others, op):
    """Writes codes times scales plus or minus `others`: [rows, runs, length]; each run has one scale and one of `others`.

    The vector engine multiplies the first runs; the scalar engine multiplies the runs of `others_scales`, one at a time.

    scales: [rows, first runs, 1] f32 in PSUM; others_scales: [rows, other runs, 1] f32 in SBUF, or None; others: [rows, runs, 1]
    f32 in PSUM.
    """
    runs, length = codes.shape[1:]
    first = scales.shape[1]
    exact = sbuf(codes.shape)
    nisa.tensor_tensor(exact[:, 0:first], codes[:, 0:first], scales.broadcast(2, length), nl.multiply)
    for i in nl.affine_range(runs - first):
        nisa.activation(exact[:, first + i], nl.copy, codes[:, first + i], scale=others_scales[:, i])
    nisa.tensor_tensor(numbers, exact, others.broadcast(2, length), op)


def _q8_0(numbers, taken):
    scales = _half(taken, 0).broadcast(2, 32)
    nisa.tensor_tensor(numbers, taken[:, :, 2:34].view(nl.int8), scales, nl.multiply)


def _q2_k(numbers, taken):
    rows, count = taken.shape[:2]
    runs = (rows, count * 16, 16)
    both = []
    for i in range(2):  # 16 bytes hold scales in the lower bits, minima in the upper bits
        fields, factors = sbuf((rows, count, 16), nl.uint8), psum((rows, count, 16))
        _bits(fields, taken[:, :, 0:16], 4 * i, 4)
        nisa.tensor_tensor(factors, fields, _half(taken, 80 + 2 * i).broadcast(2, 16), nl.multiply)
        both.append(factors.reshape((rows, count * 16, 1)))
    codes = _two_bits(taken[:, :, 16:80])
    _times_and(numbers.reshape(runs), codes.reshape(runs), both[0], None, both[1], nl.subtract)


def _two_bits(source):
    """Returns codes of two bits, [rows, blocks, 256] u8: 128 from each 32 bytes, ordered by the bits' position."""
    rows, count = source.shape[:2]
    codes = sbuf((rows, count, 2, 4, 32), nl.uint8)
    for i in range(4):
        _bits(codes[:, :, :, i], source.reshape((rows, count, 2, 32)), 2 * i, 2)
    return codes.reshape((rows, count, 256))


def _q3_k(numbers, taken):
    rows, count = taken.shape[:2]
    words = _words(taken, 0, 108)
    codes, upper = _two_bits(words[:, :, 32:96]), _upper((rows, count, 8, 32))
    fields, high = sbuf((rows, count, 16), nl.uint8), _upper((rows, count, 16))
    for i in range(8):
        _bits(upper[:, :, i], words[:, :, 0:32], i, 1, to=2)
    for i in range(2):  # scales of six bits: eight bytes hold the lower four bits, four more bytes the upper two
        _bits(fields[:, :, 8 * i : 8 * i + 8], words[:, :, 96:104], 4 * i, 4)
    for i in range(4):
        _bits(high[:, :, i : i + 1], words[:, :, 104:108], 2 * i, 2, to=4)
    _join(codes, upper.reshape((rows, count, 64)))
    _join(fields, high)
    scales = psum((rows, count, 16))
    half = _half(taken, 108).broadcast(2, 16)
    nisa.scalar_tensor_tensor(scales, fields, nl.subtract, 32.0, nl.multiply, half)
    runs = (rows, count * 16, 16)
    by_run = scales.reshape((rows, count * 16, 1)).broadcast(2, 16)
    nisa.scalar_tensor_tensor(numbers.reshape(runs), codes.reshape(runs), nl.subtract, 4.0, nl.multiply, by_run)


def _q4_k(numbers, taken, fifth):
    """Unpacks Q4_K, or Q5_K: Q5_K has a `fifth` bit for each number, in 32 bytes before the others."""
    rows, count = taken.shape[:2]
    at = 48 if fifth else 16
    codes = _nibbles(taken[:, :, at : at + 128], 32)
    if fifth:
        upper = _upper((rows, count, 8, 32))
        for i in range(8):
            _bits(upper[:, :, i], taken[:, :, 16:48], i, 1, to=4)
        _join(codes, upper.reshape((rows, count, 64)))
    runs = (rows, count * 8, 32)
    _times_and(numbers.reshape(runs), codes.reshape(runs), *_k_scales(taken), nl.subtract)


def _k_scales(taken):
    """Returns the scales and minima of Q4_K and Q5_K, [rows, blocks * 8, 1] f32 each, from 6 bits each in bytes 4 to 15.

    The scales come in two parts: in PSUM, and in SBUF for the scalar engine (`_first`), or None if it has no blocks.
    """
    rows, count = taken.shape[:2]
    fields = taken[:, :, 4:16].reshape((rows, count, 3, 4))
    # Four bytes hold the first four values and the upper two bits of the others; the last four bytes hold the rest.
    codes, upper = sbuf((rows, count, 2, 8), nl.uint8), _upper((rows, count, 2, 4))
    _bits(codes[:, :, :, 0:4], fields[:, :, 0:2], 0, 6)
    _bits(upper, fields[:, :, 0:2], 6, 2, to=4)
    for i in range(2):
        _bits(codes[:, :, i, 4:8], fields[:, :, 2], 4 * i, 4)
    _join(codes[:, :, :, 4:8], upper)
    mine = _first(count)
    halves = [_half(taken, 0), _half(taken, 2)]
    found = []
    for i, first, last, buffer in ((0, 0, mine, nl.psum), (0, mine, count, nl.sbuf), (1, 0, count, nl.psum)):
        if first == last:
            found.append(None)
            continue
        factors = nl.ndarray((rows, (last - first) * 8, 1), nl.float32, buffer=buffer)
        half = halves[i][:, first:last].broadcast(2, 8)
        target = factors.reshape((rows, last - first, 8))
        nisa.tensor_tensor(target, codes[:, first:last, i], half, nl.multiply)
        found.append(factors)
    return found


def _q6_k(numbers, taken):
    rows, count = taken.shape[:2]
    words = _words(taken, 0, 192)
    codes, upper = _nibbles(words[:, :, 0:128], 64), _upper((rows, count, 2, 4, 32))
    high = words[:, :, 128:192].reshape((rows, count, 2, 32))
    for i in range(4):  # two bits of each byte are bits 4 and 5 of a number
        _bits(upper[:, :, :, i], high, 2 * i, 2, to=4)
    _join(codes, upper.reshape((rows, count, 64)))
    scales = psum((rows, count, 16))
    half = _half(taken, 208).broadcast(2, 16)
    nisa.tensor_tensor(scales, taken[:, :, 192:208].view(nl.int8), half, nl.multiply)
    runs = (rows, count * 16, 16)
    by_run = scales.reshape((rows, count * 16, 1)).broadcast(2, 16)
    nisa.scalar_tensor_tensor(numbers.reshape(runs), codes.reshape(runs), nl.subtract, 32.0, nl.multiply, by_run)


def _product(weights, most, x, target, k):
    """Writes the product of transposed rows and weights to HBM, [rows, width] f32, for `most` elements of a row at a time."""
    tiles = []  # AWS's tracer accepts no comprehension
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
    layouts=("transposed", "f8_e4m3_128x128"),
    where=("b_ne0 <= 16384", "b_ne2 * b_ne3 * (a_ne1 // 512 + 1) * (b_ne1 // 512 + 1) * (b_ne0 // 128 + 1) <= 8192"),
)
def mul_mat(a, b, *, prec: int = 0, hint: int = 0, prec_src1: int = 0, inputs, out):
    """Computes `b` times the transpose of `a`, accumulated in float32: dst[n, m] = sum over k of b[n, k] * a[m, k].

    The kernel first rounds `b` to the dtype of `a` (F16, BF16). It unpacks packed weights in SBUF and rounds them and `b` to
    bfloat16; if `prec_src1` is F32, both are float32. For weights in `f8_e4m3_128x128` it multiplies the stored codes, and then
    each tile's sums by the tile's scale; with many rows it multiplies the codes by their scales first, and rounds the result
    like packed weights.

    a: [A3, A2, m, k] f32, f16, bf16 or packed, [A3, A2, k, m] when stored transposed, [A3, A2, 1, bytes of a matrix] i8 in
    `f8_e4m3_128x128`; b: [B3, B2, n, k] f32, f16 or bf16. A3 divides B3 and A2 divides B2: so many matrices of `b` share one
    of `a`. Returns [B3, B2, n, m] f32.
    """
    del prec, hint
    a3, a2, rows = a.shape[:3]
    b3, b2, n, k = b.shape
    if inputs[0].layout == F8_TILES:
        a = lax.bitcast_convert_type(lax.reshape(a, (a3, a2, a.shape[3])), jnp.uint8)
        b = lax.convert_element_type(b, "float32" if prec_src1 == PREC_F32 else "bfloat16")
        b = lax.reshape(b, (b3, a2, b2 // a2 * n, k))
        return result(inline(_tiled_products, a, b, each=b3 // a3, m=inputs[0].ne[1])[0], out)
    packed, single = _types(inputs[0].dtype, prec_src1)
    b = lax.convert_element_type(b, single)
    a = lax.reshape(a, (a3, a2, rows, a.size // (a3 * a2 * rows)))
    # Adjacent matrices of `b` that share one of `a` become the rows of one matrix.
    b = lax.reshape(b, (b3, a2, b2 // a2 * n, k))
    turned = inputs[0].layout == TRANSPOSED
    return result(inline(_products, a, b, each=b3 // a3, turned=turned, packed=packed)[0], out)


def _types(dtype, prec_src1):
    """Returns the packed type's name ("" if not packed) and the dtype to which the kernel rounds `b`."""
    if not TYPES[dtype].quantized:
        return "", {"f16": "float16", "bf16": "bfloat16"}.get(dtype, "float32")
    return dtype, "float32" if prec_src1 == PREC_F32 else "bfloat16"


@emitter(
    "mul_mat_id",
    types=("f32 f16 bf16, float, i32", "q4_0 q4_1 q5_0 q5_1 q8_0 q2_K q3_K q4_K q5_K q6_K, float, i32"),
    language="nki",
    layouts="transposed",
    where=(
        "b_ne0 <= 16384",
        "ids_ne1 <= 32",
        # The quotient lies between half the smaller of pairs and experts, and the smaller.
        "ids_ne0 * ids_ne1 * a_ne2 // (ids_ne0 * ids_ne1 + a_ne2) * (a_ne1 // 512 + 1) * (b_ne0 // 128 + 1) <= 7168",
    ),
)
def mul_mat_id(a, b, ids, *, prec: int = 0, prec_src1: int = 0, inputs, out):
    """Multiplies each token by the weights of its experts in `ids`: dst[t, u] = a[ids[t, u]] b[t, u mod B].

    As in JAX, the rows that share an expert form a block. A DMA reads the expert's weights at an address in a register, with as
    many descriptors and bytes as the product of one matrix. The kernel's cost therefore grows with the experts that tokens choose
    (with all experts if there are more (token, expert) pairs than experts), not with the number of experts in memory.

    Rounding is that of `mul_mat`.

    a: [1, E, m, k] f32, f16, bf16 or packed, or [1, E, k, m] when stored transposed; b: [1, T, B, k] f32, f16 or bf16, B
    dividing U; ids: [1, 1, T, U] i32, each below E. Returns [1, T, U, m] f32.
    """
    del prec
    packed, single = _types(inputs[0].dtype, prec_src1)
    n_experts, rows, pairs = a.shape[1], a.shape[2], ids.size
    m = inputs[0].ne[1]

    def taken(size):
        """Returns the rows moved by DMA: the weights' rows, and three times the rows of `b` (gather, write, read)."""
        return (n_experts + (pairs - n_experts) // size) * (m + 3 * size)

    size = min((2**i for i in range(8)), key=taken)
    b, numbers, chosen, place = by_expert(lax.convert_element_type(b, single), ids, n_experts, size)
    a = lax.reshape(a, (n_experts, rows, a.size // (n_experts * rows)))
    turned = inputs[0].layout == TRANSPOSED
    b = take(b, lax.reshape(numbers, (numbers.size,)))
    b = lax.reshape(b, (*numbers.shape, b.shape[1]))
    y = inline(_chosen_products, a, b, chosen[None, :], turned=turned, packed=packed)[0]
    return result(y if place is None else take(lax.reshape(y, (numbers.size, m)), place), out)
