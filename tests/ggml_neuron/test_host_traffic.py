"""The bytes and transfers that a call moves between host and device, as the backend's log reports them and as libnrt
counts them.
"""

from __future__ import annotations

import re
from pathlib import Path

from programs import Benched, Programs, Run, build, llama_bench
from random_llama import Size

CELLS = 256
"""Cells of the cache that the first tokens of a context attend to: llama.cpp rounds the number up to this."""

ALIGNMENT = 512
"""Bytes; the backend aligns tensors to this. A write of two tensors also moves the gap between them."""


def last_call(log: str) -> tuple[int, ...]:
    """Returns the last call's bytes to NeuronCores, writes, bytes from NeuronCores and reads."""
    line = r"the last of \d+ calls moved (\d+) bytes to NeuronCores in (\d+) writes, and (\d+) bytes from them in (\d+) reads"
    (found,) = re.findall(line, log)
    return tuple(map(int, found))


def test_a_call_moves_what_libnrt_counts(run: Run, kernels: Path, noop: dict[str, str | Path]) -> None:
    """Two calls each clear a buffer of 2,560 bytes and write inputs of 1,280. One clear comes before them, and the
    result is read once.
    """
    variables = noop | {"GGML_NEURON_KERNEL_DIR": kernels, "GGML_NEURON_BUFFERS": "device", "GGML_NEURON_LOG": "1"}
    result = run("add", NOOP_NRT_COUNT="1", **variables)
    (counted,) = re.findall(r"libnrt: (\d+) bytes in (\d+) writes, (\d+) bytes in (\d+) reads", result.log)
    assert tuple(map(int, counted)) == (2560 + 2 * (2560 + 1280), 1 + 2 * 3, 1024, 1)
    assert last_call(result.log) == (2560 + 1280, 3, 1024, 1)


def test_a_token_takes_its_inputs_and_gives_its_logits(programs: Programs, benched: Benched) -> None:
    """Neither a mask nor a cache is read back. With a kernel for each op, inputs lie in three places."""
    result = llama_bench(programs, benched.model, GGML_NEURON_KERNEL_DIR=benched.kernels, GGML_NEURON_LOG="1")
    size = Size()
    position, row, output = 4, 8, 4  # a row of each cache; the indices of the logits that are read
    inputs = (size.n_embd * 4, position, row, row, CELLS * 2)
    moved = sum(-(-n // ALIGNMENT) * ALIGNMENT for n in inputs) + output
    assert last_call(result.stderr) == (moved, 3, size.n_vocab * 4, 1), result.stderr
    assert "read from the device" not in result.stderr


def test_a_token_is_a_number_where_its_table_is_on_the_device(
    programs: Programs, benched: Benched, tmp_path: Path
) -> None:
    """llama.cpp's --override-tensor puts the table on the device: the rows of the embedding do not pass through the host."""
    table = ("-ot", r"token_embd\.weight=NEURON0")
    recorded = tmp_path / "table.graphs"
    llama_bench(programs, benched.model, *table, GGML_NEURON_KERNEL_DIR=benched.kernels, GGML_NEURON_RECORD=recorded)
    build(recorded, tmp_path / "kernels")
    kernels = f"{benched.kernels}:{tmp_path / 'kernels'}"
    result = llama_bench(programs, benched.model, *table, GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="1")
    token, position, row, output = 4, 4, 8, 4
    moved = sum(-(-n // ALIGNMENT) * ALIGNMENT for n in (token, position, row, row, CELLS * 2)) + output
    to, _, logits, reads = last_call(result.stderr)
    assert (to, logits, reads) == (moved, Size().n_vocab * 4, 1), result.stderr
    assert " 0 ops ran on the CPU instead of a NeuronCore" in result.stderr
    assert "read from the device" not in result.stderr


def test_inputs_that_lie_side_by_side_are_one_write(run: Run, kernels: Path) -> None:
    """The device gets the values of the write, also if the program overwrites the inputs before they are used."""
    variables = {"GGML_NEURON_KERNEL_DIR": kernels, "GGML_NEURON_BUFFERS": "device", "GGML_NEURON_LOG": "1"}
    result = run("inputs-at-once", **variables)
    assert result.said == {"inputs-at-once": "ok"}, result.log
    assert last_call(result.log) == (1024 + 256, 1, 1024, 1), result.log
    result = run("inputs-in-parts", **variables)
    assert result.said == {"inputs-in-parts": "ok"}, result.log
