"""With tensors in host memory, a NeuronCore keeps copies of weights: the copies are right, and few bytes are copied."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import Run


def copied(log: str) -> tuple[float, float]:
    """Returns the MiB of host memory copied to NeuronCores for ops, and the MiB copied as weights that stay there."""
    (found,) = re.findall(r"([\d.]+) MiB of host memory were copied to NeuronCores, and ([\d.]+) MiB of weights", log)
    return float(found[0]), float(found[1])


def test_a_weight_is_copied_once(run: Run, kernels: Path) -> None:
    result = run("kept-weights", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="host", GGML_NEURON_LOG="1")
    assert result.said == {"kept-weights": "ok"}, result.log
    for_ops, kept = copied(result.log)
    assert kept == pytest.approx(32 * 16 * 2 / 2**20, abs=0.0005)
    assert for_ops == pytest.approx(50 * 32 * 2 * 4 / 2**20, abs=0.0005)  # the other source


def test_what_writes_to_a_weight_is_seen(run: Run, kernels: Path) -> None:
    result = run("written-weights", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="host")
    assert result.said == {"written-weights": "ok"}, result.log


def test_without_memory_for_it_a_weight_is_copied_each_time(run: Run, kernels: Path) -> None:
    result = run(
        "kept-weights",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="host",
        GGML_NEURON_LOG="1",
        NEURON_SIMULATOR_FAULT="memory@1",
    )
    assert result.said == {"kept-weights": "ok"}, result.log
    for_ops, kept = copied(result.log)
    assert kept == 0
    assert for_ops == pytest.approx(50 * (32 * 2 * 4 + 32 * 16 * 2) / 2**20, abs=0.0005)
