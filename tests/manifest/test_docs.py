"""The examples on the pages of manifests, docs/reference/coverage.md and docs/reference/graph-kernels.md work, and the
first name every key.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernelgen import cli, manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library
from kernelgen.errors import KernelgenError
from kernelgen.manifest import types

ROOT = Path(__file__).parents[2]
PAGE = "\n".join(
    (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("manifest", "compile-settings", "manifest-languages")
)
COVERAGE_PAGE = (ROOT / "docs" / "reference" / "coverage.md").read_text(encoding="utf-8")
GRAPHS_PAGE = (ROOT / "docs" / "reference" / "graph-kernels.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE + GRAPHS_PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: re.search("name: (.*)", text)[1])  # type: ignore[index]
def test_examples_are_right(text: str, library: Library, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(text, encoding="utf-8")
    (request,) = manifest.load([file], Catalog([library]))
    assert request.kernels


def test_the_mistakes_are_reported_as_shown(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"^```yaml mistakes\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (expected,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(KernelgenError) as caught:
        manifest.load(["broken.yaml"], Catalog([library]))
    assert f"{caught.value}\n" == expected


def test_coverage_prints_what_is_shown(
    library: Library, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown,) = re.findall(r"^```console\n\$ kernelgen (.*?)^```", COVERAGE_PAGE, re.MULTILINE | re.DOTALL)
    command, first, dots, *last = shown.splitlines()
    assert dots == "…"
    monkeypatch.chdir(ROOT)
    assert cli.run([*command.split(), "--kernels", str(library.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-2:]) == (first, last)


def test_a_group_is_as_many_kernels_as_shown(
    library: Library, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", GRAPHS_PAGE, re.MULTILINE | re.DOTALL)
    (command, said) = re.findall(r"^```console\n\$ kernelgen (.*?)\n(.*?)^```", GRAPHS_PAGE, re.MULTILINE | re.DOTALL)[
        0
    ]
    monkeypatch.chdir(tmp_path)
    Path("norm.yaml").write_text(text, encoding="utf-8")
    assert cli.run([*command.split(), "--kernels", str(library.root)]) == 0
    assert capsys.readouterr().out == said


def test_every_key_of_the_schema_is_on_the_page() -> None:
    structs = (types.Manifest, types.Compiler, types.Case, types.OpKernel, types.SourceKernel, types.Graph, types.Node)
    named = set(re.findall(r"`(?:[a-z_]+\.)*([a-z_]+)`", PAGE))
    assert {key for struct in structs for key in struct.__struct_fields__} - named == set()
