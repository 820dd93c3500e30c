"""The table of the chips: each figure for each target and LNC, its mark, and its source."""

from __future__ import annotations

import pytest

from kernelgen.dispatch import chips
from kernelgen.targets import TARGETS


def test_every_target_has_every_figure_with_its_source_for_each_lnc() -> None:
    found = chips.builtin()
    assert set(found) == {(target.name, lnc) for target in TARGETS.values() for lnc in target.lnc_choices}
    for chip in found.values():
        assert set(chip.figures) == set(chips.FIGURES)
        assert all(figure.mark in chips.MARKS and figure.source for figure in chip.figures.values())
    gpsimd = {target: chips.of(target).by("clock_ghz", "gpsimd") for target in TARGETS}
    assert gpsimd == {"trn1": 1.4, "trn1n": 1.4, "inf2": 1.4, "trn2": 1.2, "trn3": 1.2}
    assert chips.of("trn2") is found["trn2", 2] and chips.of("trn2", 1) is found["trn2", 1]


@pytest.mark.parametrize("target", ["trn1", "inf2", "trn2", "trn3"])
def test_no_rate_is_above_what_the_chip_is_promised_to_reach(target: str) -> None:
    """AWS's HBM bandwidth per physical core, in 10⁹ bytes per second, and its rate of BF16 products, in 10¹² operations
    per second.
    """
    gb_per_s, tflops = {2: (440, 92), 3: (389, 84), 4: (658, 84)}[TARGETS[target].neuron_core]
    for lnc in TARGETS[target].lnc_choices:
        chip = chips.of(target, lnc)
        assert chip.number("gb_per_s") < chip.at("dma_gb_per_s", 1 << 20) < gb_per_s * lnc
        assert 2 * 128 * 128 / chip.by("tensor_ns_per_column", "bfloat16") / 1e3 < tflops
        for name in ("queued", "waited"):
            assert 0 < chip.by("launch_us", name) < 1000
        rows = chip.pairs("rows_ms")
        weights = 3 * 4096 * 14336
        assert all(2 * n * weights / ms / 1e9 < tflops * lnc for n, ms in rows)
        assert rows[0][1] == pytest.approx(2 * weights / chip.number("gb_per_s") / 1e6, rel=0.01)


def test_each_figure_has_its_form() -> None:
    for chip in chips.builtin().values():
        for name, figure in chip.figures.items():
            form, value = chips.FIGURES[name][1], figure.value
            if isinstance(form, tuple):
                assert value.keys() == set(form)
            elif form is list:
                sizes = [size for size, _ in value]
                assert sizes and sizes == sorted(set(sizes))
            else:
                assert isinstance(value, int | float) and value >= 0


def test_figures_by_size_are_read_between_and_beside_the_sizes() -> None:
    chip = chips.of("trn1")
    assert [chip.at("dma_gb_per_s", size) for size in (1, 512, 4096, 8192, 1 << 20)] == [160, 160, 262, 262, 262]
    assert chip.at("dma_gb_per_s", 1448) == pytest.approx(211, rel=0.01)
    assert chip.at("collectives_us", 8) == 2450
