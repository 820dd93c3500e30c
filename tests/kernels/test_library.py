"""The built-in kernels as a whole: every op has an emitter, which is tested in each of its registered types."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from kernel_harness import LIBRARY, check, combinations, emit, example_kernel
from reference import EXAMPLES

from kernelgen.ggml import ops, shapes
from kernelgen.hlo.lint import lint
from kernelgen.targets import TARGETS

# test_collective.py tests the op of several devices, which XLA does not compile for one.
SCAN = {op: registration for op, registration in LIBRARY.scan().items() if op != "all_reduce"}


def test_every_op_that_a_manifest_can_name_has_an_emitter() -> None:
    assert sorted(LIBRARY.scan()) == sorted(ops.OPS)


def test_every_emitter_has_an_example_and_types() -> None:
    assert sorted(set(SCAN) - set(EXAMPLES)) == []
    assert sorted(op for op, registration in SCAN.items() if not registration.types) == []


@pytest.mark.parametrize(
    "op, types",
    [
        # The first combination of each op, and every fourth after it.
        pytest.param(op, types, marks=[pytest.mark.long] if number % 4 else [])
        for op in SCAN
        for number, types in enumerate(combinations(op))
    ],
)
def test_types(op: str, types: tuple[str, ...]) -> None:
    """The emitter agrees with the reference in its registered types, ggml's own rules allow them, and no target refuses
    the kernel.
    """
    example = EXAMPLES[op]
    kernel = example_kernel(op, types)
    # In the same test, because another shard would emit the kernel again.
    module = emit(kernel)
    assert {target.name: found for target in TARGETS.values() if (found := lint(module, target))} == {}
    rng = np.random.default_rng(1)
    given = {f"src{i}": make(rng, kernel.inputs[i].shape) for i, make in example.values.items()}
    assert shapes.check(op, kernel.inputs, kernel.output, dict(kernel.params), kernel.alias) == []
    # One step of the result's type may round the other way.
    floor = {"f16": 1e-6, "bf16": 1e-4}.get(kernel.output.dtype, 0.0)
    check(kernel, max(example.limit, floor), **given)


def test_every_op_has_a_test_of_its_own() -> None:
    """With its example alone, an op would be tested with a single shape."""
    text = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py") if p.name != "test_library.py")
    assert [op for op in EXAMPLES if not re.search(rf'"{op}"', text)] == []
