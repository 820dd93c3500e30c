"""The cost of nodes that the CPU computes on tensors in device memory: the bytes moved to the host and back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import Run

WEIGHT = 32 * 16 * 2
"""Bytes of the weight that `recalled-weights` reads ten times after each of six writes."""


def test_of_a_large_tensor_only_the_rows_that_a_node_uses_move(run: Run, kernels: Path) -> None:
    result = run("stranded-gather", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device", GGML_NEURON_LOG="1")
    assert result.said == {"stranded-gather": "ok"}, result.log
    (moved,) = re.findall(r"nodes on the CPU moved ([\d.]+) MiB to the host or back, at most", result.log)
    assert float(moved) <= 0.2  # the tensor has 17.6 MiB


def test_of_a_cache_that_the_scheduler_copies_only_the_cells_in_use_move(run: Run, kernels: Path) -> None:
    """Of 8 MiB, 256 cells of 256 bytes move: once as keys, once as transposed values. The log names the tensor that
    moved most.
    """
    result = run("copied-views", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device", GGML_NEURON_LOG="1")
    assert result.said == {"copied-views": "ok"}, result.log
    said = re.findall(
        r"([\d.]+) MiB of other tensors were read from the device, at most ([\d.]+) MiB, of '", result.log
    )
    assert said == [("0.125", "0.062")], result.log


@pytest.mark.parametrize(("mib", "reads"), [(None, 2), ("1", 2), ("0", 10)])
def test_a_weight_that_is_read_again_stays_in_host_memory(run: Run, kernels: Path, mib: str | None, reads: int) -> None:
    result = run(
        "recalled-weights",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_LOG="1",
        GGML_NEURON_FALLBACK_MEMORY=mib,
    )
    assert result.said == {"recalled-weights": "ok"}, result.log
    (read,) = re.findall(r"([\d.]+) MiB of weights were read from the device, at most [\d.]+ MiB, of '", result.log)
    assert float(read) == pytest.approx(6 * reads * WEIGHT / 2**20, abs=0.0006)


def test_an_invalid_limit(run: Run, kernels: Path) -> None:
    result = run(
        "recalled-weights",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_FALLBACK_MEMORY="much",
    )
    assert result.said == {"recalled-weights": "ok"}, result.log
    assert "GGML_NEURON_FALLBACK_MEMORY is a number of MiB, not 'much'" in result.log
