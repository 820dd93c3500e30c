"""Kernels of the samplers that llama.cpp runs on a device (`--backend-sampling`)."""

from __future__ import annotations

from pathlib import Path

import group_kernels
import headers
import pytest

from kernelgen import manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.hlo.lint import lint
from kernelgen.model.exporter import Exporter
from kernelgen.spec.kernel import GraphSpec, KernelSpec
from kernelgen.targets import TARGETS

from .conftest import Derive, run_model

N_VOCAB = headers.SMALL["n_vocab"]
DEFAULT = "top_k=40,top_p=0.95,min_p=0.05,temperature=0.8,dist"
SAMPLED = (
    "pad",
    "top_k",
    "get_rows",
    "argsort",
    "soft_max",
    "cumsum",
    "argmax",
    "step",
    "log",
    "sum",
    "clamp",
    "scale",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return headers.write(headers.qwen3(), tmp_path / "model.gguf")


def graph_specs(path: Path) -> list[GraphSpec]:
    (request,) = manifest.load([path], Catalog([builtin_library()]))
    return [kernel.spec for kernel in request.kernels if isinstance(kernel.spec, GraphSpec)]


@pytest.mark.parametrize("fuse", ["layer", "step"])
def test_sampling_is_in_the_last_group(fuse: str, model: Path, exporter: Exporter, tmp_path: Path) -> None:
    """A step of generation has as many launches as without sampling, and ends with a token."""
    output = tmp_path / "m.yaml"
    options = ("--n-ctx", 256, "--n-tokens", 1, "--n-ubatch", 1, "--fuse", fuse)
    counts = {}
    for chain in ("none", "default"):
        assert run_model(exporter, model, output, *options, "--samplers", chain) == 0
        groups = graph_specs(output)
        counts[chain] = len(groups)
        tokens = [group for group in groups if group.nodes[-1].kernel.output.dtype == "i32"]
        assert len(tokens) == (chain == "default")
        for group in tokens:
            assert group.nodes[-1].kernel.output.ne == (1, 1, 1, 1)
            assert set(SAMPLED) <= {node.kernel.op for node in group.nodes}
            hlo = group_kernels.emit(group)  # the group sorts without HLO's sort, so no target refuses it
            assert {target.name: found for target in TARGETS.values() if (found := lint(hlo, target))} == {}
    assert counts["none"] == counts["default"]
    assert f"--samplers {DEFAULT}" in " ".join(output.read_text().split("\n\n")[0].replace("#", "").split())


def test_samplers_have_what_llama_cpp_asks_a_device_for(derive: Derive, model: Path) -> None:
    """Candidates carry their numbers from the first sampler on: those of the vocabulary, and those that top-k keeps."""
    options = ("--n-ctx", 256, "--n-tokens", 1, "--n-ubatch", 1, "--samplers")
    without = derive(model, *options, "none")
    found = derive(model, *options, "top_k=5,dist") - without

    def numbered(specs: set[KernelSpec]) -> list[int]:
        rows = [s.inputs[0] for s in specs if s.op == "get_rows"]
        return sorted(x.ne[1] for x in rows if x is not None and x.dtype == "i32")

    assert numbered(found) == [5, N_VOCAB]
    assert [spec.output.ne[0] for spec in found if spec.op == "top_k"] == [5]
    assert not [spec for spec in found if spec.op in ("argsort", "argmax", "sort")]


def test_each_sequence_has_a_token_sampled(derive: Derive, model: Path) -> None:
    """For any --n-tokens there are calls of one token of each sequence; sampling has one row more than outputs."""
    options = ("--n-ctx", 512, "--n-tokens", "1,8", "--n-ubatch", 8, "--n-seq-max", 3, "--kv-unified")
    found = derive(model, *options, "--samplers", "greedy")
    assert sorted(spec.output.ne[1] for spec in found if spec.op == "pad") == [2, 3, 4]
    assert [spec.output.ne for spec in found if spec.op == "argmax"] == [(1, 1, 1, 1)]


def test_chains_have_any_numbers(derive: Derive, model: Path) -> None:
    """Except for the numbers that are sizes of tensors."""
    options = ("--n-ctx", 256, "--n-tokens", 1, "--n-ubatch", 1, "--samplers")
    one = derive(model, *options, "penalties=16:1.3:0.1:0.1,top_k=5,top_p=0.9,min_p=0.1,temperature=0.5:0.1:0.9,dist")
    other = derive(model, *options, "penalties=16:2:-0.5:0.2,top_k=5,top_p=0.3,min_p=0.5,temperature=2:0.3:1.5,dist")
    assert one == other
    assert {spec.params for spec in one if spec.op == "scale"} == {(("b", "any"), ("s", "any"))}
    assert one != derive(
        model, *options, "penalties=16:1.3:0.1:0.1,top_k=6,top_p=0.9,min_p=0.1,temperature=0.5:0.1:0.9,dist"
    )
