"""A kernel in NumPy that no op of ggml names."""

import numpy as np


def running_sum(x, *, axis):
    """The sums of what comes before each element along an axis, and the element itself."""
    return np.cumsum(x, axis=axis)
