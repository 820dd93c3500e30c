"""llama-server with drafts, an adapter and sampling on a simulated NeuronCore: six chats at once get the CPU's answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import harness
import llama_programs
import pytest
import server_chats
from program_cases import SERVER_CASES, ServerCase


@pytest.mark.long
@pytest.mark.parametrize("case", SERVER_CASES, ids=lambda case: case.name)
def test_six_chats_have_the_cpu_s_answers(
    programs: harness.Programs, there: Callable[[Path, str], Path], tmp_path: Path, case: ServerCase
) -> None:
    """The server has four slots, and one client disconnects. Only the embedding runs on the CPU, and drafted tokens are
    accepted.
    """
    there(llama_programs.server_program(), "LLAMA_SERVER")
    server_chats.write_random(tmp_path)
    row, wrong = server_chats.run(programs, case, tmp_path)
    print(server_chats.HEAD, row, sep="\n")
    assert not wrong
