"""A sample of the checks of `bazel run //tools/llama_cpp:several_cores`."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import harness
import pytest
import several_cores
from several_cores import MODELS, Compared, ModelCalls, Sizes

LLAMA = MODELS[0]

FEW = Sizes(n_tokens=(1, 8), n_ctx=256, rounds=2, text=3, kinds=("shared", "shift", "state"))
MORE = Sizes(n_tokens=(1, 16), n_ctx=512, prompts=(1, 45), depths=(0, 250), long=45, rounds=6, text=6)
LONG = Sizes(n_tokens=(128, 512), n_ctx=1280, kinds=("long",))


@pytest.mark.long
def test_calls_over_two_cores_are_those_of_one(programs: harness.Programs, tmp_path: Path) -> None:
    """Several sequences, a context shift and saved states; each step is one launch."""
    found = ModelCalls(programs, LLAMA, tmp_path, FEW).compare(2, "step")
    print(found.row())
    assert found.ok, found.failure
    assert set(found.errors) == set(FEW.kinds)
    assert found.launches > 0


@pytest.mark.long
def test_a_prompt_longer_than_a_call_needs_one_bundle(programs: harness.Programs, tmp_path: Path) -> None:
    """1,100 tokens in three calls; the first two have no output."""
    found = ModelCalls(programs, LLAMA, tmp_path, LONG).compare(2, "step")
    print(found.row())
    assert found.ok, found.failure
    assert found.reductions == 0
    assert not found.elsewhere
    assert found.launches == 3 * 2  # on both cores


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_over_several_cores(programs: harness.Programs, model: several_cores.SplitModel, tmp_path: Path) -> None:
    one = ModelCalls(programs, model, tmp_path, MORE)
    for cores, fuse in ((2, "parts"), (2, "step"), (4, "parts+sums"), (8, "step")):
        found = one.compare(cores, fuse)
        print(found.row())
        assert found.ok, found.failure
        assert set(found.errors) == set(several_cores.KINDS)
        assert found.launches > 0


def test_what_misses_a_limit_is_not_ok() -> None:
    good = Compared("a", 2, "step", errors={"shift": 1e-7, "greedy": 1e-7}, rows=1)
    assert good.ok
    assert "| 1.00 |" not in good.row()
    beside = dataclasses.replace(good, errors={"greedy": 3e-5}, by_ggml={"greedy": 6e-5})
    assert "| 6e-05 | 0.50 |" in beside.row()
    assert not beside.ok, "it stays a miss"
    changes: tuple[dict[str, object], ...] = (
        {"errors": {"greedy": 2e-5}},
        {"errors": {"greedy": math.nan}},
        {"cpu": 2e-3},
        {"cpu": math.nan},
        {"texts": 1},
        {"touched": 1},
        {"rows": 0},
        {"elsewhere": Counter(ROPE=1)},
        {"elsewhere": Counter(FLASH_ATTN_EXT=1)},
        {"failure": "calls ended with status 1"},
    )
    for change in changes:
        bad = Compared(**{field.name: getattr(good, field.name) for field in dataclasses.fields(good)} | change)
        assert not bad.ok
        assert "LIMIT MISSED" in bad.row()
