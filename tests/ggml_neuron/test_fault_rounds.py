"""Programs end with right results, or an error that names the failure, when the simulated device fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_faults import Round, RoundsBench, add_sums, make_bench, play
from programs import Programs


@pytest.fixture(scope="module")
def bench(programs: Programs, kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> RoundsBench:
    return make_bench(programs, tmp_path_factory.mktemp("faults"), kernels)


@pytest.fixture(scope="module")
def sums_bench(bench: RoundsBench) -> RoundsBench:
    return add_sums(bench)


@pytest.mark.long
@pytest.mark.parametrize(
    ("one", "ending"),
    [
        (Round("step freed", "rank@3", "device"), "an error"),
        (Round("parts+sums freed", "absent@9", "device"), "an error"),
        (Round("parts+sums freed", "lost@20", "device"), "an error"),
        (Round("step freed", "straggler/2", "device"), "right"),
        (Round("step", "wedged", "device"), "right"),
        (Round("parts+sums", "rank@11", "device"), "ended"),
    ],
)
def test_endings_of_programs_that_sum_up(sums_bench: RoundsBench, one: Round, ending: str) -> None:
    assert play(sums_bench, one) == ending


@pytest.mark.parametrize("what", ["scenarios", "model"])
@pytest.mark.parametrize("buffers", ["device", pytest.param("host", marks=pytest.mark.long)])
@pytest.mark.parametrize("n", [2, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (1, *range(4, 200)))])
def test_every_nth_allocation_fails(bench: RoundsBench, what: str, buffers: str, n: int) -> None:
    play(bench, Round(what, f"memory/{n}", buffers))


@pytest.mark.parametrize(
    ("one", "ending"),
    [
        (Round("scenarios", "execute@1", "device"), "an error"),
        (Round("model", "execute/30", "host"), "ended"),  # in the prompt, whose batch then is not decoded
        (Round("scenarios", "lost@30", "device"), "an error"),
        (Round("parts", "execute@90", "device"), "ended"),  # on one of two cores, in the prompt
        (Round("parts", "lost@45", "device"), "ended"),
        pytest.param(Round("parts", "load/1", "device"), "right", marks=pytest.mark.long),
        # Right if the helper ends before it reads the execution: the next helper runs it.
        (Round("scenarios", "kill@1", "device"), "an error or right"),
        pytest.param(Round("scenarios", "load/1", "device"), "an error", marks=pytest.mark.long),
        (Round("model", "load/1", "device"), "right"),  # the CPU computes everything
        (Round("scenarios", "memory@100000", "device"), "right"),
    ],
)
def test_endings(bench: RoundsBench, one: Round, ending: str) -> None:
    assert play(bench, one) in ending.split(" or ")
