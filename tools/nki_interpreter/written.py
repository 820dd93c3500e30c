"""Tracks which elements of memory were written, and by which instruction: `NkiMemory.written` and `origin` of a view."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_interpreter.program import NkiMemory
from nki_interpreter.tensors import NkiTensor


def flags(tensor: NkiTensor, what: str = "written") -> Any:
    """Returns, in the tensor's shape, which elements were written, or their `origin`.

    For a strided view in the memory's own dtype, the result is a view that the caller may change.
    """
    written = _each(tensor.storage, what)
    if tensor.gather is not None or tensor.valid is not None or tensor.cast is not None:
        return np.minimum.reduce([written[np.clip(part, 0, written.size - 1)] for part in _parts(tensor)])
    strides = [s * written.itemsize for s in tensor.strides]
    return np.lib.stride_tricks.as_strided(written[tensor.offset :], tensor.shape, strides)


def _parts(tensor: NkiTensor) -> list[Any]:
    """Returns the numbers of a view's elements: arrays in its shape, several if its dtype is wider than the memory's."""
    grid = tensor.gather
    if grid is None:
        grid = np.full(tensor.shape, tensor.offset)
        for axis, stride in enumerate(tensor.strides):
            steps = np.arange(tensor.shape[axis]) * stride
            grid += steps.reshape([-1 if a == axis else 1 for a in range(len(tensor.shape))])
    size, own = tensor.dtype.itemsize, tensor.storage.dtype.itemsize
    return [grid * size // own + part for part in range(max(1, size // own))]


def _each(storage: NkiMemory, what: str) -> Any:
    """Returns which elements of memory were written, or their `origin`, as an array that the caller may change."""
    known = getattr(storage, what)
    if not isinstance(known, np.ndarray):
        dtype = np.bool_ if what == "written" else np.uint8
        # The operating system allocates pages of zeros only when they are written.
        known = np.full(storage.size, known, dtype) if known else np.zeros(storage.size, dtype)
        setattr(storage, what, known)
    return known


def mark_written(tensor: NkiTensor) -> None:
    storage = tensor.storage
    storage.stored = True
    if storage.written is not None and storage.written is not True:
        put(tensor, "written", True)


def put(tensor: NkiTensor, what: str, value: Any) -> None:
    storage = tensor.storage
    known = getattr(storage, what)
    if not isinstance(known, np.ndarray) and known == value:
        return
    if tensor.dynamic or (tensor.is_plain and tensor.size == storage.size):  # run-time indices can select any element
        setattr(storage, what, value)
    elif tensor.is_plain:
        flags(tensor, what)[...] = value
    else:
        shown = np.ones((), np.bool_)
        for some in (tensor.mask, tensor.valid):
            shown = shown if some is None else shown & some
        shown = np.broadcast_to(shown, tensor.shape)
        every = _each(storage, what)
        for part in _parts(tensor):
            every[part[shown]] = value
