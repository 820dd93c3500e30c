"""Views of storage: the form of each view, and right reads and writes for any view."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import spec

from kernelgen import lowering
from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import execute, proto
from kernelgen.hlo.storage import storage


def opcodes(text: str) -> set[str]:
    """Returns the opcodes that read a view, in a kernel that negates it."""
    t = TensorDesc.parse(text)
    ne = text.split("/")[0]
    data = lowering.emit(spec([text], f"{ne}/{t.dtype}"), lambda x: -x)
    return {i.opcode for c in proto.parse(data).computations for i in c.instructions} - {"parameter", "negate"}


@pytest.mark.parametrize(
    "text, shape, needed",
    [
        ("(4,3,5,2)/f32", (2, 5, 3, 4), set()),
        ("(4,3,5,1)/f32/(4,80,16,240)", (1, 3, 5, 4), {"transpose"}),
        ("(4,1,5,1)/f32", (1, 5, 1, 4), set()),
        ("(1,3,1,1)/f32", (1, 1, 3, 1), set()),
        ("(4,3,1,1)/f32/(4,32,96,96)", (20,), {"pad", "reshape", "slice", "constant"}),
        ("(4,3,1,1)/f32/(4,20,56,280)", (14,), {"pad", "reshape", "slice", "constant"}),
        ("(4,3,5,1)/f32/(4,4,4,60)", (10,), {"gather"}),
        ("(4,3,5,1)/f32/(4,20,56,280)", (70,), {"gather"}),
    ],
)
def test_a_view_takes_the_cheapest_form(text: str, shape: tuple[int, ...], needed: set[str]) -> None:
    assert storage(TensorDesc.parse(text)).shape == shape
    have = opcodes(text)
    if "gather" in needed:
        assert "gather" in have and "pad" not in have
    else:
        assert have - {"reshape", "broadcast"} == needed - {"reshape"}


@pytest.mark.parametrize(
    "text, dtype, shape",
    [
        ("(6,1,1,1)/i64", "int32", (1, 1, 1, 6, 2)),
        ("(64,3,1,1)/q8_0", "uint8", (1, 1, 3, 2, 34)),
        ("(512,2,1,1)/q4_K", "uint8", (1, 1, 2, 2, 144)),
        ("(8,3,1,1)/bf16", "bfloat16", (1, 1, 3, 8)),
        ("(8,3,1,1)/i8", "int8", (1, 1, 3, 8)),
        ("(64,3,1,1)/q8_0/(34,102,306,306)", "uint8", (2 * 102 + 68,)),
    ],
)
def test_types_that_the_device_lacks_arrive_as_others(text: str, dtype: str, shape: tuple[int, ...]) -> None:
    held = storage(TensorDesc.parse(text))
    assert (held.dtype, held.shape) == (dtype, shape)


def test_the_lower_words_of_i64_are_used() -> None:
    values = np.array([3, -1, 2**31 - 1], np.int64)
    data = lowering.emit(spec(["(3,1,1,1)/i64"], "(3,1,1,1)/i32"), lambda x: x + 0)
    (y,) = execute.run(data, [values.view(np.int32).reshape(1, 1, 1, 3, 2)])
    np.testing.assert_array_equal(y.reshape(-1), values.astype(np.int32))


strides = st.tuples(*[st.integers(0, 12)] * 4)


@settings(max_examples=40, deadline=None)
@given(ne=st.tuples(*[st.integers(1, 4)] * 4), steps=strides, seed=st.integers(0, 99))
def test_any_strides_are_read_as_numpy_reads_them(ne: Any, steps: Any, seed: int) -> None:
    t = TensorDesc.make(ne, "f32", [4 * s for s in steps])
    flat = np.random.default_rng(seed).normal(size=t.storage_bytes // 4).astype(np.float32)
    want = np.lib.stride_tricks.as_strided(flat, t.shape, t.nb[::-1])
    data = lowering.emit(spec([str(t)], str(TensorDesc.make(ne, "f32"))), lambda x: -x)
    np.testing.assert_array_equal(-execute.run(data, [flat.reshape(storage(t).shape)])[0], want)


@settings(max_examples=40, deadline=None)
@given(ne=st.tuples(*[st.integers(1, 4)] * 4), gaps=strides, order=st.permutations(range(4)), seed=st.integers(0, 99))
def test_any_disjoint_strides_are_written_in_place(ne: Any, gaps: Any, order: Any, seed: int) -> None:
    """Dimensions have any order, and gaps between their steps; the bytes in the gaps stay unchanged."""
    steps, size = [0] * 4, 1
    for k in order:
        steps[k] = size
        size = size * ne[k] + gaps[k]
    t = TensorDesc.make(ne, "f32", [4 * s for s in steps])
    rng = np.random.default_rng(seed)
    flat = rng.normal(size=t.storage_bytes // 4).astype(np.float32)
    value = rng.normal(size=t.shape).astype(np.float32)
    want = flat.copy()
    np.lib.stride_tricks.as_strided(want, t.shape, t.nb[::-1])[...] = value
    dense = TensorDesc.make(ne, "f32")
    data = lowering.emit(spec([str(dense), str(t)], str(dense), alias=1), lambda x, dst: x)
    (y,) = execute.run(data, [value, flat.reshape(storage(t).shape)])
    np.testing.assert_array_equal(y.reshape(-1), want)


def test_a_dense_permutation_is_not_flattened() -> None:
    s = storage(TensorDesc.parse("(4,3,5,2)/f32/(4,80,16,240)"))
    assert s.dense and s.order == (0, 2, 1, 3)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel, function, message",
    [
        (
            spec(["(4,1,1,1)/f32"], "(4,1,1,1)/f32"),
            lambda x: x[:, :, :, :3],
            "the kernel returns float32[1, 1, 1, 3] as the result, and the manifest says (4,1,1,1)/f32, which is float32[1, 1, 1, 4]",
        ),
        (
            spec(["(4,1,1,1)/f32"], "(4,1,1,1)/f32"),
            lambda x: jax.lax.reshape(x[:, :, :, :3], (1, 1, 1, 4)),
            "ValueError: reshape: number of output elements (4) doesn't match expected number of elements (3)",
        ),
        (
            spec(["(4,1,1,1)/f32"], "(4,1,1,1)/f16"),
            lambda x: x,
            "the kernel returns float32[1, 1, 1, 4] as the result, and the manifest says (4,1,1,1)/f16, which is float16",
        ),
        (
            spec(["(4,1,1,1)/f32"], "(4,1,1,1)/f32"),
            lambda x: (x, x),
            "the emitter returned a tuple of 2, not the result",
        ),
        (spec(["(4,1,1,1)/f32"], "(4,1,1,1)/f32"), lambda x: None, "the emitter returned NoneType, not one array"),
        (spec(["(4,1,1,1)/f32"], "(4,1,1,1)/f32"), lambda x: x + "a", "TypeError: "),
        (spec(["(4,1,1,1)/f32"], "(4,1,1,1)/f32"), lambda: None, "TypeError: "),
        (spec(["(4,1,1,1)/f64"], "(4,1,1,1)/f32"), lambda x: x, "input 0: Neuron devices have no f64"),
        (spec(["(4,1,1,1)/f32"], "(4,1,1,1)/f64"), lambda x: x, "the result: Neuron devices have no f64"),
        (
            spec(["(4,1,1,1)/f32"], "(4,2,1,1)/f32/(4,32,64,64)"),
            lambda x: x,
            "has gaps, which only a kernel that works in place can leave",
        ),
        (
            spec(["(4,1,1,1)/f16"], "(4,1,1,1)/f32", alias=0),
            lambda x: x,
            "can't share the memory of input 0, (4,1,1,1)/f16",
        ),
        (spec(["(4,1,1,1)/f32"], "(4,1,1,1)/f32", alpha=1.0), lambda x: x, "the emitter takes no parameter 'alpha'"),
    ],
)
def test_a_failure_names_kernel_place_and_reason(kernel: Any, function: Any, message: str) -> None:
    with pytest.raises(KernelgenError) as caught:
        lowering.emit(kernel, function)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.message.startswith(f"kernel {kernel.id}: ") and message in diagnostic.message
    assert diagnostic.location and diagnostic.location.file == __file__
    assert caught.value.exit_code == 1


def test_the_line_is_that_of_the_emitter() -> None:
    def broken(x: Any) -> Any:
        return x.no_such_method()

    with pytest.raises(KernelgenError) as caught:
        lowering.emit(spec(["(4,1,1,1)/f32"], "(4,1,1,1)/f32"), broken)
    location = caught.value.diagnostics[0].location
    assert location and location.line == broken.__code__.co_firstlineno + 1


def test_a_kernel_that_no_target_takes_is_refused_at_once() -> None:
    from jax import lax

    with pytest.raises(
        KernelgenError,
        match=r"test_views.py:\d+:1: error: kernel toy-3-f32-\w+: \[NCC_EVRF001\] .*: topk is not supported",
    ):
        lowering.emit(spec(["(9,1,1,1)/f32"], "(3,1,1,1)/f32"), lambda x: lax.top_k(x, 3)[0])
