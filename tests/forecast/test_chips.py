"""The table of the chips: each figure for each target and LNC, its mark, and its source."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import msgspec
import pytest

from kernelgen.dispatch import chips
from kernelgen.targets import TARGETS

TEXT = resources.files("kernelgen.dispatch").joinpath("chips.json").read_text(encoding="utf-8")


def test_every_target_has_every_figure_with_its_source_for_each_lnc() -> None:
    found = chips.builtin()
    assert set(found) == {(target.name, lnc) for target in TARGETS.values() for lnc in target.lnc_choices}
    for chip in found.values():
        assert set(chip.figures) == set(chips.Figures.__struct_fields__)
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


def test_a_target_without_measurements_has_the_figures_of_the_first_as_guesses() -> None:
    table = json.loads(TEXT)
    for entries in table.values():
        for one in entries:
            one["targets"] = [target for target in one["targets"] if target != "trn3"]
    found = chips.read(json.dumps({name: [e for e in entries if e["targets"]] for name, entries in table.items()}))
    assert found["trn3", 2].number("gb_per_s") == found["trn1", 1].number("gb_per_s")
    assert {figure.mark for figure in found["trn3", 2].figures.values()} == {"guessed"}


def test_figures_by_size_are_read_between_and_beside_the_sizes() -> None:
    chip = chips.of("trn1")
    assert [chip.at("dma_gb_per_s", size) for size in (1, 512, 4096, 8192, 1 << 20)] == [160, 160, 262, 262, 262]
    assert chip.at("dma_gb_per_s", 1448) == pytest.approx(211, rel=0.01)
    assert chip.at("collectives_us", 8) == 2450


def test_each_figure_by_name_or_by_size_has_all_names_and_ascending_sizes() -> None:
    for chip in chips.builtin().values():
        for name, figure in chip.figures.items():
            if isinstance(figure.value, dict):
                assert figure.value.keys() == chips.of("trn1").figures[name].value.keys()
            elif isinstance(figure.value, list):
                sizes = [size for size, _ in figure.value]
                assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("nki_call_us"), "nki_call_us"),
        (lambda t: t["gb_per_s"][0].pop("source"), "source"),
        (lambda t: t["gb_per_s"][0].update(value="227"), "gb_per_s"),
        (lambda t: t["gb_per_s"].append(copy.deepcopy(t["gb_per_s"][0])), "gb_per_s: trn1 with LNC 1 has two"),
        (lambda t: t["gb_per_s"][0]["targets"].remove("inf2"), "inf2 with LNC 1 lacks gb_per_s"),
    ],
)
def test_a_table_of_another_form_is_refused(change: Callable[[Any], Any], said: str) -> None:
    table = json.loads(TEXT)
    change(table)
    with pytest.raises((ValueError, msgspec.ValidationError), match=said):
        chips.read(json.dumps(table))
