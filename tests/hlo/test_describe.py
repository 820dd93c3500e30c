"""Descriptions of HLO for people, and running HLO."""

from __future__ import annotations

import numpy as np
import pytest
from toys import canonical, raw, spec

from kernelgen import lowering
from kernelgen.hlo import execute
from kernelgen.hlo.describe import describe


def test_a_kernel_is_described_by_its_tensors() -> None:
    data = lowering.emit(
        spec(["(4,2,1,1)/f16", None, "(4,2,1,1)/f32"], "(4,2,1,1)/f32", alias=2), lambda a, b, c: a + c
    )
    assert str(describe(data)).splitlines() == [
        f"HLO module kernel, {len(data)} bytes, 1 computation(s)",
        "  in   input0: f16[1,1,2,4]",
        "  in   input2.must_alias_input: f32[1,1,2,4]",
        "  out  output0: f32[1,1,2,4]",
        "       output0 shares the memory of input2.must_alias_input",
        "  4 instructions: 2 parameter, 1 add, 1 convert",
    ]


def test_a_module_from_elsewhere_is_described_too() -> None:
    d = describe(raw(lambda x, y: (x, y[0]), ((2, 3), "float32"), ((4,), "int32")))
    assert [shape for _, shape in d.parameters] == ["f32[2,3]", "s32[4]"]
    assert d.results == (("output0", "f32[2,3]"), ("output1", "s32[]"))


def test_arguments_that_do_not_fit_are_refused() -> None:
    data = canonical(lambda x: x + 1, ((2, 3), "float32"))
    with pytest.raises(ValueError, match=r"input0 is float32\[2, 3\], not float32\[3, 2\]"):
        execute.run(data, [np.zeros((3, 2), np.float32)])
    with pytest.raises(ValueError, match="1 parameters, 2 arrays"):
        execute.run(data, [np.zeros((2, 3), np.float32)] * 2)
    np.testing.assert_array_equal(execute.run(data, {"input0": np.zeros((2, 3), np.float32)})[0], np.ones((2, 3)))


def test_hlo_that_xla_does_not_compile_is_an_error() -> None:
    from kernelgen.hlo import proto

    module = proto.parse(canonical(lambda x: x + 1, ((2,), "float32")))
    module.computations[0].instructions[-1].opcode = "no-such-opcode"
    with pytest.raises(ValueError, match="XLA does not compile the HLO"):
        execute.compile_for_cpu(proto.serialize(module))
