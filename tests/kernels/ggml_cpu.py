"""Computes one op with ggml's CPU backend, through its C library."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelgen.ggml import ops
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.spec.kernel import KernelSpec

Array = np.ndarray[Any, Any]
LIBRARIES = "LLAMA_CPP_PROGRAMS"
BUILT = Path(__file__).parents[2] / "tools" / "llama_cpp" / "llama_cpp"


class _Tensor(ctypes.Structure):
    """`struct ggml_tensor`, up to its name."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * ops.N_WORDS),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
    )


class _Plan(ctypes.Structure):
    """`struct ggml_cplan`."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )


class _InitParams(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@functools.cache
def library() -> ctypes.CDLL:
    """Returns ggml's libraries, which Bazel builds or LLAMA_CPP_PROGRAMS names; without them the test is skipped."""
    folder = Path(os.environ.get(LIBRARIES, BUILT))
    if not folder.exists():
        pytest.skip(f"{folder} is not there: run this through Bazel, or name a build of llama.cpp in {LIBRARIES}")
    ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL(str(folder / "libggml-cpu.so"))
    for name in ("ggml_init", "ggml_new_graph", "ggml_new_tensor"):
        getattr(found, name).restype = ctypes.c_void_p
    found.ggml_init.argtypes = (_InitParams,)
    found.ggml_free.argtypes = found.ggml_new_graph.argtypes = (ctypes.c_void_p,)
    found.ggml_new_tensor.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
    found.ggml_build_forward_expand.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    found.ggml_graph_plan.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    found.ggml_graph_plan.restype = _Plan
    found.ggml_graph_compute.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Plan))
    return found


def compute(spec: KernelSpec, inputs: list[Array | None]) -> list[Array]:
    """Returns the bytes of the result, and of further inputs that the op changes; all tensors are contiguous.

    Args:
        spec: the kernel.
        inputs: each input's elements, `[ne3, ne2, ne1, ne0]`; bytes per row for a quantized type.
    """
    lib = library()
    context = lib.ggml_init(_InitParams(1 << 20, None, True))

    def tensor(t: TensorDesc, data: Array) -> _Tensor:
        pointer = lib.ggml_new_tensor(context, TYPES[t.dtype].number, 4, (ctypes.c_int64 * 4)(*t.ne))
        made = _Tensor.from_address(pointer)
        made.data = data.ctypes.data
        return made

    buffers = [None if x is None else np.array(x, order="C").reshape(-1).view(np.uint8) for x in inputs]
    size = TensorDesc.make(spec.output.ne, spec.output.dtype).storage_bytes
    result = np.zeros(size, np.uint8) if spec.alias is None else buffers[spec.alias]
    assert result is not None
    out = tensor(spec.output, result)
    known, words = ops.op(spec.op), spec.of_ggml.op_params
    family = "glu" if spec.op in ops.GLU else "unary" if known.variant is not None else spec.op
    out.op = ops.ENUM.index(family)
    out.op_params[:] = [w - (1 << 32) if w >= 1 << 31 else w for w in words]
    for i, (t, data) in enumerate(zip(spec.inputs, buffers, strict=True)):
        if t is not None:
            out.src[i] = ctypes.addressof(tensor(t, data))
    graph = lib.ggml_new_graph(context)
    lib.ggml_build_forward_expand(graph, ctypes.addressof(out))
    plan = lib.ggml_graph_plan(graph, 1, None)
    work = np.empty(plan.work_size + 64, np.uint8)
    plan.work_data = work.ctypes.data
    status = lib.ggml_graph_compute(graph, ctypes.byref(plan))
    lib.ggml_free(context)
    assert status == 0
    return [result, *(buffers[i] for i in spec.updates)]
