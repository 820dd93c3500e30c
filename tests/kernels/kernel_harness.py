"""Runs a kernel as a device does, from storage bytes through XLA to storage bytes, and compares it with the reference.

Views are written to storage with NumPy's byte strides, so the harness does not repeat a wrong view of the HLO.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
from reference import DTYPES, EXAMPLES, compute, dequantize, view

from kernelgen import lowering
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.ggml import ops, shapes, weight_layouts
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.hlo import execute
from kernelgen.spec.kernel import KernelSpec

Array = np.ndarray[Any, Any]
LIBRARY = builtin_library()

HALVES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "q1_0", "q2_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_K", "q5_K"), (0, 2)),
    **{"q2_K": (80, 82), "q3_K": (108,), "q6_K": (208,), "tq1_0": (52,), "tq2_0": (64,)},
}
"""The offsets of the f16 numbers in a block, by type."""


def tensor(text: str) -> TensorDesc:
    return TensorDesc.parse(text)


def spec(op: str, inputs: list[str | None], output: str, /, *, alias: int | None = None, **params: Any) -> KernelSpec:
    """Returns a kernel from tensors in the manifest's notation."""
    return KernelSpec.make(op, [t and tensor(t) for t in inputs], tensor(output), params, alias)


LANGUAGES = tuple(filter(None, os.environ.get("KERNELGEN_TEST_LANGUAGES", "").split(",")))
"""The languages in which all tests of kernels choose emitters, in this order; empty for JAX."""


@functools.cache
def emit(kernel: KernelSpec, languages: tuple[str, ...] = LANGUAGES) -> bytes:
    catalog = Catalog([LIBRARY])
    chosen = catalog.choose(kernel, languages, "trn2") if languages else catalog.find(kernel.op)
    assert chosen is not None
    return lowering.emit(kernel, load_function(*chosen))


def combinations(op: str) -> list[tuple[str, ...]]:
    """Returns combinations of input types: each type that an input is registered with once, the other inputs with their
    first.
    """
    found: dict[tuple[str, ...], None] = {}
    for row in LIBRARY.scan()[op].types:
        if not row:
            found[()] = None
        firsts = [column[0] for column in row]
        for i, column in enumerate(row):
            for t in column:
                found[(*firsts[:i], t, *firsts[i + 1 :])] = None
    # Neuron devices have no f64.
    return [types for types in found if "f64" not in types]


def example_kernel(op: str, types: tuple[str, ...]) -> KernelSpec:
    """Returns the kernel of an op's example with inputs of these types."""
    example = EXAMPLES[op]
    inputs = [ne and f"{ne}/{t}" for ne, t in zip(example.inputs, types, strict=False)]
    known = ops.OPS[op]
    if example.output is None:
        descriptions = [t and tensor(t) for t in inputs]
        # Without a rule, or if the example breaks it, the output is like the first input; a check of the kernel reports
        # a mismatch.
        output = str(shapes.result(op, descriptions, known.with_defaults(example.params)) or descriptions[0])
    else:
        output = f"{example.output}/{types[0] if example.dtype == 'same' else example.dtype}"
    return spec(op, inputs, output, alias=known.alias, **example.params)


def random_values(t: TensorDesc, rng: np.random.Generator) -> Array:
    """Returns random values for a tensor: normal floats, small integers, blocks with scales of normal size."""
    if t.dtype in ("i32", "i64", "i16", "i8"):
        return rng.integers(-100, 100, t.shape).astype(DTYPES[t.dtype])
    if not TYPES[t.dtype].quantized:
        return rng.normal(size=t.shape).astype(DTYPES[t.dtype])
    ggml = TYPES[t.dtype]
    blocks = rng.integers(0, 256, (*t.shape[:3], t.ne[0] // ggml.block, ggml.size), dtype=np.uint8)
    # The scales are f16 numbers; random bytes would sometimes make them infinite.
    for at in HALVES.get(t.dtype, ()):
        scales = (0.01 + 0.01 * rng.random(blocks.shape[:-1])).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if t.dtype == "iq1_m":  # the scale is in the upper bits of four words
        blocks[..., 49:56:2] = blocks[..., 49:56:2] & 15 | np.array([0, 0, 0x20, 0x20], np.uint8)
    if t.dtype == "mxfp4":  # the scale is a power of two
        blocks[..., 0] = rng.integers(118, 124, blocks.shape[:-1])
    return blocks.reshape(*t.shape[:3], -1)


def bind(t: TensorDesc, values: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Returns (storage bytes, the logical array in them); bytes that the view skips are random."""
    storage = rng.integers(0, 256, t.storage_bytes, dtype=np.uint8)
    logical = view(storage, t)
    logical[...] = values
    return storage, logical


def as_parameter(storage: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    """Returns storage as the array of an HLO parameter."""
    return storage.view(np.dtype(dtype) if dtype != "bfloat16" else DTYPES["bf16"]).reshape(shape)


def nmse(have: Array, want: Array) -> float:
    """Returns the squared error over the squared reference, as ggml's backend test computes it; infinities and NaNs
    must agree.
    """
    have, want = have.astype(np.float64), want.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(have), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(have) * np.sign(have), np.isinf(want) * np.sign(want))
    finite = np.isfinite(want)
    error, size = ((have[finite] - want[finite]) ** 2).sum(), (want[finite] ** 2).sum()
    return float(error / size) if size else float(error)


def in_layout(storage: Array, logical: Array, t: TensorDesc) -> Array:
    """Returns the bytes of a contiguous tensor in its layout; without a layout, the storage.

    Args:
        storage: the bytes in ggml's order, u8.
        logical: the same as an array, `[ne3, ne2, ne1, ne0]` or bytes per row.
        t: the tensor.
    """
    if t.layout == weight_layouts.BF16:
        return weight_layouts.pack_bf16(dequantize(logical, t))
    if t.layout == weight_layouts.F8_TILES:
        return weight_layouts.pack_f8_tiles(dequantize(logical, t))
    return weight_layouts.pack(storage, t.layout, t.dtype, t.ne) if t.layout else storage


def check(
    kernel: KernelSpec,
    limit: float = 1e-7,
    seed: int = 0,
    languages: tuple[str, ...] = LANGUAGES,
    opened: bool = False,
    **given: Array,
) -> Array:
    """Runs a kernel on random inputs and compares it with the reference.

    Args:
        kernel: the kernel.
        limit: the largest normalized mean squared error.
        seed: the seed of the inputs.
        languages: the languages that may compute it, in order of preference.
        opened: whether to run the kernel for any numbers, with this kernel's numbers as an input.
        given: values of single inputs, by `src<i>`.

    Returns:
        The result, `[ne3, ne2, ne1, ne0]`.
    """
    rng = np.random.default_rng(seed)
    storages, logicals = [], []
    for i, t in enumerate(kernel.inputs):
        if t is None:
            logicals.append(None)
            continue
        values = given.get(f"src{i}")
        storage, logical = bind(t, random_values(t, rng) if values is None else values.reshape(*t.shape[:3], -1), rng)
        storages.append(in_layout(storage, logical, t))
        logicals.append(logical)
    with np.errstate(all="ignore"):
        want = compute(kernel, logicals)
    emitted = kernel.open if opened else kernel
    assert emitted is not None
    if opened:
        numbers = [dict(kernel.params)[name] for name in emitted.opened]
        storages.append(np.array(numbers, np.float32).view(np.uint8))
    executable = execute.compile_for_cpu(emit(emitted, languages))
    arrays = [
        as_parameter(s, dtype, shape) for s, (_, dtype, shape) in zip(storages, executable.parameters, strict=True)
    ]
    present = [i for i, t in enumerate(kernel.inputs) if t is not None]
    wanted = want if kernel.updates else (want,)
    results = []
    for result, values, at in zip(executable.run(arrays), wanted, (kernel.alias, *kernel.updates), strict=True):
        storage = np.ascontiguousarray(result).reshape(-1).view(np.uint8).copy()
        out = kernel.output
        if at is not None:
            out = kernel.inputs[at]
            before = storages[present.index(at)].copy()
            skipped = np.ones(before.shape, np.uint8)
            view(skipped, out)[...] = 0
            np.testing.assert_array_equal(storage[skipped == 1], before[skipped == 1])
        have = view(storage, out)
        if out.dtype not in ("f32", "f16", "bf16"):
            np.testing.assert_array_equal(have, values)
        else:
            error = nmse(have, values)
            assert error <= limit, f"{kernel.op}: normalised mean squared error {error:.3g} > {limit:.3g}"
        results.append(have.copy())
    return results[0]
