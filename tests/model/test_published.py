"""The ready manifests equal the output of `kernelgen model` for these models; `bazel run //tools:published` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelgen.model.exporter import Exporter
from published import FOLDER, FTYPES, MANIFESTS, READY, Manifest
from published.__main__ import derive, main

from .conftest import ROOT, specs

# One type of each model, and of most models only in a long run; the command's --check compares all.
OTHERS = [m for m in MANIFESTS if m.path.parent != FOLDER]
LOOKED_AT = [m for m in MANIFESTS if m.path.parent == FOLDER and m.ftype == FTYPES[READY.index(m.model) % len(FTYPES)]]


@pytest.mark.parametrize(
    "manifest",
    [
        *OTHERS,
        *LOOKED_AT[:1],
        *(pytest.param(m, marks=pytest.mark.long) for m in LOOKED_AT[1:]),
    ],
    ids=lambda manifest: manifest.path.stem,
)
def test_a_ready_manifest_is_what_the_command_writes(manifest: Manifest, exporter: Exporter, tmp_path: Path) -> None:
    arguments = [f"--exporter={exporter.program}", f"--llama-cpp={exporter.libraries}"]
    said = derive(manifest, tmp_path / "fresh.yaml", arguments)
    assert (tmp_path / "fresh.yaml").read_text() == (ROOT / manifest.path).read_text()
    assert "no kernel: " not in said


def test_a_published_models_file_is_written_without_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "llama3.gguf"
    assert main(["--header", "Llama-3-8B", str(file)]) == 0
    written = file.read_bytes()
    assert written.startswith(b"GGUF") and b"Llama-3-8B" in written and b"blk.31.ffn_down.weight" in written
    assert len(written) < 100_000  # of 16 GB
    with pytest.raises(SystemExit):
        main(["--header", "Llama-9", str(file)])
    assert "the published models are Llama-3-8B, " in capsys.readouterr().err


def test_there_is_a_manifest_for_each_model_and_type() -> None:
    assert {m.path.name for m in MANIFESTS if m.path.parent == FOLDER} == {
        p.name for p in (ROOT / FOLDER).glob("*.yaml")
    }
    assert len(LOOKED_AT) == len(READY)


def test_layers_with_a_window_have_a_cache_of_their_own() -> None:
    kernels = specs(ROOT / FOLDER / "gemma_3_4b_f16.yaml")
    caches = {s.inputs[2].ne[1] for s in kernels if s.op == "set_rows" and s.inputs[2] and s.inputs[2].ne[0] > 1}
    # cells in use; a layer with a window of 1024 has at most 1536, with a call of 512 tokens
    assert caches == {256, 512, 1024, 2048, 4096, 1536}
