"""Compares products with weights in other layouts with products with ggml's layout, in CPU ms on the simulator.

    ./bazelw run //benchmarks:weight_layouts

For each type, it measures MUL_MAT of a matrix of 1024 x 1024 with 1 row and with 32 rows, as the simulator computes it:
CPU time, the least of several turns that alternate between the two layouts. The rows also have the bytes of each
kernel's HLO. The figures show XLA's code on a CPU; neuronx-cc's result is not known.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

from harness import as_parameter, bind, emit, in_layout, nmse, random_values, spec

import figures
from kernelgen.ggml import weight_layouts
from kernelgen.hlo import execute
from kernelgen.simulator import products, scales

TYPES = ("q8_0", "q4_K", "q6_K", "q4_0", "f16", "bf16")
SIZE = 1024
ROWS = (1, 32)
TURNS = 15


@dataclass
class Product:
    """A kernel with its inputs.

    Attributes:
        hlo_bytes: the bytes of its module.
        executable: the executable that the simulator runs.
        arrays: its inputs.
        best_ms: the least CPU time of a turn so far.
    """

    hlo_bytes: int
    executable: execute.Executable
    arrays: list[np.ndarray]
    best_ms: float = float("inf")

    def turn(self) -> None:
        start = time.process_time()
        self.executable.run(self.arrays)
        self.best_ms = min(self.best_ms, (time.process_time() - start) * 1e3)


def product(weights: str, rows: int) -> Product:
    """Returns the product of `rows` rows and a matrix of a type, which may include a layout."""
    kernel = spec("mul_mat", [f"({SIZE},{SIZE},1,1)/{weights}", f"({SIZE},{rows},1,1)/f32"], f"({SIZE},{rows},1,1)/f32")
    hlo = emit(kernel)
    executable = execute.compile_for_cpu(products.rewrite(scales.rewrite(hlo)))
    random = np.random.default_rng(0)
    arrays = []
    for t, (_, dtype, shape) in zip(kernel.inputs, executable.parameters, strict=True):
        assert t is not None
        arrays.append(as_parameter(in_layout(*bind(t, random_values(t, random), random), t), dtype, shape))
    return Product(len(hlo), executable, arrays)


def measure(quick: bool) -> Iterator[figures.Figure]:
    for dtype in TYPES[:1] if quick else TYPES:
        for layout, rows in itertools.product(weight_layouts.of_type(dtype), ROWS):
            plain, rearranged = product(dtype, rows), product(f"{dtype}:{layout}", rows)
            (a,), (b,) = (one.executable.run(one.arrays) for one in (plain, rearranged))
            if not nmse(b, a) < (2e-3 if layout == weight_layouts.F8_TILES else 2e-5):
                raise SystemExit(f"{dtype}: the products are not the same")
            for _ in range(2 if quick else TURNS):
                plain.turn()
                rearranged.turn()
            sizes = f"{rearranged.hlo_bytes} bytes of HLO, not {plain.hlo_bytes}"
            yield figures.Figure(
                f"{dtype} as {layout}, {rows} row{'s' * (rows > 1)}; {sizes}",
                rearranged.best_ms,
                "ms",
                peer=figures.Peer("as ggml has it", plain.best_ms),
                direction="peer / value",
            )


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
