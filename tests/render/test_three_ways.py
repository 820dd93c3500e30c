"""CMake's steps and `kernelgen build` write the same bytes, for every kind of kernel in a manifest.

No build tool runs: a function here runs CMake's generated steps. A NEFF depends only on its HLO and flags; nothing is compiled.
tests/bazel/test_arguments.py and tests/cmake/test_sources.py build such a manifest with the real tools.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import pytest
from nki_double import Double

from kernelgen import manifest
from kernelgen.build.steps import Build, steps_of
from kernelgen.bundle import pack
from kernelgen.bundle.contents import pack_name
from kernelgen.cache import OFF
from kernelgen.cli import bundle_forms
from kernelgen.cli.frame import run as cli
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.languages.nki import native
from kernelgen.neff import container, provenance
from kernelgen.plan import BundleEntries, Plan
from kernelgen.render import cmake
from kernelgen.spec.filenames import hlo_file, notes_file
from kernelgen.steps import worker

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = "simulator 1 (jaxlib 1.2.3)"

NATIVE = """\
  # By NKI's own compiler, now and before.
  - {source: "kernels/add.py:add", name: now, inputs: ["f32[128,8]", "f32[128,8]"], outputs: ["f32[128,8]"], lowering: native}
  - source: kernels/add.py:add
    name: before
    inputs: ["f32[128,16]", "f32[128,16]"]
    outputs: ["f32[128,16]"]
    lowering: native
    prebuilt: kernels/native
    compiler: {optlevel: 1}
"""
"""Kernels of NKI's own compiler, now and before, in addition to `every.yaml`."""


class Ways:
    """The manifest, and two ways to build it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "tests" / "data" / "source_kernels", folder, dirs_exist_ok=True)
        shutil.copy(ROOT / "tests" / "data" / "native_kernels" / "kernels" / "add.py", folder / "kernels")
        (folder / "kernels" / "BUILD.bazel").write_text("")
        self.manifest = folder / "every.yaml"
        self.manifest.write_text(self.manifest.read_text() + NATIVE)
        assert cli(["prebuild", str(self.manifest)]) == 0
        self.catalog = Catalog([builtin_library()])
        self.plan = Plan.merge(manifest.load([self.manifest], self.catalog))

    @cached_property
    def direct(self) -> dict[str, bytes]:
        """Bundles that `kernelgen build` makes from its HLO and NEFFs."""
        folder = self.folder / "direct"
        assert cli(["emit", str(self.manifest), "-o", str(folder / "hlo")]) == 0
        hlos = {k.id: folder / "hlo" / hlo_file(k.id) for k in self.plan.kernels}
        configs = {c.key: c for c in self.plan.configs}
        neffs = {}
        for n in self.plan.neffs:
            neffs[n.id] = folder / f"{n.id}.neff"
            compiled(hlos[n.kernel], configs[n.config].flags(), neffs[n.id])
        options = {"compiler": IDENTITY, "jax_version": version("jax")}
        written = bundle_forms.write(self.plan, self.plan.bundles, folder, ["pack"], hlos, neffs, **options)
        return {path.name: path.read_bytes() for path in written}

    def by_cmake(self) -> dict[str, bytes]:
        """Bundles from the steps that CMake's commands run."""
        folder = self.folder / "cmake"
        build = Build("simulator", IDENTITY, None, version("jax"), OFF, 2, 4096)
        files = cmake.generate(self.plan, self.catalog.folders, build)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        with contextlib.chdir(folder):
            self.run_steps(folder, build)
        return {path.name: path.read_bytes() for path in folder.glob("*.gguf")}

    def run_steps(self, folder: Path, build: Build) -> None:
        configs = {c.key: c for c in self.plan.configs}
        for kernel in self.plan.kernels:
            step("emit", f"@steps/{kernel.id}.emit")
        (folder / "neff").mkdir()
        for n in self.plan.neffs:
            hlo, path = folder / "hlo" / hlo_file(n.kernel), folder / "neff" / f"{n.id}.neff"
            compiled(hlo, configs[n.config].flags(), path)
            provenance.write(provenance.beside(path), hlo, "compiled", hashlib.sha256(path.read_bytes()).hexdigest())
        for one in steps_of(self.plan, build):
            if one.kind == "bundle":
                step("bundle", *one.arguments)


def compiled(hlo: Path, flags: list[str], output: Path) -> None:
    output.write_bytes(container.write_simulated(hlo.read_bytes(), flags, IDENTITY))


def step(*words: str) -> None:
    code, said = worker.run(words)
    assert code == 0, said


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    with native.using(Double(False)):
        yield Ways(tmp_path_factory.mktemp("ways"))


def test_both_ways_write_the_same_bytes(ways: Ways) -> None:
    direct = ways.direct
    assert sorted(direct) == ["every_trn1.kernels.gguf", "every_trn2.kernels.gguf"]
    assert ways.by_cmake() == direct


def test_a_bundle_has_every_kind_of_entry(ways: Ways) -> None:
    """The bundles have the entries that the other tests compare."""
    for bundle in ways.plan.bundles:
        planned = ways.plan.entries(bundle)
        assert BundleEntries.from_json(planned.to_json()) == planned
        kinds = {type(entry.spec).__name__ for entry in planned.entries}
        assert kinds == {"KernelSpec", "GraphSpec", "SourceSpec"}
        languages = {kernel.language for kernel in ways.plan.kernels}
        assert languages == {"jax", "numpy", "nki"}
        own = {(entry.noted, entry.config == planned.config) for entry in planned.entries}
        assert own == {(noted, same) for noted in (False, True) for same in (False, True)}
        made = pack.read(next(ways.folder.glob(f"*/{pack_name(bundle.id)}")))
        noted = {made.index.ids[i] for i, notes in enumerate(made.notes) if notes}
        assert noted >= {e.spec.id for e in planned.entries if e.noted and e.spec.op == "now"}
    assert any(kernel.prebuilt for kernel in ways.plan.kernels)


def test_files_that_are_not_those_of_the_entries_are_refused(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ways.folder / "cmake"
    (bundle, *_) = ways.plan.bundles
    if not folder.exists():
        ways.by_cmake()
    monkeypatch.chdir(folder)
    lines = (folder / "steps" / f"{bundle.id}.bundle").read_text().splitlines()
    first, second, *_ = (i for i, line in enumerate(lines) if line.startswith("--hlo="))
    output = folder / "refused.gguf"

    def said(words: list[str]) -> str:
        code, text = worker.run(["bundle", *words, f"--pack={output}"])
        assert code == 2 and not output.exists()
        return text

    kernels = bundle.kernels
    assert f"it has {kernels[0]} where the HLO is that of {kernels[1]}" in said(
        [*lines[:first], lines[second], lines[first], *lines[second + 1 :]]
    )
    n = len(kernels)
    assert f"bundle every_trn1: {n} entries, {n - 1} HLO and {n} NEFFs" in said(
        [line for line in lines if not line.startswith(f"--hlo=hlo/{kernels[-1]}.")]
    )
    notes = folder / "hlo" / notes_file(next(e.kernel for e in ways.plan.entries(bundle).entries if e.noted))
    content = notes.read_bytes()
    notes.unlink()
    try:
        code, text = worker.run(["bundle", *lines, f"--pack={output}"])
        assert code and f"hlo/{notes.name}: No such file" in text and not output.exists()
    finally:
        notes.write_bytes(content)
