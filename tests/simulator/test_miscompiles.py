"""The fault `race`, rows that write to one place. `test_doctor_device` tests the faults that a check of a device finds."""

from __future__ import annotations

import numpy as np
import pytest

from kernelgen import lowering
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import execute, proto
from kernelgen.simulator import miscompiles
from kernelgen.spec.kernel import KernelSpec


@pytest.fixture(scope="module")
def hlo() -> bytes:
    """Returns a program that writes four rows of eight elements to a table of 16 rows."""
    x, rows, table = (TensorDesc.parse(t) for t in ("(8,4,1,1)/f32", "(4,1,1,1)/i64", "(8,16,1,1)/f16"))
    function = load_function(*Catalog([builtin_library()]).find("set_rows"))
    module = proto.parse(lowering.emit(KernelSpec.make("set_rows", [x, rows, table], table), function))
    module.ClearField("input_output_alias")
    return proto.serialize(module)


@pytest.mark.parametrize(
    ("rows", "equal", "lost"),
    [([3, 5, 9, 0], False, False), ([3, 5, 5, 0], True, False), ([3, 5, 5, 0], False, True)],
    ids=["places", "equal", "race"],
)
def test_rows_that_write_other_values_to_one_place_lose_all(
    hlo: bytes, rows: list[int], equal: bool, lost: bool
) -> None:
    x = np.arange(1, 33, dtype=np.float32).reshape(1, 1, 4, 8)
    if equal:
        x[0, 0, 2] = x[0, 0, 1]
    (_, _, shape) = execute.parameters(hlo)[1]
    numbers = np.zeros(shape, np.int32)
    numbers.reshape(-1, 2)[:, 0] = rows
    table = np.full((1, 1, 16, 8), 7, np.float16)
    (found,) = execute.run(miscompiles.rewrite(hlo, ["race"]), [x, numbers, table])
    expected = table.copy()
    expected[0, 0, rows] = x[0, 0]
    assert np.array_equal(found, np.zeros_like(table) if lost else expected)
