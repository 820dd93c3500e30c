"""Sliding windows over an axis and their inverse, the sum of overlapping windows.

Both consist of pads, broadcasts, reshapes and slices only, without gathers and convolutions with ones. A window of 32 x 32 needs no
more HLO than a window of 3 x 3.
"""

from jax import Array, lax


def n_windows(length: int, k: int, s: int, p: int, d: int) -> int:
    """Returns the number of windows (`ggml_calc_conv_output_size`).

    C divides towards zero, so an axis that is less than `s` elements too short for a window has one: the missing elements count as
    padding.
    """
    room = length + 2 * p - d * (k - 1) - 1
    return (room // s if room >= 0 else -(-room // s)) + 1


def windows(x: Array, axis: int, n: int, k: int, s: int, p: int, d: int, fill: float = 0) -> Array:
    """Returns the elements of `n` windows of `k` along an axis: y[…, i, o, …] = x[…, o * s + i * d - p, …].

    Args:
        x: any array.
        axis: the axis, not negative; two axes, of `k` and of `n`, replace it.
        n: the number of windows.
        k: the number of elements in a window.
        s: the distance of two windows (stride).
        p: the number of elements before the axis in the first window (padding).
        d: the distance of two elements of a window (dilation).
        fill: the value of elements outside of `x`.
    """
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    span = (k - 1) * d + 1
    if s >= span:
        # Each window is a part of a group of s elements, because windows do not overlap.
        y = lax.reshape(_fit(x, axis, p, n * s, fill), (*before, n, s, *after))
        y = lax.slice_in_dim(y, 0, span, d, axis + 1)
        order = list(range(y.ndim))
        order[axis : axis + 2] = axis + 1, axis
        return lax.transpose(y, order)
    # Repeats the axis and reshapes it to rows that are d elements longer, so that each row begins d elements later in the axis.
    length = (n - 1) * s + span
    copies = _copies(length, k, d)
    y = _fit(x, axis, p, length, fill)
    y = lax.broadcast_in_dim(y, (*before, copies, length, *after), [i + (i >= axis) for i in range(x.ndim)])
    y = lax.reshape(y, (*before, copies * length, *after))
    y = lax.slice_in_dim(y, 0, k * (length + d), 1, axis)
    y = lax.reshape(y, (*before, k, length + d, *after))
    return lax.slice_in_dim(y, 0, (n - 1) * s + 1, s, axis + 1)


def overlap_add(y: Array, axis: int, length: int, s: int, p: int, d: int) -> Array:
    """Returns the sum of windows, the transpose of `windows`: each x[j] is the sum of the y[i, o] with o * s + i * d - p = j.

    Args:
        y: the elements of a window on `axis`, the windows on the axis after it.
        axis: the first axis, not negative; one axis of `length` replaces the two.
        length: the number of elements in the result.
        s: see `windows`.
        p: see `windows`.
        d: see `windows`.
    """
    before, (k, n), after = y.shape[:axis], y.shape[axis : axis + 2], y.shape[axis + 2 :]
    total = (n - 1) * s + (k - 1) * d + 1
    copies = _copies(total, k, d)
    y = _pad(y, axis + 1, 0, total + d - (n - 1) * s - 1, s - 1)
    y = lax.reshape(y, (*before, k * (total + d), *after))
    y = _pad(y, axis, 0, copies * total - k * (total + d))
    y = lax.reduce_sum(lax.reshape(y, (*before, copies, total, *after)), (axis,))
    return _pad(y, axis, -p, length + p - total)


def _copies(length: int, k: int, d: int) -> int:
    return -(-k * (length + d) // length)


def _fit(x: Array, axis: int, p: int, length: int, fill: float) -> Array:
    """Returns `p` times `fill` followed by `x`, cut or filled up to `length`."""
    return _pad(x, axis, p, length - p - x.shape[axis], fill=fill)


def _pad(x: Array, axis: int, low: int, high: int, interior: int = 0, fill: float = 0) -> Array:
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (low, high, interior)
    return x if not (low or high or interior) else lax.pad(x, x.dtype.type(fill), config)
