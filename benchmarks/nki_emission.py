"""What emitting NKI kernels costs: seconds and lines of HLO, beside the same computation in JAX.

    ./bazelw run //benchmarks:nki_emission

Each line is one process's first emission of a kernel: recording it, rolling its loops, and lowering it through JAX to HLO, in CPU
seconds. The ratio is to the same computation in JAX, in the same run. Exit status 1 where a kernel takes more than a second or
has more than 1,000 lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernelgen.languages.nki import kernel, loading

with loading.interpreter():
    import nki.isa as nisa
    import nki.language as nl

SECONDS, LINES = 1.0, 1000


def product(stationary: Any, moving: Any) -> Any:
    """`stationary.T @ moving` in tiles of [128, 128] and [128, 512], a DMA for each tile of each product."""
    rows, columns = stationary.shape[1], moving.shape[1]
    result = nl.ndarray((rows, columns), stationary.dtype, buffer=nl.shared_hbm)
    for m in nl.affine_range(rows // 128):
        for n in nl.affine_range(columns // 512):
            sums = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
            for k in nl.affine_range(stationary.shape[0] // 128):
                a = nl.ndarray((128, 128), stationary.dtype, buffer=nl.sbuf)
                b = nl.ndarray((128, 512), moving.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=a, src=stationary[nl.ds(k * 128, 128), nl.ds(m * 128, 128)])
                nisa.dma_copy(dst=b, src=moving[nl.ds(k * 128, 128), nl.ds(n * 512, 512)])
                nisa.nc_matmul(dst=sums, stationary=a, moving=b)
            done = nl.ndarray((128, 512), stationary.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=done, src=sums)
            nisa.dma_copy(dst=result[nl.ds(m * 128, 128), nl.ds(n * 512, 512)], src=done)
    return result


def emitted(function: Callable[..., Any], inputs: list[Any]) -> tuple[float, int]:
    """Returns the CPU seconds that it takes to lower a function of arrays, and the lines of its HLO."""
    start = time.process_time()
    lowered = jax.jit(function).lower(*inputs).compiler_ir("hlo")
    seconds = time.process_time() - start
    assert lowered is not None
    return seconds, len(lowered.as_hlo_text().splitlines())


def main() -> int:
    jax.jit(lambda x: x + 1).lower(jnp.zeros(3))  # JAX's own start
    square = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 2
    cases = [
        (
            "matmul 4096 x 4096 x 4096 bf16",
            lambda a, b: kernel.record(product, [a, b], {}, older=False)(a, b),
            lambda a, b: a.T @ b,
            square,
        )
    ]
    good = True
    print(f"{'kernel':40} {'seconds':>8} {'lines':>6} {'JAX: seconds':>13} {'lines':>6} {'ratio':>6}")
    for name, in_nki, in_jax, inputs in cases:
        base, base_lines = emitted(in_jax, inputs)
        seconds, lines = emitted(in_nki, inputs)
        good = good and seconds <= SECONDS and lines <= LINES
        print(f"{name:40} {seconds:8.2f} {lines:6} {base:13.3f} {base_lines:6} {seconds / base:6.0f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
