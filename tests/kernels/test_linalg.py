"""Systems of linear equations."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, spec
from reference import triangles


@pytest.mark.parametrize("n, k, batch", [(1, 1, "1,1"), (10, 3, "4,3"), (64, 1, "1,2"), (17, 33, "2,1")])
def test_solve_tri(n: int, k: int, batch: str) -> None:
    kernel = spec("solve_tri", [f"({n},{n},{batch})/f32", f"({k},{n},{batch})/f32"], f"({k},{n},{batch})/f32")
    check(kernel, 1e-10, src0=triangles(np.random.default_rng(2), kernel.inputs[0].shape))
