"""A change rebuilds what depends on it and nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest

import incremental_bazel
import scratch
import unchanged_hlo


def built(way: str, *arguments: str, long: bool = False) -> Any:
    """Returns the parameters of a test for one way to build; tests with Bazel share servers."""
    marks = [pytest.mark.together("changes")] if way == "Bazel" else []
    return pytest.param(way, *arguments, marks=[*marks, pytest.mark.long] if long else marks)


@pytest.mark.together("changes")
def test_every_change_runs_exactly_the_actions_it_must(checkouts: scratch.Checkouts) -> None:
    rows = list(incremental_bazel.run(checkouts, incremental_bazel.SMALL))
    counts = {r.change: (r.emits, r.compiles) for r in rows}
    assert counts == {r.change: (r.want_emits, r.want_compiles) for r in rows}
    assert len(rows) == 8
    # A count that is 0 because nothing was planned would prove nothing.
    cold, rope = rows[0], next(r for r in rows if "rope" in r.change)
    assert cold.want_emits > 20
    assert 0 < rope.want_emits < cold.want_emits


# The benchmark makes each change by itself, and also runs the other ways with the simulator; they find its NEFFs as
# they find neuronx-cc's.
@pytest.mark.parametrize(
    ("way", "compiler"),
    [
        built("Bazel", "simulator", long=True),
        *(built(way, "neuronx-cc", long=True) for way in unchanged_hlo.WAYS),
    ],
)
def test_what_leaves_hlo_as_it_was_compiles_nothing(way: str, compiler: str, checkouts: scratch.Checkouts) -> None:
    rows = list(unchanged_hlo.run(way, compiler, checkouts, at_once=True))
    counts = {r.change: (r.counts.compiles, r.counts.runs) for r in rows}
    runs = [r.want_runs if compiler == "neuronx-cc" else None for r in rows]
    assert counts == {r.change: (r.want_compiles, n) for r, n in zip(rows, runs, strict=True)}
    assert counts["cold build"][0] == unchanged_hlo.KERNELS
    changed = [r for r in rows if r.counts.emits and not r.counts.compiles]
    # A change that reaches no step proves nothing: changes of kernelgen and of its environment emit kernels again.
    assert len(changed) >= 2 or way == "kernelgen build"


@pytest.mark.parametrize("way", [built(way, long=True) for way in unchanged_hlo.WAYS])
def test_a_new_lint_rule_refuses_what_was_compiled_and_compiles_nothing(way: str, checkouts: scratch.Checkouts) -> None:
    with unchanged_hlo.prepared(way, "neuronx-cc", checkouts) as (builds, record):
        builds.build()
        runs = record.read_text()
        unchanged_hlo.add_lint_rule(builds.tree, 'lambda m, target: [(None, "it is refused")]')
        with pytest.raises(scratch.BuildFailed) as caught:
            builds.build()
        kernels = set(
            re.findall(r"error: kernel (\S+) for trn1: \[kernelgen/added\] module: it is refused", str(caught.value))
        )
        assert len(kernels) == unchanged_hlo.KERNELS
        compiled = [line for line in record.read_text()[len(runs) :].splitlines() if '"compile"' in line]
        assert compiled == []
