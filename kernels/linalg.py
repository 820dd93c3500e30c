"""Systems of linear equations."""

from jax import lax

from kernelgen.emitters import emitter


@emitter("solve_tri", types="f32, f32")
def solve_tri(a, b):
    """X with A X = B, for lower triangular A.

    a: [B3, B2, n, n]; only the lower triangle with the diagonal is used; b: [B3, B2, n, k]. Returns the shape of `b`.
    """
    n = a.shape[2]
    columns = lax.transpose(a, (0, 1, 3, 2))

    # `part` is the contribution of the elements of X found so far to each row, added in ggml's order.
    def step(i, state):
        x, part = state
        pivot = lax.dynamic_slice_in_dim(lax.dynamic_slice_in_dim(a, i, 1, axis=2), i, 1, axis=3)
        known = lax.dynamic_slice_in_dim(b, i, 1, axis=2) - lax.dynamic_slice_in_dim(part, i, 1, axis=2)
        row = known / lax.broadcast_in_dim(pivot, known.shape, (0, 1, 2, 3))
        column = lax.dynamic_slice_in_dim(columns, i, 1, axis=2)  # [B3, B2, 1, n]
        share = lax.broadcast_in_dim(column[:, :, 0], b.shape, (0, 1, 2)) * lax.broadcast_in_dim(
            row[:, :, 0], b.shape, (0, 1, 3)
        )
        return lax.dynamic_update_slice_in_dim(x, row, i, axis=2), part + share

    zero = lax.full_like(b, 0)
    x, _ = lax.fori_loop(0, n, step, (zero, zero))
    return x
