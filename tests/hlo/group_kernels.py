"""Runs a group of nodes twice over the same bytes of memory: as one kernel, and node by node with the kernels of its
ops.

Nodes read and write memory by byte offsets alone, so the check does not repeat a mistake in the HLO's views.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.hlo import execute
from kernelgen.lowering.emission import emit_functions
from kernelgen.spec.kernel import GraphSpec, KernelSpec, TensorPlace

Array = np.ndarray[Any, Any]
CATALOG = Catalog([builtin_library()])


@functools.cache
def emit(spec: KernelSpec | GraphSpec) -> bytes:
    """Returns the HLO of a kernel of either kind."""
    return emit_functions(spec, {op: load_function(*CATALOG.find(op)) for op in spec.ops}).hlo


@functools.cache
def _executable(spec: KernelSpec | GraphSpec) -> execute.Executable:
    return execute.compile_for_cpu(emit(spec))


def _run(spec: KernelSpec | GraphSpec, parameters: list[Array]) -> list[Array]:
    """Returns the bytes of a kernel's results, given the bytes of its parameters."""
    executable = _executable(spec)
    arrays = [
        p.view(_dtype(dtype)).reshape(shape)
        for p, (_, dtype, shape) in zip(parameters, executable.parameters, strict=True)
    ]
    return [np.frombuffer(np.ascontiguousarray(r).tobytes(), np.uint8).copy() for r in executable.run(arrays)]


def _dtype(name: str) -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def contents(spec: GraphSpec, seed: int, most: Mapping[int, int] | None = None) -> list[Array]:
    """Returns random bytes for each slot: normal floats, indices, blocks with scales of normal size.

    Args:
        spec: the group.
        seed: the seed of the random numbers.
        most: the upper bound of integers, by slot; 2 by default.
    """
    import gguf

    rng = np.random.default_rng(seed)
    found = []
    for i, size in enumerate(spec.slots):
        dtype = spec.uses()[i][0].tensor.dtype
        t = TYPES[dtype]
        n = size // t.size * t.block
        if dtype in ("i32", "i64"):
            # A row that is written twice may get either value: each index occurs once, if there are enough.
            limit = (most or {}).get(i, 2)
            values = rng.permutation(limit)[:n] if limit >= n else rng.integers(0, limit, n)
            data = values.astype({"i32": np.int32, "i64": np.int64}[dtype])
        elif t.quantized:
            kind = next(q for q in gguf.GGMLQuantizationType if q.value == t.number)
            data = gguf.quants.quantize(rng.normal(size=(1, n)).astype(np.float32), kind)
        else:
            data = rng.normal(size=n).astype({"f32": np.float32, "f16": np.float16}[dtype])
        found.append(np.frombuffer(data.tobytes(), np.uint8).copy())
        assert len(found[-1]) == size
    return found


def whole(spec: GraphSpec, slots: list[Array]) -> list[Array]:
    """Returns the bytes of the results and then of the written slots, computed by one kernel."""
    return _run(spec, [slot.copy() for slot in slots])


def one_by_one(spec: GraphSpec, slots: list[Array]) -> list[Array]:
    """Returns the same bytes, computed by the kernels of the nodes."""
    memory: dict[tuple[bool, int], Array] = {(True, i): slot.copy() for i, slot in enumerate(slots)}

    def part(place: TensorPlace, tensor: TensorDesc) -> Array:
        return memory[place.slot, place.index][place.offset : place.offset + tensor.storage_bytes]

    for i, node in enumerate(spec.nodes):
        kernel = node.kernel
        if node.place is None:
            memory[False, i] = np.zeros(node.output.storage_bytes, np.uint8)
        given = [part(o.place, o.tensor).copy() for o in node.inputs if o is not None]
        (result,) = _run(kernel, given)
        target = part(node.place or TensorPlace(False, i), node.output)
        assert len(target) == len(result)
        target[:] = result
    return [*(memory[False, i] for i in spec.escaping), *(memory[True, i] for i in spec.written)]


def dtypes(spec: GraphSpec) -> list[str]:
    """Returns the ggml types of the values that `whole` returns."""
    return [
        *(spec.nodes[i].output.dtype for i in spec.escaping),
        *(spec.uses()[i][0].tensor.dtype for i in spec.written),
    ]


def nmse(have: Array, want: Array, dtype: str) -> float:
    """Returns the squared error over the squared reference of two tensors' bytes; for integers and blocks 1 if they differ."""
    kinds = {"f32": np.float32, "f16": np.float16}
    if dtype not in kinds:
        return float(not np.array_equal(have, want))
    a, b = (np.asarray(x).view(kinds[dtype]).astype(np.float64) for x in (have, want))
    np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
    a, b = a[np.isfinite(a)], b[np.isfinite(b)]
    size = float((b**2).sum())
    return float(((a - b) ** 2).sum()) / size if size else float((a**2).sum())


def check(spec: GraphSpec, seed: int = 0, most: Mapping[int, int] | None = None, limit: float = 1e-6) -> None:
    """Checks that a group computes the same as one kernel and node by node."""
    slots = contents(spec, seed, most)
    for k, (have, want, dtype) in enumerate(
        zip(whole(spec, slots), one_by_one(spec, slots), dtypes(spec), strict=True)
    ):
        assert nmse(have, want, dtype) <= limit, f"result {k} of {spec.id}"
