"""Derived manifests list exactly the ops that llama.cpp runs: compared with llama.cpp's own graph exports
(tests/data/graph-ops).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kernelgen import cli, manifest
from kernelgen.dispatch import coverage
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library
from kernelgen.model import graph_ops
from kernelgen.spec.kernel import KernelSpec

DATA = Path(__file__).parents[1] / "data" / "graph-ops"
LLAMA3 = Path(__file__).parents[2] / "manifests" / "llama3.yaml"
MANIFESTS = {"llama3-8b-f16": LLAMA3} | {path.stem: path for path in sorted(DATA.glob("*.yaml"))}


def specs(path: Path, library: Library) -> set[KernelSpec]:
    (request,) = manifest.load([path], Catalog([library]))
    return {kernel.spec for kernel in request.kernels}


@pytest.mark.parametrize("export", sorted(DATA.glob("*.txt")), ids=lambda path: path.name)
def test_a_models_own_export_is_covered(export: Path, library: Library) -> None:
    stem = export.name.removesuffix(".txt").removesuffix(".flash-attn").removesuffix(".no-flash-attn")
    result = coverage.compare(specs(MANIFESTS[stem], library), graph_ops.read(export))
    assert [f"{op.line}: {op.spec}" for op in result.missing] == []
    assert result.covered


@pytest.mark.parametrize("name", MANIFESTS)
def test_beyond_the_exports_there_are_only_other_lengths(name: str, library: Library) -> None:
    # An export has the full cache and equal numbers of tokens and outputs; a run also has others.
    graph = [op for path in DATA.glob(f"{name}.*.txt") for op in graph_ops.read(path)]
    exported = Counter(spec.op for spec, _, _ in graph)
    for spec in coverage.compare(specs(MANIFESTS[name], library), graph).beyond:
        assert spec.op in exported
        if spec.op not in ("flash_attn_ext", "soft_max", "mul_mat", "get_rows", "set_rows", "cpy", "cont"):
            assert "--n-seq-max" in MANIFESTS[name].read_text(encoding="utf-8"), spec  # graphs of one sequence of two


def test_a_word_of_op_params_that_nothing_is_known_of_is_a_node_without_a_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = next(line for line in (DATA / "llama-3.2-1b.flash-attn.txt").read_text().splitlines() if " Qcur-0" in line)
    words = line.split(" ")
    words[7 + 14] = "999"  # the fifteenth of the 16
    (tmp_path / "ops.txt").write_text(f"{line}\n{' '.join(words)}\n")
    assert cli.run(["model", str(tmp_path / "ops.txt"), "-o", str(tmp_path / "m.yaml")]) == 0
    assert "999, and has no meaning here" in "".join(capsys.readouterr())
