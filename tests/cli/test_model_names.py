"""The name of a manifest that `kernelgen model` writes: its file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelgen.cli.model_manifest import name_of
from kernelgen.errors import KernelgenError
from kernelgen.manifest import document
from kernelgen.model import writing
from kernelgen.model.derived import Derived


def test_names_keep_sizes_and_types() -> None:
    assert name_of(None, Path("kernels/Qwen2.5-7B-Instruct-Q4_K_M.yaml")) == "qwen2_5_7b_instruct_q4_k_m"
    assert name_of(None, Path("Qwen2.5-0.5B.gguf.yml")) == "qwen2_5_0_5b_gguf"
    assert name_of("small", Path("7b.yaml")) == "small"


@pytest.mark.parametrize(("name", "file"), [(None, "7b.yaml"), (None, f"{'m' * 101}.yaml"), ("Qwen2.5", "m.yaml")])
def test_a_name_that_no_manifest_has_is_refused(name: str | None, file: str) -> None:
    with pytest.raises(KernelgenError, match="a manifest's name has lower-case letters, digits and underscores"):
        name_of(name, Path(file))


@pytest.mark.parametrize("name", ["null", "true", "qwen2"])
def test_a_name_is_text_in_yaml(name: str) -> None:
    head = writing.ManifestHead(name, ("trn1",), "", ())
    root = document.parse(writing.text(head, Derived([], [], 0, [])).encode(), "m.yaml", document.Report())
    assert root is not None and root.value["name"].value == name
