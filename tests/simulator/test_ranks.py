"""Several ranks compute one program together, as libnrt's documentation of collectives has it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_programs

from kernelgen.compilers.settings import CompileConfig
from kernelgen.neff import container

HERE = Path(__file__).parent
RANKS = 4

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(library: Path, environment: dict[str, str], neuron_target: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that has ranks run a program's HLO in a process; it returns what each command says, and standard error."""
    folder = tmp_path_factory.mktemp("ranks")

    def run(hlo: bytes, *commands: str, ranks: int = RANKS, **variables: str) -> tuple[list[Any], str]:
        file = folder / "program.neff"
        file.write_bytes(container.write_simulated(hlo, CompileConfig.make(neuron_target).flags(), "simulator 1"))
        machine = {"NEURON_RT_NUM_CORES": str(RANKS), "PYTHONPATH": environment["NEURON_SIMULATOR_PATH"]}
        made = subprocess.run(
            [sys.executable, HERE / "rank_programs.py", library, file, str(ranks), *commands],
            capture_output=True,
            text=True,
            check=False,
            env=environment | machine | variables,
            timeout=120,
        )
        assert made.returncode == 0, made.stderr
        return json.loads(made.stdout), made.stderr

    return run


def summed(groups: str) -> list[list[float]]:
    """Returns what `all_reduce` computes on each rank."""
    out: list[list[float]] = [[]] * RANKS
    for group in groups.split(";"):
        members = [int(rank) for rank in group.split(",")]
        total = np.zeros(64, np.float32)
        for rank in members:
            total += 2 * rank_programs.values(rank, 64)
        for rank in members:
            out[rank] = (total + 1).tolist()
    return out


@pytest.mark.parametrize("groups", ["0,1,2,3", "0,1;2,3", "2,0;3,1", "0;1;2;3"])
def test_ranks_of_a_group_get_their_sum(run: Run, groups: str) -> None:
    (first, second), _ = run(rank_programs.hlo_of(rank_programs.all_reduce(groups)), "execute", "execute")
    assert first == second == summed(groups)
