"""Kernels of the generation that loads and stores, with grids and masks."""

import os

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

BLOCK = int(os.environ["BLOCK"]) if "BLOCK" in os.environ else 512


@nki.jit
def add_blocks(a, b):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    rows = nl.program_id(0) * 128 + nl.arange(128)[:, None]
    columns = nl.program_id(1) * BLOCK + nl.arange(BLOCK)[None, :]
    nl.store(out[rows, columns], nl.load(a[rows, columns]) + nl.load(b[rows, columns]))
    return out


@nki.jit
def exp_masked(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    columns = nl.arange(x.shape[1])[None, :]
    for block in nl.affine_range((x.shape[0] + 127) // 128):
        rows = block * 128 + nl.arange(128)[:, None]
        tile = nl.load(x[rows, columns], mask=(rows < x.shape[0]))
        nl.store(out[rows, columns], nl.exp(tile), mask=(rows < x.shape[0]))
    return out
