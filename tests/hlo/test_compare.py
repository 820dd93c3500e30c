"""The comparison names the first instruction that differs between two modules, and the difference."""

from __future__ import annotations

from toys import canonical

from kernelgen.hlo.compare import first_difference


def test_the_first_difference() -> None:
    shape = ((4,), "float32")
    one = canonical(lambda x: x * 2 + 1, shape)
    assert first_difference(one, one) == "they are equal"
    assert "(differs in literal)" in first_difference(one, canonical(lambda x: x * 3 + 1, shape))
    assert "add(" in first_difference(one, canonical(lambda x: x * 2 - 1, shape))
    assert "subtract(" in first_difference(one, canonical(lambda x: x * 2 - 1, shape))
    assert "f32[5]" in first_difference(one, canonical(lambda x: x * 2 + 1, ((5,), "float32")))
    longer = canonical(lambda x: x * 2 + 1 - 5 * x, shape)
    assert first_difference(one, longer) == first_difference(longer, one)
    assert "instruction 7 of computation kernel" in first_difference(one, longer)
