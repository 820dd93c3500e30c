"""Plain functions of NumPy arrays."""

import numpy as np

from .rows import last


def softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def put_rows(table, rows, *, start):
    table[start : start + rows.shape[0]] = rows
    return last(rows) * 1


def quantize(x):
    scale = np.max(np.abs(x), axis=1, keepdims=True) / 127
    return (np.round(x / scale) + 128).astype(np.uint8), scale


def add(a, b):
    return a + b


def exp(x):
    return np.exp(x)


def transposed_matmul(a, b):
    return a.astype(np.float32).T @ b.astype(np.float32)
