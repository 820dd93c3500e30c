"""Matrix products."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import F8_TILES, TILE, TRANSPOSED, tiles

from .common import PREC_F32, Unsupported, f32, grouped_dot, result
from .dequantize import floats


@emitter("mul_mat", types="float quantized, float", layouts=("planes", "transposed", "bf16", "f8_e4m3_128x128"))
def mul_mat(a, b, *, prec: int = 0, hint: int = 0, prec_src1: int = 0, inputs, out):
    """The product of `b` and the transpose of `a`, accumulated in float32: dst[n, m] = sum over k of b[n, k] * a[m, k].

    As in ggml's CPU backend, `b` is first rounded to the type of `a` (F16, BF16). Quantized weights are dequantized and rounded to
    bfloat16, and so is `b`: the tensor engine multiplies float32 at a fifth of that rate, and the CPU backend rounds `b` to 8 bits.
    If `prec_src1` is F32, both are float32. `prec` allows coarser accumulation than this kernel's. `hint` names a structure of `a`
    that a kernel may use, and changes no result.

    For a weight in `f8_e4m3_128x128`, the kernel multiplies the codes, which are exact in bfloat16, and then each tile's product by
    the tile's scale. If rows times tiles of a row exceed `MAX_SPREAD`, it first multiplies codes by their scales, and rounds.

    a: [A3, A2, m, k] f32, f16, bf16 or quantized, [A3, A2, k, m] if it is stored transposed, [A3, A2, 1, bytes of a matrix] i8 in
    `f8_e4m3_128x128`; b: [B3, B2, n, k] f32, f16 or bf16; A3 divides B3 and A2 divides B2, and B3 / A3 * B2 / A2 matrices of `b`
    share each matrix of `a`. Returns [B3, B2, n, m] f32.
    """
    del prec, hint
    if inputs[0].layout == F8_TILES:
        return result(_tiled_product(a, inputs[0], b, prec_src1), out)
    a = _factor(a, inputs[0], prec_src1)
    return result(grouped_dot(a, lax.convert_element_type(b, a.dtype), 2 if inputs[0].layout == TRANSPOSED else 3), out)


def _factor(a: Array, tensor: TensorDesc, prec_src1: int) -> Array:
    """Returns weights in the type of the product: bfloat16 for a quantized tensor, float32 if `prec_src1` is F32."""
    a = floats(a, tensor)
    return lax.convert_element_type(a, jnp.bfloat16) if TYPES[tensor.dtype].quantized and prec_src1 != PREC_F32 else a


MAX_SPREAD = 128
"""The most tile products to scale per row of the weights: up to this many take as long as one."""


def _tiled_product(a: Array, tensor: TensorDesc, b: Array, prec_src1: int) -> Array:
    """Returns the product of `b` and weights in `f8_e4m3_128x128`: [B3, B2, n, m] f32.

    With few rows, the product of each tile is multiplied by the tile's scale. Each row becomes one row per tile of columns, with
    zeros outside that tile, so one matrix product returns the products of all tiles. With more rows, the codes are scaled and
    rounded.

    Args:
        a: [A3, A2, 1, bytes of a matrix] i8.
        tensor: the weight.
        b: [B3, B2, n, k] f32, f16 or bf16; A3 divides B3 and A2 divides B2.
        prec_src1: F32 for float32 factors.
    """
    a3, a2 = a.shape[:2]
    b3, b2, n, k = b.shape
    if b3 % a3 or b2 % a2:
        raise Unsupported(f"a batch of {b3} x {b2} can't be shared out over {a3} x {a2} matrices")
    m = tensor.ne[1]
    kt, mt = tiles(tensor.ne)
    kind = jnp.float32 if prec_src1 == PREC_F32 else jnp.bfloat16
    codes, scales = (lax.slice_in_dim(a, *at, axis=3) for at in ((0, kt * TILE * m), (kt * TILE * m, a.shape[3])))
    codes = lax.reshape(lax.bitcast_convert_type(codes, jnp.float8_e4m3), (a3, a2, kt, TILE, m))
    scales = lax.bitcast_convert_type(lax.reshape(scales, (a3, a2, kt, mt, 4)), jnp.float32)
    scales = lax.broadcast_in_dim(scales, (a3, a2, kt, mt, TILE), (0, 1, 2, 3))
    scales = lax.slice_in_dim(lax.reshape(scales, (a3, a2, kt, mt * TILE)), 0, m, axis=3)
    b = lax.convert_element_type(b, kind)
    if b3 // a3 * (b2 // a2) * n * kt > MAX_SPREAD:
        weights = f32(codes) * lax.broadcast_in_dim(scales, codes.shape, (0, 1, 2, 4))
        weights = lax.reshape(lax.convert_element_type(weights, kind), (a3, a2, kt * TILE, m))
        return grouped_dot(lax.slice_in_dim(weights, 0, k, axis=2), b, 2)
    b = lax.pad(b, kind(0), [*[(0, 0, 0)] * 3, (0, kt * TILE - k, 0)])
    shape = (a3, b3 // a3, a2, b2 // a2, n, kt, kt, TILE)
    b = lax.broadcast_in_dim(lax.reshape(b, (*shape[:5], kt, TILE)), shape, (0, 1, 2, 3, 4, 6, 7))
    own = lax.broadcast_in_dim(np.eye(kt, dtype=np.bool_), shape, (5, 6))
    b = lax.reshape(lax.select(own, b, lax.full_like(b, 0)), (*shape[:6], kt * TILE))
    # The weights come first, so that a result's partitions are their rows, and tiles are added within a partition.
    y = lax.dot_general(
        lax.reshape(lax.convert_element_type(codes, kind), (a3, a2, kt * TILE, m)),
        b,
        (((2,), (6,)), ((0, 1), (0, 2))),
        preferred_element_type=jnp.float32,
    )  # [a3, a2, m, b3/a3, b2/a2, n, kt]
    y = lax.reduce_sum(y * lax.broadcast_in_dim(lax.transpose(scales, (0, 1, 3, 2)), y.shape, (0, 1, 2, 6)), (6,))
    return lax.reshape(lax.transpose(y, (0, 3, 1, 4, 5, 2)), (b3, b2, n, m))


@emitter("out_prod", types="float quantized, float")
def out_prod(a, b, *, inputs, out):
    """The sum of outer products of rows: dst[n, m] = sum over k of b[k, n] * a[k, m], in float32.

    a: [A3, A2, k, m] f32, f16, bf16 or quantized; b: [B3, B2, k, n] f32, f16 or bf16; A3 divides B3 and A2 divides B2, and
    B3 / A3 * B2 / A2 matrices of `b` share each matrix of `a`. Returns [B3, B2, n, m] f32.
    """
    return result(grouped_dot(f32(floats(a, inputs[0])), lax.transpose(f32(b), (0, 1, 3, 2)), 2), out)


MAX_BLOCK = 128
"""The most rows of a block: the number of rows of a tensor engine."""


@emitter("mul_mat_id", types="float quantized, float, i32", layouts=("planes", "transposed", "bf16", "f8_e4m3_128x128"))
def mul_mat_id(a, b, ids, *, prec: int = 0, prec_src1: int = 0, inputs, out):
    """Each token's product with the weights of the experts that `ids` names for it: dst[t, u] = a[ids[t, u]] b[t, u mod B].

    The kernel loops over blocks of rows that share an expert. Each step reads the packed weights of one expert and dequantizes
    them, so the weights of several experts are never unpacked at once. Experts that no token uses are not read. The number of steps
    is fixed: one for each expert and each `MAX_BLOCK` rows, or at most twice the number of experts. With fewer rows than experts,
    as for a single token, every row is a block of its own.

    This kernel was not measured on a device. Others measured on trn1 and trn2: XLA's gathers of experts took 2.4 to 54 ms a layer,
    a step of a loop 20 to 37 us, and an NKI kernel that reads each expert by one DMA 0.2 to 1.2 ms; `nki_matmul.py` has such a
    kernel.

    Rounding is the same as in `mul_mat`.

    a: [1, E, m, k] f32, f16, bf16 or quantized, [1, E, k, m] if it is stored transposed, or [1, E, 1, bytes of a matrix] i8 in
    `f8_e4m3_128x128`; b: [1, T, B, k] f32, f16 or bf16, B dividing U; ids: [1, 1, T, U] i32, each below E. Returns [1, T, U, m]
    f32.
    """
    del prec
    n_experts, pairs = a.shape[1], ids.size
    a = lax.reshape(a, a.shape[1:])
    one = TensorDesc.make((*inputs[0].ne[:2], 1, 1), inputs[0].dtype, layout=inputs[0].layout)

    def product(rows: Array, expert: Array) -> Array:
        weights = lax.reshape(lax.dynamic_index_in_dim(a, expert, keepdims=False), (1, 1, *a.shape[1:]))
        if one.layout == F8_TILES:
            y = _tiled_product(weights, one, lax.reshape(rows, (1, 1, *rows.shape)), prec_src1)
            return lax.reshape(y, y.shape[2:])
        stored, axis = (one.ne[:2], 0) if one.layout == TRANSPOSED else (one.shape[2:], 1)
        weights = lax.reshape(_factor(weights, one, prec_src1), stored)
        rows = lax.convert_element_type(rows, weights.dtype)
        return lax.dot_general(rows, weights, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)

    def step(_: None, block: tuple[Array, Array]) -> tuple[None, Array]:
        numbers, expert = block
        return None, product(take(b, numbers), expert)

    size = 1
    while size < MAX_BLOCK and size * n_experts < pairs:
        size *= 2
    b, rows, chosen, place = by_expert(b, ids, n_experts, size)
    y = lax.scan(step, None, (rows, chosen))[1]
    return result(y if place is None else take(lax.reshape(y, (rows.size, y.shape[2])), place), out)


def by_expert(b: Array, ids: Array, n_experts: int, size: int) -> tuple[Array, Array, Array, Array | None]:
    """Returns the rows of `b` as blocks that share an expert.

    Args:
        b: [1, T, B, k].
        ids: the experts of each token, [1, 1, T, U] i32, B dividing U.
        n_experts: the number of experts.
        size: rows in a block, if there are more pairs of a token and an expert than experts; else every pair is a block.

    Returns:
        `b` as rows, [T * B, k]; the row numbers of each block, [blocks, size] i32; the expert of each block, [blocks] i32; the
        place of each pair in the blocks, [T * U] i32, or None if every pair is a block.
    """
    (n_tokens, n_used), n_rows = ids.shape[2:], b.shape[2]
    pairs = n_tokens * n_used
    ids = lax.reshape(ids, (pairs,))
    # A pair is a token and a place in its list of experts.
    token, place = (lax.reshape(_number((n_tokens, n_used), k), (pairs,)) for k in (0, 1))
    if 1 < n_rows < n_used and n_rows & (n_rows - 1):
        # neuronx-cc divides by a float32 reciprocal, which is exact for powers of two, and for dividends below the divisor.
        row = lax.reshape(_number((n_tokens, n_used // n_rows, n_rows), 2), (pairs,))
    else:
        row = lax.rem(place, np.int32(n_rows))
    row_of = token * np.int32(n_rows) + row
    b = lax.reshape(b, (n_tokens * n_rows, b.shape[3]))
    if pairs <= n_experts:
        return b, row_of[:, None], ids, None
    place, expert_of, n_blocks = _blocks(ids, n_experts, size)
    # Places without a pair repeat the first row; their results are not read.
    rows = lax.scatter(
        lax.full((n_blocks * size,), 0, jnp.int32),
        place[:, None],
        row_of,
        lax.ScatterDimensionNumbers((), (0,), (0,)),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return b, lax.reshape(rows, (n_blocks, size)), expert_of, place


def take(x: Array, index: Array) -> Array:
    """Returns elements or rows of `x` by their numbers: [n, …] from [n] i32."""
    return lax.gather(
        x,
        index[:, None],
        lax.GatherDimensionNumbers(tuple(range(1, x.ndim)), (0,), (0,)),
        (1, *x.shape[1:]),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def _number(shape: tuple[int, ...], axis: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _blocks(ids: Array, n_experts: int, size: int) -> tuple[Array, Array, int]:
    """Sorts rows into blocks of `size` rows of one expert: (place of each row, expert of each block, number of blocks).

    Args:
        ids: the expert of each row, [n] i32, with n more than `n_experts`.
        n_experts: the number of experts.
        size: rows in a block.

    Returns:
        [n] i32 below blocks * size; [blocks] i32; the most blocks that any ids need.
    """
    n = ids.shape[0]
    n_blocks = n_experts + (n - n_experts) // size
    rank, rows = _ranks(ids, n_experts)
    blocks = lax.div(rows + np.int32(size - 1), np.int32(size))
    # The number of blocks of each expert and the experts before it.
    square = (n_experts, n_experts)
    upto = lax.select(
        _number(square, 1) <= _number(square, 0),
        lax.broadcast_in_dim(blocks, square, (1,)),
        lax.full(square, 0, jnp.int32),
    )
    ends = lax.reduce_sum(upto, (1,))
    expert_of = _count(ends[None, :] <= _number((n_blocks, n_experts), 0))
    return take(ends - blocks, ids) * np.int32(size) + rank, lax.min(expert_of, np.int32(n_experts - 1)), n_blocks


def _ranks(ids: Array, n_experts: int) -> tuple[Array, Array]:
    """Returns the number of rows before each row with the same expert, [n] i32, and of each expert's rows, [n_experts] i32.

    The running sums are products with triangles of ones, which need neither a sort nor a table of all rows by all rows. The
    operands are small integers, which are exact even in bfloat16.
    """
    n = ids.shape[0]
    chunks = -(-n // MAX_BLOCK)
    # The padding of the last chunk has no expert.
    ids = lax.pad(ids, np.int32(-1), [(0, chunks * MAX_BLOCK - n, 0)])
    own = f32(ids[:, None] == _number((chunks * MAX_BLOCK, n_experts), 1))
    own = lax.reshape(own, (chunks, MAX_BLOCK, n_experts))
    rows = lax.reduce_sum(own, (1,))
    chunks_before = lax.dot(_below(chunks), rows)
    before = lax.dot_general(own, _below(MAX_BLOCK), (((1,), (1,)), ((), ())))  # [chunks, experts, rows of a chunk]
    before = lax.transpose(before, (0, 2, 1)) + chunks_before[:, None, :]
    rank = lax.slice_in_dim(lax.reshape(lax.reduce_sum(before * own, (2,)), (chunks * MAX_BLOCK,)), 0, n)
    return lax.convert_element_type(rank, jnp.int32), lax.convert_element_type(lax.reduce_sum(rows, (0,)), jnp.int32)


def _below(n: int) -> Array:
    """Returns a matrix of ones below the diagonal and zeros elsewhere, [n, n] f32."""
    return f32(_number((n, n), 1) < _number((n, n), 0))


def _count(flags: Array) -> Array:
    """Returns the number of true elements in each row, [rows] i32 from [rows, n] of bool."""
    return lax.reduce_sum(lax.convert_element_type(flags, jnp.int32), (1,))
