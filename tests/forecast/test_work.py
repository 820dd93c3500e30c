"""Counts of a program's HLO, and the time computed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernelgen.dispatch import chips
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.forecast.time import of_work, sbuf_bytes
from kernelgen.forecast.work import Work, of_hlo
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.lowering import emission
from kernelgen.lowering.kernel import traced_hlo
from kernelgen.spec.kernel import KernelSpec

SBUF = 24 << 20
PREC_F32 = 10
"""GGML_PREC_F32."""


def work(function: Callable[..., Any], *shapes: tuple[tuple[int, ...], str], sbuf: int = SBUF) -> Work:
    return of_hlo(traced_hlo(function, shapes)[0], sbuf)


def bf16(*shape: int) -> tuple[tuple[int, ...], str]:
    return shape, "bfloat16"


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 32 * 4096), (128, 32 * 4096), (129, 2 * 32 * 4096), (512, 32 * 32 * 512)]
)
def test_a_product_reads_its_weights_once_and_pays_128_rows_at_least(rows: int, columns: int) -> None:
    found = work(lambda x, w: x @ w, bf16(rows, 4096), bf16(4096, 4096))
    assert found.read == 2 * (rows + 4096) * 4096 and found.written == 2 * rows * 4096
    expected = min(columns, 32 * 32 * max(rows, 128))
    assert dict(found.columns if rows <= 128 else found.columns_many) == {"bfloat16": expected}
    assert not (found.columns_many if rows <= 128 else found.columns)
    assert found.spilled == found.vector == found.either == found.waited == 0


def test_weights_that_are_converted_are_work_of_either_engine_and_products_of_f32() -> None:
    found = work(lambda x, w: x @ w.astype(jnp.float32), ((1, 256), "float32"), ((256, 512), "int8"))
    assert dict(found.columns) == {"float32": 2 * 512}
    assert found.either == 256 * 512 / 128
    assert found.read == 4 * 256 + 256 * 512


@pytest.mark.parametrize(
    ("dtype", "operations"), [("q8_0", 2), ("q4_K", 5), ("q6_K", 9)]
)  # per weight: 8 bits are converted and scaled; smaller ones are first shifted out of bytes
@pytest.mark.parametrize(("prec_src1", "multiplied"), [(0, "bfloat16"), (PREC_F32, "float32")])
def test_each_launch_dequantizes_its_weights_and_multiplies_them_in_bfloat16_unless_f32_is_requested(
    dtype: str, operations: int, prec_src1: int, multiplied: str
) -> None:
    weights, vector = TensorDesc.make((512, 256, 1, 1), dtype), TensorDesc.make((512, 1, 1, 1), "f32")
    output = TensorDesc.make((256, 1, 1, 1), "f32")
    spec = KernelSpec.make("mul_mat", [weights, vector], output, {"prec": 0, "hint": 0, "prec_src1": prec_src1})
    catalog = Catalog([builtin_library()])
    found = of_hlo(emission.emit(catalog.emitters(catalog.kernel(spec)), spec).hlo, SBUF)
    assert dict(found.columns) == {multiplied: 512 // 128 * 256}
    assert found.read == weights.storage_bytes + 4 * 512
    # The operations of the scales are added; they are few.
    assert operations <= (found.either + found.vector_two) / (512 * 256 / 128) < operations + 0.4


def test_what_is_sliced_or_written_over_counts_and_not_all_of_a_cache() -> None:
    def function(cache: Any, row: Any, at: Any) -> Any:
        cache = jax.lax.dynamic_update_slice(cache, row, (at, 0))
        return cache, jax.lax.dynamic_slice(cache, (0, 0), (64, 128)).sum()

    found = work(function, bf16(4096, 128), bf16(1, 128), ((), "int32"))
    assert found.written == 2 * 128 + 2
    assert found.read == 2 * 64 * 128 + 2 * 128 + 4
    assert (found.rows, found.elements) == (1, 0)


def test_descriptors_of_rows_and_of_single_elements() -> None:
    rows = work(lambda x, at: x[at], bf16(1000, 256), ((32,), "int32"))
    assert (rows.rows, rows.elements, rows.read) == (32, 0, 4 * 32)  # descriptors move the gathered rows
    long = work(lambda x, at: x[at], bf16(1000, 4096), ((32,), "int32"))
    assert long.rows == 4 * 32  # 2 KB each
    elements = work(lambda x, at: x[at], bf16(1000), ((512,), "int32"))
    assert (elements.rows, elements.elements) == (0, 512)


def test_a_loop_counts_as_often_as_it_runs() -> None:
    def function(x: Any, w: Any) -> Any:
        return jax.lax.fori_loop(0, 7, lambda n, x: jax.lax.dynamic_index_in_dim(w, n, 0, False) @ x, x)

    found = work(function, bf16(128, 128), bf16(7, 128, 128))
    assert dict(found.columns) == {"bfloat16": 7 * 128}
    assert found.read >= 2 * 7 * 128 * 128


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("hrd,hcd->hrc", q, k, preferred_element_type=jnp.float32)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return jnp.einsum("hrc,hcd->hrd", weights.astype(q.dtype), v)


def test_attention_of_few_rows_waits_in_few_partitions_and_of_many_moves_its_scores() -> None:
    def of(rows: int) -> Work:
        return work(attention, bf16(8, rows, 128), bf16(8, 4096, 128), bf16(8, 4096, 128))

    few, many = of(2), of(4096)
    assert 4 * 2 * 4096 <= few.waited < 8 * 8 * 4096 and few.spilled == 0  # four heads at a time
    assert of(16).waited == few.waited  # in four times as many partitions as there are rows
    assert of(33).waited == pytest.approx(few.waited * 33 / 2 * 4 / 33)  # two heads of more than 32 rows
    assert many.waited == 0
    # scores, and their exponentials: each written once, and read by a reduction and by the next op
    assert many.spilled == 2 * 3 * 4 * 8 * 4096 * 4096
    assert of_work(few, chips.of("trn1")).waited > 0


def test_time_is_that_of_the_longest_part_and_the_launch() -> None:
    def function(x: Any, w: Any) -> Any:
        return x @ w.astype(x.dtype)

    chip = chips.of("trn1")
    few = work(lambda x, w: x @ w, bf16(1, 4096), bf16(4096, 4096))
    time = of_work(few, chip)
    assert time.bound == "memory"
    assert time.total == pytest.approx(15 + (few.read + few.written) / 227e3 + few.depth * 0.2)
    assert of_work(few, chip, queued=False).total == pytest.approx(time.total + 125)
    wide = of_work(work(function, ((1, 4096), "float32"), bf16(4096, 4096)), chip)
    assert wide.bound == "tensor"  # F32 takes five times as long
    assert wide.tensor == pytest.approx(time.tensor * 2.25 / 0.43)
    both = chips.of("trn2")
    assert of_work(few, both).tensor == pytest.approx(of_work(few, chips.of("trn2", 1)).tensor / 2)
    many = work(lambda x, w: x @ w, bf16(512, 4096), bf16(4096, 4096))
    time = of_work(many, chip)
    assert time.tensor == 0 and time.total > time.memory + time.products  # one after the other
    assert time.products == pytest.approx(32 * 32 * 512 * 0.43 / 1e3)
    assert sbuf_bytes(both) == 2 * 28 << 20


def test_short_rows_of_weights_take_longer_to_read() -> None:
    chip = chips.of("trn1")
    times = {}
    for row in (512, 2048, 4096):  # bytes
        found = work(lambda x, w: x @ w, bf16(1, 2048), bf16(2048, row // 2))
        assert set(found.narrow) == ({row} if row < 4096 else set())
        times[row] = of_work(found, chip).memory / (found.read + found.written)
    assert times[512] == pytest.approx(times[4096] * 262 / 160, rel=0.01)
    weights = ((1, 1, 2048, 256), "float16")  # rows of 512 bytes, as in ggml's kernels
    product = (((3,), (3,)), ((0, 1), (0, 1)))
    x = ((1, 1, 1, 256), "float16")
    direct = work(lambda x, w: jax.lax.dot_general(x, w, product), x, weights)
    converted = work(
        lambda x, w: jax.lax.dot_general(x, w.astype(x.dtype), product), ((1, 1, 1, 256), "float32"), weights
    )
    experts = work(
        lambda x, w, n: jax.lax.squeeze(jax.lax.dynamic_slice_in_dim(w, n, 1, 0), [0]) @ x,
        bf16(256),
        bf16(8, 2048, 256),
        ((), "int32"),
    )
    for found in (direct, converted, experts):
        assert found.narrow == {512: 2 * 2048 * 256}
    heads = work(lambda q, k: jnp.einsum("hd,hcd->hc", q, k), bf16(8, 128), bf16(8, 4096, 128))
    assert not heads.narrow  # several matrices
    assert times[4096] < times[2048] < times[512]


@pytest.mark.parametrize("expert", [False, True])
def test_what_a_function_computes_counts_as_if_it_were_written_where_it_is_called(expert: bool) -> None:
    def read(w: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(w, n, 1, 0)[0] if expert else w[3].astype(jnp.float32) * 2

    def product(read: Callable[..., jax.Array]) -> Work:
        return work(lambda x, w, n: read(w, n) @ x, bf16(256), bf16(8, 2048, 256), ((), "int32"))

    written, called = product(read), product(jax.jit(read, inline=False))
    assert called == written
    assert called.narrow == {512: 2 * 2048 * 256}
    assert called.read == pytest.approx(2 * 2048 * 256, rel=1e-3)


def test_each_instruction_on_the_longest_way_waits_for_the_one_before() -> None:
    def chain(n: int) -> Work:
        return work(lambda x: jax.lax.fori_loop(0, n, lambda _, x: jnp.exp(x), x), ((128, 8), "float32"))

    assert chain(9).depth - chain(3).depth == 6 * chain(2).depth - 6 * chain(1).depth > 0
    beside = work(lambda x, y: (jnp.exp(x), jnp.exp(y)), ((128, 8), "float32"), ((128, 8), "float32"))
    assert beside.depth == 1
    assert of_work(beside, chips.of("trn1")).latency == pytest.approx(0.2)


@pytest.mark.parametrize("n", [2, 8])
def test_a_scatter_of_few_rows_of_a_cache_takes_no_longer_than_a_slice_for_each(n: int) -> None:
    """For this reason kernels of SET_ROWS have a scatter (docs/reference/forecast.md); one slice of all rows is right
    only for consecutive rows.
    """
    cache, rows, at = ((4096, 1024), "float16"), ((n, 1024), "float16"), ((n,), "int32")

    def scattered(cache: Any, rows: Any, at: Any) -> Any:
        return cache.at[at].set(rows, mode="promise_in_bounds", unique_indices=True)

    def sliced(cache: Any, rows: Any, at: Any) -> Any:
        for i in range(n):
            cache = jax.lax.dynamic_update_slice(cache, rows[i : i + 1], (at[i], 0))
        return cache

    one, other = (work(function, cache, rows, at) for function in (scattered, sliced))
    assert one.rows == other.rows == n and one.written == other.written
    for target in ("trn1", "trn2"):
        assert of_work(one, chips.of(target)).total < of_work(other, chips.of(target)).total
