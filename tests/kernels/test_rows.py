"""Rows by index."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, emit, spec

from kernelgen.ggml.types import GROUPS
from kernelgen.hlo import proto
from kernelgen.hlo.lint import errors, lint
from kernelgen.targets import TARGETS


def rows(*shape: int, below: int, dtype: type = np.int32, unique: bool = False) -> np.ndarray:
    rng = np.random.default_rng(7)
    if unique:
        return (
            np.stack([rng.permutation(below)[: shape[-1]] for _ in range(int(np.prod(shape[:-1])))])
            .reshape(shape)
            .astype(dtype)
        )
    return rng.integers(0, below, shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i32", *GROUPS["quantized"]])
@pytest.mark.parametrize("n", [1, 5])
def test_get_rows(dtype: str, n: int) -> None:
    out = "i32" if dtype == "i32" else "f32"
    kernel = spec("get_rows", [f"(256,9,1,1)/{dtype}", f"({n},1,1,1)/i32"], f"(256,{n},1,1)/{out}")
    check(kernel, src1=rows(n, below=9))


@pytest.mark.parametrize("table", ["(8,9,2,3)/f32", "(8,9,2,3)/f16/(2,16,288,576)"])
def test_get_rows_of_batches(table: str) -> None:
    check(spec("get_rows", [table, "(4,2,3,1)/i32"], "(8,4,2,3)/f32"), src1=rows(3, 2, 4, below=9))


def test_get_rows_by_strided_numbers() -> None:
    """The row numbers are a column of a sorted table, as in the selection of experts."""
    check(spec("get_rows", ["(8,9,1,1)/f32", "(4,1,1,1)/i32/(12,48,48,48)"], "(8,4,1,1)/f32"), src1=rows(4, below=9))


@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("n", [1, 4])
def test_set_rows(index: str, dtype: str, n: int) -> None:
    dst = f"(64,9,1,1)/{dtype}"
    kernel = spec("set_rows", [f"(64,{n},1,1)/f32", f"({n},1,1,1)/{index}", dst], dst)
    check(kernel, 0.0, src1=rows(n, below=9, unique=True))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "iq4_nl"])
@pytest.mark.parametrize("n", [1, 4])
def test_one_row_is_written_as_a_slice_and_a_cache_stays_where_it_is(dtype: str, n: int) -> None:
    """On a device, a scatter of one row that the graph computes took 8.7 ms, and one of two rows 0.14 ms. The lint
    finds a copied cache for every target.
    """
    cache = f"(64,9,1,1)/{dtype}"
    kernel = spec("set_rows", [f"(64,{n},1,1)/f32", f"({n},1,1,1)/i64", cache], cache)
    hlo = emit(kernel)
    opcodes = [i.opcode for c in proto.parse(hlo).computations for i in c.instructions]
    written = ["dynamic-update-slice"] if n == 1 else ["scatter"]
    assert [o for o in opcodes if o in ("scatter", "dynamic-update-slice")] == written
    copied = proto.parse(hlo)
    copied.ClearField("input_output_alias")
    for target in TARGETS.values():
        assert [f.rule for f in errors(lint(hlo, target))] == []
        assert [f.rule for f in errors(lint(proto.serialize(copied), target))] == ["kernelgen/alias"]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "iq4_nl"])
def test_set_rows_from_f16(dtype: str) -> None:
    dst = f"(32,9,1,1)/{dtype}"
    check(spec("set_rows", ["(32,4,1,1)/f16", "(4,1,1,1)/i64", dst], dst), 0.0, src1=rows(4, below=9, unique=True))


def test_set_rows_of_one_element() -> None:
    """Models without flash attention write their V cache element by element."""
    dst = "(1,600,1,1)/f16"
    kernel = spec("set_rows", ["(1,128,1,1)/f32", "(128,1,1,1)/i64", dst], dst)
    check(kernel, 0.0, src1=rows(128, below=600, unique=True))


@pytest.mark.parametrize("index", ["(4,1,1,1)", "(4,2,1,1)", "(4,1,3,1)", "(4,2,3,1)"])
def test_set_rows_shares_numbers_over_batches(index: str) -> None:
    n, i2, i3, _ = (int(k) for k in index.strip("()").split(","))
    dst = "(8,9,4,3)/f16"
    kernel = spec("set_rows", ["(8,4,4,3)/f32", f"{index}/i64", dst], dst)
    check(kernel, 0.0, src1=rows(1, i3, i2, n, below=9, unique=True))


def test_set_rows_leaves_what_lies_between_rows() -> None:
    """The destination is a view of longer rows: the harness compares every byte that the view skips."""
    dst = "(8,9,1,1)/f32/(4,48,432,432)"
    kernel = spec("set_rows", ["(8,4,1,1)/f32", "(4,1,1,1)/i32", dst], "(8,9,1,1)/f32")
    check(kernel, 0.0, src1=rows(4, below=9, unique=True))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("n, n_rows", [(6, 6), (2, 70)])
def test_get_rows_back(dtype: str, n: int, n_rows: int) -> None:
    """A row number may occur more than once, and some rows may not occur."""
    kernel = spec("get_rows_back", [f"(17,6,1,1)/{dtype}", f"({n},1,1,1)/i32"], f"(17,{n_rows},1,1)/f32")
    check(kernel, 1e-12, src1=np.arange(n) // 2)
