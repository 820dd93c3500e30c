"""The manifests in manifests/models are what `kernelgen model` writes for these models; `bazel run //tools:published` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import ROOT, specs
from kernelgen.model.exporter import Exporter
from published import FOLDER, FTYPES, MODELS, manifest_name
from published.__main__ import derive


# Of each model one type, to be quick; the command's --check looks at all.
@pytest.mark.parametrize(("number", "model"), list(enumerate(MODELS)), ids=list(MODELS))
def test_a_ready_manifest_is_what_the_command_writes(
    number: int, model: str, exporter: Exporter, tmp_path: Path
) -> None:
    ftype = FTYPES[number % len(FTYPES)]
    name = f"{manifest_name(model, ftype)}.yaml"
    arguments = [f"--exporter={exporter.program}", f"--llama-cpp={exporter.libraries}"]
    said = derive(model, ftype, tmp_path / name, arguments)
    assert (tmp_path / name).read_text() == (ROOT / FOLDER / name).read_text()
    assert "no kernel: " not in said


def test_there_is_a_manifest_for_each_model_and_type() -> None:
    names = {manifest_name(model, ftype) for model in MODELS for ftype in FTYPES}
    assert {path.stem for path in (ROOT / FOLDER).glob("*.yaml")} == names


def test_layers_with_a_window_have_a_cache_of_their_own() -> None:
    kernels = specs(ROOT / FOLDER / "gemma_3_4b_f16.yaml")
    caches = {s.inputs[2].ne[1] for s in kernels if s.op == "set_rows" and s.inputs[2] and s.inputs[2].ne[0] > 1}
    # 4096 cells, and the window of 1024 with a call of 512 tokens
    assert caches == {4096, 1536}
