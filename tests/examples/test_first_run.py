"""README's first command with the real model: pip gets it, and llama-server answers on a simulated NeuronCore."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import chat
import pytest

ROOT = Path(__file__).absolute().parents[2]
PROGRAMS = {
    "LLAMA_SERVER": "tools/llama_cpp/llama_server/llama-server",
    "GGML_NEURON_PLUGIN": "backend/ggml-neuron/plugin/libggml-neuron.so",
    "NEURON_KERNELGEN_EXPORTER": "backend/exporter/server_exporter/export-graphs",
    "GGML_NEURON_LIBNRT": "backend/simulator/libnrt.so.1",
}


@pytest.fixture(scope="module")
def ask(
    there: Callable[[Path, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[str, str]]:
    """Returns a function that asks the model and returns stdout and stderr; the first call starts with an empty cache."""
    # NEFFs may come from this folder, as for a user, but not from other caches.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NEURON_KERNELGEN_")}
    environment |= {variable: str(there(ROOT / built, variable)) for variable, built in PROGRAMS.items()}
    environment["NEURON_KERNELGEN_CACHE"] = str(tmp_path_factory.mktemp("cache"))

    def ask(question: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, chat.__file__, "--prompt", question, "--max-tokens", "24"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return ask


@pytest.mark.long
def test_from_nothing_to_an_answer_and_again(ask: Callable[[str], tuple[str, str]]) -> None:
    answer, said = ask("What is the capital of France?")
    assert "Paris" in answer
    device, on_cpu = re.findall(r"(\d+) nodes ran on (?:NeuronCores|the CPU)", said)
    assert int(device) > 1000 and int(on_cpu) == 0
    again, said = ask("What is the capital of France?")
    assert again == answer
    assert re.search(r"^  \d+ built \(0 compiled, \d+ up to date\), 0 failed", said, re.MULTILINE)
