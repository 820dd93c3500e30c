"""Ops outside any graph: forms that compilers were seen to compile wrong silently, and copies with DMA runs of a given length.

`kernelgen doctor --device` compiles them beside kernels of graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from kernelgen.device.manifest import DIVISOR, PARTS
from kernelgen.emitters import emitter
from kernelgen.ggml.tensor import TensorDesc


@emitter("probe_divide", types="i32")
def divide(x: Any) -> Any:
    """Returns `x` divided by `DIVISOR`, without the remainder."""
    return lax.div(x, lax.full_like(x, DIVISOR))


@emitter("probe_round", types="f32")
def round_to_bf16(x: Any) -> Any:
    """Returns `x + 1` rounded to bfloat16, times 3."""
    rounded = lax.convert_element_type(x + np.float32(1), "bfloat16")
    return lax.convert_element_type(rounded, np.float32) * np.float32(3)


@emitter("probe_split", types="f32")
def split(x: Any) -> Any:
    """Returns `x` with the parts of its last axis in reverse order."""
    quarter = x.shape[-1] // sum(PARTS)
    found, begin = [], 0
    for i, part in enumerate(PARTS):
        found.append(lax.slice_in_dim(x, begin * quarter, (begin + part) * quarter, axis=3) * np.float32(i + 2))
        begin += part
    return lax.concatenate(found[::-1], 3)


@emitter("probe_copy", types="f16")
def copy(x: Any, *, out: TensorDesc) -> Any:
    """Returns the first elements of each row: the reads are separate runs of that length."""
    return lax.slice_in_dim(x, 0, out.ne[0], axis=3)
