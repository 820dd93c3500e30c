"""FLOPs of kernels, compared with XLA's own cost analysis."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxlib import _hlo, _jax

from kernelgen import manifest
from kernelgen.cli import options
from kernelgen.emitters.catalog import Catalog
from kernelgen.hlo.flops import flops
from kernelgen.lowering import emission

ROOT = Path(__file__).parents[2]


def by_xla(hlo: bytes) -> tuple[float, float]:
    """Returns XLA's counts of operations and of transcendental operations."""
    found = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, _hlo.XlaComputation(hlo).get_hlo_module())
    return found.get("flops", 0.0), found.get("transcendentals", 0.0)


@pytest.mark.parametrize(("name", "every"), [("basic", 1), ("llama3", 7), ("models/llama_3_8b_q4_k_m", 29)])
def test_kernels_do_what_xla_counts(name: str, every: int) -> None:
    catalog = Catalog(options.libraries(()))
    (request, *_) = manifest.load([ROOT / "manifests" / f"{name}.yaml"], catalog)
    kernels = request.kernels[::every]
    assert len(kernels) >= 4
    for kernel in kernels:
        hlo = emission.emit(catalog.emitters(catalog.kernel(kernel.spec)), kernel.spec).hlo
        found = flops(hlo)
        transcendental = found.pop("transcendental", 0)
        assert (found.total(), transcendental) == pytest.approx(by_xla(hlo), rel=0.01, abs=1), kernel.spec.id


def lowered(function: object, *shapes: jax.ShapeDtypeStruct) -> bytes:
    return jax.jit(function).lower(*shapes).compiler_ir("hlo").as_serialized_hlo_module_proto()


def test_products_are_counted_by_dtype_and_a_loop_as_often_as_it_runs() -> None:
    matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def function(x: jax.Array) -> jax.Array:
        y = jax.lax.fori_loop(0, 5, lambda _, y: y @ y, x)
        return (y.astype(jnp.bfloat16) @ y.astype(jnp.bfloat16)).astype(jnp.float32)

    hlo = lowered(function, matrix)
    found = flops(hlo)
    assert (found["f32"], found["bf16"]) == (5 * 2 * 8**3, 2 * 8**3)
