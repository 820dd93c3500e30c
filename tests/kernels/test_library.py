"""The built-in kernels as a whole: what is registered is computed, in every type it is registered for."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from harness import LIBRARY, check, spec
from reference import EXAMPLES, REFERENCES

from kernelgen.ggml import ops, shapes
from kernelgen.plan import TensorDesc

SCAN = LIBRARY.scan()


def combinations(op: str) -> list[tuple[str, ...]]:
    """Returns types of the inputs: each that is registered for an input at least once, the others at their first."""
    found: dict[tuple[str, ...], None] = {}
    for row in SCAN[op].types:
        if not row:
            found[()] = None
        firsts = [column[0] for column in row]
        for i, column in enumerate(row):
            for t in column:
                found[(*firsts[:i], t, *firsts[i + 1 :])] = None
    return list(found)


def test_every_op_that_a_manifest_can_name_has_an_emitter() -> None:
    assert sorted(SCAN) == sorted(ops.OPS)


def test_every_emitter_has_a_reference_an_example_and_types() -> None:
    assert sorted(set(SCAN) - set(REFERENCES)) == []
    assert sorted(set(SCAN) - set(EXAMPLES)) == []
    assert sorted(op for op, registration in SCAN.items() if not registration.types) == []


@pytest.mark.parametrize("op, types", [(op, types) for op in SCAN for types in combinations(op)])
def test_types(op: str, types: tuple[str, ...]) -> None:
    """The emitter agrees with the reference in the types it is registered for, and ggml's own rules allow them."""
    example = EXAMPLES[op]
    if "f64" in types:
        pytest.skip("Neuron devices have no such type")
    inputs = [ne and f"{ne}/{t}" for ne, t in zip(example.inputs, types, strict=False)]
    descriptions = [TensorDesc.parse(t) if t else None for t in inputs]
    known = ops.OPS[op]
    params = known.with_defaults(example.params)
    if example.output is None:
        # Where there is no rule, or the example breaks it, the first input's: the check below tells which.
        output = str(shapes.result(op, descriptions, params) or descriptions[0])
    else:
        output = f"{example.output}/{types[0] if example.dtype == 'same' else example.dtype}"
    rng = np.random.default_rng(1)
    given = {f"src{i}": make(rng, descriptions[i].shape) for i, make in example.values.items()}
    kernel = spec(op, inputs, output, alias=known.alias, **example.params)
    assert shapes.check(op, kernel.inputs, kernel.output, dict(kernel.params), kernel.alias) == []
    # A step of the result's own type may round the other way.
    floor = {"f16": 1e-6, "bf16": 1e-4}.get(kernel.output.dtype, 0.0)
    check(kernel, max(example.limit, floor), **given)


def test_every_reference_is_used() -> None:
    """A reference without a test of its own would see one shape only."""
    text = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py") if p.name != "test_library.py")
    assert [op for op in REFERENCES if not re.search(rf'"{op}"', text)] == []
