"""Reading and writing rows by index: embeddings and the KV cache."""

import math

import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter

from .common import f32, repeat, result
from .dequantize import floats
from .quantize import stored


def _flat_rows(rows: Array, n_batch: int, n_rows: int) -> Array:
    """Returns row numbers in the flattened table: [n_batch * n, 1] from [n_batch, n] i32."""
    if n_batch > 1:
        rows = rows + lax.broadcasted_iota(np.int32, rows.shape, 0) * np.int32(n_rows)
    return lax.reshape(rows, (math.prod(rows.shape), 1))


@emitter("get_rows", types="number quantized, i32")
def get_rows(x, rows, *, inputs, out):
    """The rows of `x` that `rows` names.

    x: [N3, N2, n_rows, ne0] f32, f16, bf16, i32 or quantized; rows: [1, N3, N2, n] i32, each below n_rows. Returns
    [N3, N2, n, ne0], f32 unless x is i32.
    """
    n3, n2, n_rows = x.shape[:3]
    n = rows.shape[3]
    table = lax.reshape(x, (n3 * n2 * n_rows, *x.shape[3:]))
    gathered = lax.gather(
        table,
        _flat_rows(lax.reshape(rows, (n3 * n2, n)), n3 * n2, n_rows),
        lax.GatherDimensionNumbers(tuple(range(1, table.ndim)), (0,), (0,)),
        (1, *table.shape[1:]),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    # Only the gathered rows are dequantized.
    picked = type(inputs[0]).make((inputs[0].ne[0], n, n2, n3), inputs[0].dtype)
    gathered = floats(lax.reshape(gathered, (n3, n2, n, *x.shape[3:])), picked)
    return result(gathered if out.dtype == "i32" else f32(gathered), out)


@emitter("set_rows", types="f32 f16, i32 i64, number quantizable")
def set_rows(x, rows, dst, *, inputs):
    """`dst` with row `rows[i]` replaced by row i of `x`, rounded or quantized to the type of `dst`; in place.

    x: [N3, N2, n, ne0] f32 or f16; rows: [1, R3, R2, n] i32 or i64, R3 dividing N3 and R2 dividing N2; dst:
    [N3, N2, n_rows, ne0] f32, f16, bf16 or quantized. A row that `rows` names twice gets either value.
    """
    n3, n2, n_rows = dst.shape[:3]
    n = x.shape[2]
    values = stored(x, inputs[2])
    row_shape = dst.shape[3:]
    rows = repeat(rows[0], (n3, n2, n))
    table = lax.reshape(dst, (n3 * n2 * n_rows, *row_shape))
    values = lax.reshape(values, (n3 * n2 * n, *row_shape))
    index = _flat_rows(lax.reshape(rows, (n3 * n2, n)), n3 * n2, n_rows)
    if len(values) == 1:  # one token: a plain write
        table = lax.dynamic_update_slice(table, values, (index[0, 0], *[np.int32(0)] * len(row_shape)))
    else:
        table = lax.scatter(
            table,
            index,
            values,
            lax.ScatterDimensionNumbers(tuple(range(1, table.ndim)), (0,), (0,)),
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
    return lax.reshape(table, dst.shape)


@emitter("get_rows_back", types="float, i32")
def get_rows_back(x, rows, *, out):
    """The gradient of `get_rows`: row r is the sum of the rows i of `x` for which `rows[i]` is r.

    x: [1, 1, n or more, ne0]; rows: [1, 1, 1, n] i32. Returns [1, 1, n_rows, ne0] f32.
    """
    n = rows.shape[3]
    values = f32(lax.slice_in_dim(x[0, 0], 0, n, axis=0))
    table = lax.scatter_add(
        lax.full((out.ne[1], out.ne[0]), 0, np.float32),
        lax.reshape(rows, (n, 1)),
        values,
        lax.ScatterDimensionNumbers((1,), (0,), (0,)),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return result(table, out)
