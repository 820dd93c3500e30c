"""Estimates of programs: the count of products, and others' published compiles, which can't be repeated here."""

from __future__ import annotations

import elsewhere
import jax.numpy as jnp
import pytest
from jax import lax
from toys import canonical, raw

from kernelgen.hlo import estimate as model
from kernelgen.hlo.estimate import ENGINES, MAX_DESCRIPTORS, estimate
from kernelgen.targets import MAX_INSTRUCTIONS

F32 = "float32"


def test_a_product_is_tiles_of_128_by_128_by_512() -> None:
    # 2 tiles of the summed axis, 2 of the stationary and 4 of the moving operand: 16 products, and 4 loads of weights,
    # each for 4 products. x is contiguous along the summed axis, so it is transposed: 4 tiles, 2 instructions each.
    found = estimate(raw(lambda x, y: x @ y, ((256, 256), F32), ((256, 2048), F32)), "trn1")
    assert found.instructions["PE"] == pytest.approx(1 + model.OVERHEAD * (16 + 4 + 8), abs=1)
    natural = estimate(raw(lambda x, y: x.T @ y, ((256, 256), F32), ((256, 2048), F32)), "trn1")
    assert tuple(natural.instructions) == ENGINES
    batched = estimate(
        raw(lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), ((3, 256, 256), F32), ((3, 256, 2048), F32)), "trn1"
    )
    assert batched.instructions["PE"] - 1 == pytest.approx(3 * (found.instructions["PE"] - 1), abs=2)


def test_a_loop_is_unrolled() -> None:
    def looped(trips: int) -> bytes:
        def body(_: object, x: jnp.ndarray) -> jnp.ndarray:
            return jnp.sin(x) * 2

        return canonical(lambda x: lax.fori_loop(0, trips, body, x), ((128, 4000), F32))

    assert all(estimate(looped(n), "trn1").instructions["Activation"] == 1 + model.OVERHEAD * 10 * n for n in (5, 50))


def test_what_is_summed_lies_along_the_free_dimension() -> None:
    kept = estimate(raw(lambda x: jnp.sum(x, axis=0), ((14, 8400), F32)), "trn1")
    summed = estimate(raw(lambda x: jnp.sum(x, axis=1), ((14, 8400), F32)), "trn1")
    assert kept.instructions["DVE"] == 1 + 66 > summed.instructions["DVE"]


def test_cores_share_the_work() -> None:
    hlo = elsewhere.product(1024, 8192, 8192)
    one, two = estimate(hlo, "trn2", 1), estimate(hlo, "trn2")
    assert two.total == pytest.approx(one.total / 2, rel=0.01)
    assert two.code_bytes == pytest.approx(one.code_bytes, rel=0.01)
    assert one.code_bytes == 64 * one.total


def test_spills_take_memory_of_rings_and_transformers_spill_less() -> None:
    def twice(x: jnp.ndarray, y: jnp.ndarray) -> jnp.ndarray:
        return jnp.exp(x @ y) @ y

    hlo = raw(twice, ((4096, 4096), F32), ((4096, 4096), F32))
    found, few = estimate(hlo, "trn1"), estimate(hlo, "trn1", model_type="transformer")
    assert found.ring_bytes == 32 * 2 * (4096 * 4096 * 4 // model.RUN)
    assert few.ring_bytes == pytest.approx(found.ring_bytes / 20, abs=1)
    assert few.compile_memory_mb < found.compile_memory_mb
    assert few.instructions == found.instructions
    small = estimate(raw(twice, ((64, 64), F32), ((64, 64), F32)), "trn1")
    assert (small.ring_bytes, small.compile_memory_mb) == (0, 1024)


def test_an_update_in_place_is_not_a_spill_in_a_loop_or_outside() -> None:
    cache, row, at = ((4096, 1024), F32), ((64, 1024), F32), ((64,), "int32")

    def loop(cache: jnp.ndarray, row: jnp.ndarray, _: jnp.ndarray) -> jnp.ndarray:
        return lax.fori_loop(0, 32, lambda n, c: lax.dynamic_update_slice(c, row * 2, (n * 64, 0)), cache)

    def slices(cache: jnp.ndarray, row: jnp.ndarray, at: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
        written = lax.dynamic_update_slice(cache, row, (at[0], 0))
        return written, written[:64] @ row.T

    def scattered(cache: jnp.ndarray, row: jnp.ndarray, at: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
        written = cache.at[at].set(row, mode="promise_in_bounds")
        return written, written[:64] @ row.T

    whole = 4096 * 1024 * 4 // model.RUN
    for function, descriptors in ((loop, 32 * 64), (slices, 64), (scattered, 64)):
        found = estimate(canonical(function, cache, row, at), "trn1")
        assert found.ring_bytes == 0, function.__name__
        # the cache and the rows in, the cache out, and the rows that are written
        assert found.dma_descriptors == pytest.approx(2 * whole + 64 + descriptors, abs=16), function.__name__


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match="HloModuleProto"):
        estimate(b"nothing", "trn1")


def near(have: float, want: float) -> bool:
    return want / 1.5 <= have <= want * 1.5


def test_what_others_published() -> None:
    """Counts of neuronx-cc 2.23 (aws-neuron/nkipy, a NEFF), and of experts with 2.27 or a version near it."""
    product = estimate(elsewhere.product(128, 32768, 65536), "trn2")
    assert near(product.total, 29_795) and near(product.instructions["PE"], 21_269)
    # "18,505,833" with all 2,880 units; with 384 and 192 it compiled and did not load, with 96 it ran.
    experts = {units: estimate(elsewhere.gathered_experts(units), "trn1") for units in (2880, 384, 192, 96)}
    assert near(experts[2880].total, 18_505_833) and experts[2880].total > MAX_INSTRUCTIONS
    assert [experts[n].total > MAX_INSTRUCTIONS for n in (384, 192, 96)] == [False] * 3
    assert [experts[n].dma_descriptors > MAX_DESCRIPTORS for n in (384, 192, 96)] == [True, True, False]
