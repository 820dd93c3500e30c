"""A NEFF's name depends on its inputs alone, and a miss can be explained part by part."""

from __future__ import annotations

import hashlib

import pytest

from kernelgen.cache import NeffKey
from kernelgen.cache.key import Difference, differences, nearest
from kernelgen.compilers.settings import CompileConfig

TRN1 = CompileConfig.make("trn1").flags()
KEY = NeffKey.make(b"hlo", "neuronx-cc 2", TRN1)


def test_a_name_depends_on_the_hlo_the_compiler_the_flags_and_the_target() -> None:
    others = [
        NeffKey.make(b"HLO", "neuronx-cc 2", TRN1),
        NeffKey.make(b"hlo", "neuronx-cc 3", TRN1),
        NeffKey.make(b"hlo", "neuronx-cc 2", CompileConfig.make("inf2").flags()),
        NeffKey.make(b"hlo", "neuronx-cc 2", CompileConfig.make("trn1", optlevel=1).flags()),
        NeffKey.make(b"hlo", "neuronx-cc 2", CompileConfig.make("trn1", extra_flags=("--x",)).flags()),
    ]
    assert len({KEY.name, *(key.name for key in others)}) == 6
    assert KEY.hlo_sha256 == hashlib.sha256(b"hlo").hexdigest()
    assert NeffKey.from_json(KEY.to_json()) == KEY


def test_a_key_whose_target_is_not_the_flags_is_refused() -> None:
    with pytest.raises(ValueError, match="its target is not the flags'"):
        NeffKey.from_json(KEY.to_json() | {"target": "trn2"})


def test_a_name_is_the_same_on_every_machine_and_in_every_version() -> None:
    # If this digest changes, no existing cache can be used: raise FORMAT with it.
    assert KEY.name == "b28271c14f2820663e482fe550a6634a823e654a3c264dd06ca6932d704e04d3"


def test_differences_are_named_part_by_part_and_flag_by_flag() -> None:
    other = NeffKey.make(
        b"other", "neuronx-cc 3", CompileConfig.make("inf2", optlevel=3, extra_flags=("--fast", "--tune=2")).flags()
    )
    assert differences(KEY, KEY) == []
    assert differences(KEY, other) == [
        Difference("HLO", KEY.hlo_sha256, other.hlo_sha256),
        Difference("compiler", "neuronx-cc 2", "neuronx-cc 3"),
        Difference("target", "trn1", "inf2"),
        Difference("--optlevel", "2", "3"),
        Difference("--fast", None, ""),
        Difference("--tune", None, "2"),
    ]


def test_another_order_of_flags_is_a_difference_too() -> None:
    one, two = (
        NeffKey.make(b"hlo", "c", CompileConfig.make("trn1", extra_flags=f).flags())
        for f in (("-a", "-b"), ("-b", "-a"))
    )
    assert one.name != two.name
    assert [d.part for d in differences(one, two)] == ["flags"]


def test_the_nearest_entry_is_of_the_same_kernel_or_hlo_and_differs_least() -> None:
    far = NeffKey.make(b"old", "neuronx-cc 1", CompileConfig.make("inf2").flags())
    near = NeffKey.make(b"old", "neuronx-cc 2", TRN1)
    same_hlo = NeffKey.make(b"hlo", "neuronx-cc 1", TRN1)
    stranger = NeffKey.make(b"x", "neuronx-cc 2", TRN1)
    assert nearest(KEY, "k", [("other", stranger)]) is None
    assert nearest(KEY, "k", [("k", far), ("other", stranger)]) == ("k", far)
    assert nearest(KEY, "k", [("k", far), ("k", near), ("other", stranger)]) == ("k", near)
    assert nearest(KEY, "k", [("k", far), ("z", same_hlo)]) == ("z", same_hlo)
    assert nearest(KEY, "k", [("k", near), ("z", same_hlo)]) == ("k", near)
