"""Systems of linear equations."""

from __future__ import annotations

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, example, out, reference


def triangles(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Returns well-conditioned lower triangular matrices; the elements above the diagonal are not 0, since nothing
    reads them.
    """
    x = rng.uniform(-1, 1, shape).astype(np.float32)
    diagonal = np.arange(shape[3])
    x[..., diagonal, diagonal] = rng.uniform(1, 2, shape[:3])
    return x


@reference("solve_tri")
def solve_tri(spec: KernelSpec, a: Array, b: Array) -> Array:
    x = np.zeros_like(b)
    for i in range(a.shape[2]):
        part = np.zeros_like(b[..., 0, :])
        for t in range(i):
            part += a[..., i, t, None] * x[..., t, :]
        x[..., i, :] = (b[..., i, :] - part) / a[..., i, i, None]
    return out(spec, x)


example("solve_tri", inputs=("(9,9,3,2)", "(4,9,3,2)"), values={0: triangles})
