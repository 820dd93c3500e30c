"""A sample of test-llama-archs: architectures with recorded kernels, with derived ones, and over two cores."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import architectures
import harness
import pytest
from architectures import SURVEYS

from kernelgen.cli.list import architectures as listed
from kernelgen.model import exporter

RECORDED = ("gemma2", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "qwen2", "qwen3")))
DERIVED = ("gemma3", "mamba", "qwen3next", "gpt-oss")
"""A sliding window, a recurrent model, a recurrent model with a window and experts, and attention sinks."""
WHOLE = "qwen2"
"""An architecture that runs entirely on the device with the kernels that are derived by default."""
LAYERED = "phi3"
"""An architecture whose layers share a weight."""
SPLIT = ("llama", "qwen3", "gemma3", "qwen35moe", "apertus", "mamba")
"""Dense and with experts; one head of keys; a window; a recurrent one with experts; one without a file; one that
llama.cpp does not split.
"""


def page(name: str) -> str:
    return (harness.DOCS / "results" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECORDED)
def test_an_architecture_agrees_with_the_cpu(programs: harness.Programs, name: str) -> None:
    """Also after saving and loading. `kernelgen list` has the ops that it needs."""
    result = architectures.run_architecture(programs, SURVEYS["models"], name)
    print(architectures.line(name, result))
    assert result.passed, result.failure
    assert all(row.roundtrip == "OK" for row in result.rows), result.rows
    assert set(result.cpu) <= harness.ON_THE_CPU
    assert result.needs == sorted(op for op, names in listed().items() if name in names)


@pytest.mark.parametrize("name", DERIVED)
def test_no_kernel_that_a_run_requests_is_missing(programs: harness.Programs, name: str) -> None:
    results = architectures.compare_derived(programs, name)
    assert results
    for model, result in results.items():
        assert not result.failure and not result.missing and not result.refused, result
        assert result.derived >= result.recorded > 40
        assert f"\n{harness.row(model, *result.cells)}\n" in page("model-support.md")


def test_default_kernels_compute_calls_of_other_numbers_of_tokens(programs: harness.Programs) -> None:
    result = architectures.run_architecture(programs, SURVEYS["default_kernels"], WHOLE)
    assert result.passed, result.failure
    assert (result.lacking, result.reasons) == (0, {})
    assert result.ran.padded > 100
    assert architectures.known(page("default-kernels.md"))[WHOLE] is False


def test_one_kernel_computes_layers_of_an_architecture(programs: harness.Programs, tmp_path: Path) -> None:
    """The page of layers has all architectures, and how they fold."""
    rows = {row[0]: row for row in re.findall(r"^\| (\S+) \| yes \| (.*) \|$", page("layers.md"), re.MULTILINE)}
    assert rows.keys() == architectures.known(page("default-kernels.md")).keys()
    program = exporter.find(harness.exporter(), programs.llama_cpp)
    for file in architectures.save(programs, LAYERED, tmp_path):
        folded = architectures.folded(file, tmp_path, program)
        assert folded.why == "" and folded.most > 1 and folded.launches < 0.1 * folded.nodes
        assert f" | {folded.nodes} → {folded.launches} ({folded.kernels}) |" in rows[LAYERED][1]


@pytest.mark.long
def test_layers_compute_a_model_in_memory_and_its_file(programs: harness.Programs) -> None:
    """In memory each layer has its own factors of rope; in the file all layers share them."""
    result = architectures.run_architecture(programs, SURVEYS["layers"], LAYERED)
    assert result.passed, result.failure
    assert [row.roundtrip for row in result.rows] == ["OK"]
    assert result.ran.grouped == result.ran.device.total() > 0


@pytest.mark.long
@pytest.mark.parametrize("name", SPLIT)
def test_architectures_run_on_kernels_of_their_slices(programs: harness.Programs, name: str) -> None:
    result = architectures.run_architecture(programs, SURVEYS["split_architectures"], name)
    print(architectures.line(name, result))
    assert not result.failure
    assert bool(result.left_out) == (name == "mamba")
    assert result.left_out or result.ran.reductions > 0
    assert set(result.cpu) <= harness.ON_THE_CPU


@pytest.mark.long
def test_sums_are_in_kernels_where_slices_differ(programs: harness.Programs) -> None:
    """The columns of a feed-forward network, 384, split unevenly over two cores: kernels contain attention and the sums
    beside it.
    """
    survey = replace(SURVEYS["split_architectures"], fuse="step")
    result = architectures.run_architecture(programs, survey, "gpt2")
    assert result.passed, result.failure
    assert result.ran.launches > 0 and result.ran.reductions == 0


def test_the_page_of_two_cores_says_that_all_pass() -> None:
    """The page has the sample's rows, without an op on the CPU."""
    lines = page("split-architectures.md").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][1:]
    assert {row[0] for row in rows} >= set(SPLIT) - {"mamba"}
    assert all(row[7] == "" and float(row[2]) <= architectures.LIMIT for row in rows), rows


def test_what_is_wrong_in_a_row_is_read() -> None:
    lines = [
        "|     Model arch.|Device|Config|   NMSE vs. CPU|Roundtrip|",
        "|            clip|Neuron| Dense|\x1b[1;33mSKIP\x1b[0m           |     \x1b[1;33mSKIP\x1b[0m|",
        "|           llama|Neuron| Dense|\x1b[1;32mOK\x1b[0m (1.05e-13)|       \x1b[1;32mOK\x1b[0m|",
        "|           llama|Neuron|   MoE|\x1b[1;31mFAIL\x1b[0m (3.00e-01)|     \x1b[1;32mOK\x1b[0m|",
        "|             bad|Neuron| Dense|\x1b[1;31mFAIL\x1b[0m (toggle) (1.00e-13)|     \x1b[1;32mOK\x1b[0m|",
    ]
    rows = architectures.read_rows("\n".join(lines))
    assert rows["llama"][0] == architectures.Row(1.05e-13, "OK", "OK", "Neuron", "Dense")
    assert {name: [row.ok for row in of_name] for name, of_name in rows.items()} == {
        "llama": [True, False],
        "bad": [False],
    }


def test_a_graph_whose_only_device_nodes_have_no_elements(programs: harness.Programs, tmp_path: Path) -> None:
    """Mamba gathers the states of no sequence; no other node has a kernel here."""
    environment = programs.environment(kernels=harness.odd_kernel(tmp_path / "odd-kernel"), buffers="host")
    words = ("-a", "^mamba$", "-b", harness.DEVICE, "-s", "1")
    done = programs.run("test-llama-archs", *words, environment=environment, preload=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(architectures.read_rows(done.stdout)) == {"mamba"}
