"""llama-server with drafts, an adapter and sampling on a simulated NeuronCore: six chats at once get the CPU's answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import harness
import pytest
import server_chats
import whole_programs
from server_chats import N_CHATS, Chats
from server_client import Answer

ROOT = Path(__file__).absolute().parents[2]
CASES = {case.name: case for case in server_chats.CASES}
LOG = """\
ggml-neuron: 900 ops ran on NeuronCores: 900 ADD
ggml-neuron: 900 ops ran in groups, in 90 launches
ggml-neuron: 0 ops ran on the CPU instead of a NeuronCore
"""
ANSWERS = [Answer((i, i + 1), 2, drafted=8, accepted=i) for i in range(N_CHATS)]
RIGHT = Chats(ANSWERS, LOG, 1)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_six_chats_have_the_cpu_s_answers(
    programs: harness.Programs, there: Callable[[Path, str], Path], tmp_path: Path, name: str
) -> None:
    """The server has four slots, and one client disconnects. Only the embedding runs on the CPU, and drafted tokens are
    accepted.
    """
    there(ROOT / "tools/llama_cpp/llama_server/llama-server", whole_programs.SERVER_VARIABLE)
    server_chats.write_random(tmp_path)
    row, wrong = server_chats.run(programs, CASES[name], tmp_path)
    print(server_chats.HEAD, row, sep="\n")
    assert not wrong


@pytest.mark.parametrize(
    ("device", "what"),
    [
        (RIGHT, []),
        (replace(RIGHT, answers=[Answer((7,), 1), *ANSWERS[1:]]), ["'Hello!': (7,), on the CPU (0, 1)"]),
        (replace(RIGHT, answers=[*ANSWERS[:-1], Answer((7,), 1)]), []),
        (replace(RIGHT, answers=[*ANSWERS[:-1], Answer((), 0)]), ["the client that goes away reads nothing"]),
        (replace(RIGHT, answers=[replace(a, accepted=0) for a in ANSWERS]), ["of 48 drafted tokens none is accepted"]),
        (
            replace(
                RIGHT, log=LOG.replace(" 0 ops ran on the CPU instead of a NeuronCore", "3 ops ran on the CPU: 3 ADD")
            ),
            ["on the CPU: {'ADD': 3}"],
        ),
        (replace(RIGHT, log=LOG[: LOG.index("ggml-neuron: 0 ops ran")]), ["on the CPU: {}"]),
        (replace(RIGHT, log=f"{LOG}1 on the CPU because no kernel computes them"), ["an op has no kernel"]),
        (replace(RIGHT, log=LOG.replace("in 90 launches", "in 0 launches")), ["no group ran"]),
    ],
)
def test_wrong_results_are_reported(device: Chats, what: list[str]) -> None:
    """The client that disconnects may have read more or less."""
    found = server_chats.check(CASES["mtp"], device, RIGHT, exact=True)
    assert found == [f"mtp: {one}" for one in what]
