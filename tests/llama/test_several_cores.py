"""A sample of the calls of the suite `several_cores`: several cores compute what one computes."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest
from calls import KINDS, SPLIT_MODELS, Model, ModelCalls, Sizes

FEW = Sizes(n_tokens=(1, 8), n_ctx=256, rounds=2, text=3, kinds=("shared", "shift", "state"))
MORE = Sizes(n_tokens=(1, 16), n_ctx=512, prompts=(1, 45), depths=(0, 250), long=45, rounds=6, text=6)
LONG = Sizes(n_tokens=(128, 512), n_ctx=1280, kinds=("long",))


@pytest.mark.long
def test_calls_over_two_cores_are_those_of_one(programs: harness.Programs, tmp_path: Path) -> None:
    """Several sequences, a context shift and saved states; each step is one launch."""
    result = ModelCalls(programs, SPLIT_MODELS[0], tmp_path, FEW).compare(2, "step")
    print(result.row())
    assert result.ok
    assert set(result.errors) == set(FEW.kinds)
    assert result.ran.launches > 0


@pytest.mark.long
def test_a_prompt_longer_than_a_call_needs_one_bundle(programs: harness.Programs, tmp_path: Path) -> None:
    """1,100 tokens in three calls; the first two have no output."""
    result = ModelCalls(programs, SPLIT_MODELS[0], tmp_path, LONG).compare(2, "step")
    print(result.row())
    assert result.ok
    assert result.ran.reductions == 0
    assert result.ran.launches == 3 * 2  # on both cores


@pytest.mark.long
@pytest.mark.parametrize("model", SPLIT_MODELS, ids=lambda model: model.name)
def test_models_over_several_cores(programs: harness.Programs, model: Model, tmp_path: Path) -> None:
    one = ModelCalls(programs, model, tmp_path, MORE)
    for cores, fuse in ((2, "parts"), (2, "step"), (4, "parts+sums"), (8, "step")):
        result = one.compare(cores, fuse)
        print(result.row())
        assert result.ok
        assert set(result.errors) == set(KINDS)
        assert result.ran.launches > 0
