"""`kernelgen prebuild` stores the results of NKI's own compiler in files, and builds without the compiler use them; a
double replaces it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nki_double import Double

from kernelgen import manifest
from kernelgen.cli.frame import run
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library, builtin_library, of_sources
from kernelgen.errors import KernelgenError
from kernelgen.languages.nki import prebuilt
from kernelgen.languages.nki.native import using
from kernelgen.lowering.emission import Emission, emit, prebuilt_request
from kernelgen.plan import Kernel, Plan

DATA = Path(__file__).resolve().parents[1] / "data" / "native_kernels"


class Project:
    """A folder with the manifest `native.yaml` and the double's results."""

    def __init__(self, folder: Path, double: Double) -> None:
        shutil.copytree(DATA, folder, dirs_exist_ok=True)
        self.folder = folder
        self.manifest = folder / "native.yaml"
        self.source = folder / "kernels" / "add.py"
        self.make(double)
        self.load()

    def load(self) -> None:
        self.catalog = Catalog([builtin_library()])
        self.plan = Plan.merge(manifest.load([self.manifest], self.catalog))
        self.native = [kernel for kernel in self.plan.kernels if kernel.prebuilt]

    def make(self, double: Double) -> None:
        with using(double):
            assert run(["prebuild", str(self.manifest)]) == 0

    def file(self, kernel: Kernel) -> Path:
        found = self.catalog.prebuilt_of(kernel)
        assert found is not None
        return found

    def emitted(self, kernel: Kernel, file: Path | None) -> Emission:
        return emit(self.catalog.emitters(kernel), kernel.spec, targets=kernel.targets, prebuilt=file)


@pytest.fixture
def make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Project]:
    def made(double: Double | None = None) -> Project:
        project = Project(tmp_path / "project", double or Double(True))
        capsys.readouterr()
        return project

    return made


@pytest.mark.parametrize(
    ("in_file", "more"),
    [
        (True, {}),
        (False, {}),
        (True, {"results": 2, "aliases": {1: 1}, "collectives": True}),
        (False, {"constants": (np.arange(6, dtype=np.float16).reshape(2, 3), np.int32(7))}),
    ],
)
def test_the_files_give_the_bytes_that_the_compiler_gives(
    make: Callable[..., Project], in_file: bool, more: dict[str, Any]
) -> None:
    double = Double(in_file, **more)
    project = make(double)
    assert len(project.native) == 4 and len({kernel.spec.id for kernel in project.native}) == 2
    assert Plan.from_json(project.plan.to_json()) == project.plan
    for kernel in project.native:
        file = project.file(kernel)
        with using(double):
            now = project.emitted(kernel, None)
        before = project.emitted(kernel, file)
        assert (before.hlo, before.notes) == (now.hlo, now.notes)


def test_making_it_again_leaves_the_file_as_it_is(
    make: Callable[..., Project], capsys: pytest.CaptureFixture[str]
) -> None:
    project = make()
    file = project.file(project.native[0])
    first = file.read_bytes(), file.stat().st_mtime_ns
    project.make(Double(True))
    assert (file.read_bytes(), file.stat().st_mtime_ns) == first
    assert str(file) in capsys.readouterr().out
    project.make(Double(False))
    assert file.read_bytes() != first[0]


def test_comments_and_empty_lines_are_no_part_of_the_source(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        (tmp_path / "k.py").write_text(text)
        return of_sources(Library("k", tmp_path), "k")

    plain = 'def f(x):\n    y = """a\n\n# b\n"""\n    return (x +\n            1)\n'
    same = '# c\n\ndef f(x):  # d\n\n    # e\n    y = """a\n\n# b\n"""\n    return (x +  # f\n            # g\n            1)\n'
    assert digest(plain) == digest(same)
    for old, new in (("1", "2"), ("# b", "# c"), ("a\n\n", "a\n"), ("return", "return  "), ("f(x)", "g(x)")):
        assert digest(plain.replace(old, new)) != digest(plain)
    (tmp_path / "h.py").write_text("X = 1\n")
    importing = digest("from .h import X\n")
    (tmp_path / "h.py").write_text("X = 1  # one\n")
    assert digest("from .h import X\n") == importing
    (tmp_path / "h.py").write_text("X = 2\n")
    assert digest("from .h import X\n") != importing


def changed(path: Path, change: Callable[[dict[str, Any]], None], sign: bool = True) -> None:
    """Changes a record; with `sign` the digest is updated, so only the content differs."""
    record = json.loads(path.read_text())
    del record["digest"]
    change(record)
    path.write_text(json.dumps(record | {"digest": prebuilt.digest(record) if sign else "0"}))


def test_what_is_not_of_the_kernel_is_refused(make: Callable[..., Project]) -> None:
    project = make()
    (other, *_), kernel = [k for k in project.native if k.targets == ("trn2",)], project.native[0]
    assert kernel.targets == ("trn1",) and other.spec.id == kernel.spec.id
    file = project.file(kernel)
    good = file.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(KernelgenError, match=message) as raised:
            project.emitted(kernel, file)
        assert "kernelgen prebuild" in str(raised.value) and str(file) in str(raised.value)
        file.write_bytes(good)
        project.emitted(kernel, file)

    file.unlink()
    refused("is missing: it holds what NKI's own compiler made of the kernel")
    file.write_text("[1]")
    refused("not what `kernelgen prebuild` writes, of format 1")
    changed(file, lambda r: r.update(format=2))
    refused("not what `kernelgen prebuild` writes, of format 1")
    changed(file, lambda r: r["made"].update(text="x"), sign=False)
    refused("it was changed after it was made")
    shutil.copy(project.file(other), file)
    refused("it was made for trn2, not for trn1")
    third = next(k for k in project.native if k.spec.id != kernel.spec.id)
    shutil.copy(project.file(third), file)
    refused(f"it was made of the kernel {third.spec.id}, not of the kernel {kernel.spec.id}")
    project.source.write_text(project.source.read_text().replace("op=nl.add", "op=nl.multiply"))
    with pytest.raises(
        KernelgenError, match=r"its sources differ from add\.py and the modules that it imports"
    ) as raised:
        project.emitted(kernel, file)
    assert "undo the edit, or make it again" in str(raised.value)
    project.make(Double(True))
    project.emitted(kernel, file)


def test_what_was_made_for_other_tensors_is_refused(make: Callable[..., Project]) -> None:
    project = make()
    kernel = project.native[0]
    file = project.file(kernel)
    good = file.read_bytes()
    for change, message in (
        (
            lambda r: r["made"]["asked"]["arrays"][0].__setitem__(0, "float16"),
            r"from another kernel: arrays is \[\['float16'",
        ),
        (
            lambda r: r["made"]["results"][0].__setitem__(0, [1]),
            r"the kernel returns float32\[1\] as result 0, and the manifest says float32\[128, 16\]",
        ),
    ):
        changed(file, change)
        with pytest.raises(KernelgenError, match=message):
            project.emitted(kernel, file)
        file.write_bytes(good)


# --- build steps ----------------------------------------------------------------------------------------------------------


def test_a_build_follows_the_files(
    make: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make()
    sdk = tmp_path / "sdk" / "bin"
    sdk.mkdir(parents=True)
    shutil.copy(Path(__file__).resolve().parents[1] / "compilers" / "fake_neuronx_cc", sdk / "neuronx-cc")
    monkeypatch.setenv("NEURON_SDK", str(sdk.parent))

    def build() -> str:
        code = run(["build", str(project.manifest), "--compiler", "neuronx-cc", "-o", str(tmp_path / "out")])
        captured = capsys.readouterr()
        return f"{code} {captured.out}{captured.err}"

    assert "6 built (6 compiled, 0 up to date), 0 failed" in build()
    # A comment compiles nothing; another artifact compiles its kernel.
    project.source.write_text(project.source.read_text().replace("@nki.jit", "# A comment.\n@nki.jit"))
    kernel = project.native[0]
    file = project.file(kernel)
    with using(Double(True, salt="another")):
        assert run(["prebuild", str(project.manifest), "--only", kernel.id]) == 0
    assert "6 built (1 compiled, 5 up to date), 0 failed" in build()
    file.unlink()
    said = build()
    assert said.startswith("1 ") and f"{file} is missing" in said


# --- Bazel ----------------------------------------------------------------------------------------------------------------


def test_bazels_build_files_name_the_files_that_are_there(
    make: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make()
    monkeypatch.chdir(project.folder)
    command = ["generate", "bazel", str(project.manifest), "-o", str(tmp_path / "repository")]
    (project.folder / "kernels" / "BUILD.bazel").touch()
    project.manifest.write_text(project.manifest.read_text().replace("kernels/native", "elsewhere"))
    assert run(command) == 2
    assert 'exports_files(glob(["*.json"]))' in capsys.readouterr().err
    project.manifest.write_text(project.manifest.read_text().replace("elsewhere", "kernels/native"))
    (project.folder / "kernels" / "native" / "BUILD").touch()
    assert run(command) == 0
    watched = capsys.readouterr().out.splitlines()
    text = (tmp_path / "repository" / "kernels" / "BUILD.bazel").read_text()
    for kernel in project.native:
        assert f'    prebuilt = "@@//kernels/native:{kernel.id}.json",\n' in text
        assert str(project.file(kernel)) in watched
    assert text.count("prebuilt = ") == 4 and "native = " not in text and "neuron_native_kernel" not in text
    missing = project.file(project.native[0])
    missing.unlink()
    assert run(command) == 0
    assert str(missing) in capsys.readouterr().out.splitlines()
    text = (tmp_path / "repository" / "kernels" / "BUILD.bazel").read_text()
    assert text.count("prebuilt = ") == 3 and text.count("missing = ") == 1
    assert f'    missing = "error: {missing} is missing: ' in text and "kernelgen prebuild" in text


# --- manifests ------------------------------------------------------------------------------------------------------------


def mistake(project: Project, text: str) -> str:
    project.manifest.write_text(text)
    with pytest.raises(KernelgenError) as raised:
        project.load()
    return str(raised.value)


def test_mistakes_in_a_manifest(make: Callable[..., Project], capsys: pytest.CaptureFixture[str]) -> None:
    project = make()
    good = project.manifest.read_text()
    said = mistake(project, good.replace("    lowering: native\n", ""))
    assert "native.yaml:10:5: error: 'prebuilt' is a key of kernels with the lowering 'native'" in said
    said = mistake(project, good.replace("prebuilt: kernels/native", "prebuilt: /kernels"))
    assert "native.yaml:11:15: error: " in said and "a folder, from the manifest's" in said
    entry = good[good.index("  - source") : good.index("  - source: kernels/add.py:add\n    inputs")]
    twice = good + entry.replace("kernels/native", "elsewhere")
    assert "is to be made by NKI's own compiler in two ways: in " in mistake(project, twice)
    twice = good + entry.replace("    prebuilt: kernels/native\n", "")
    assert "kernels/native, and now" in mistake(project, twice)
    project.manifest.write_text(good.replace("    prebuilt: kernels/native\n", ""))
    assert run(["prebuild", str(project.manifest)]) == 2
    assert "no kernel of these manifests has `prebuilt`" in capsys.readouterr().err
    project.manifest.write_text(good)
    assert run(["prebuild", str(project.manifest)]) == 1
    assert "needs NKI's own compiler, which is not installed" in capsys.readouterr().err


def test_what_is_interpreted_has_no_use_for_the_files(make: Callable[..., Project]) -> None:
    project = make()
    kernel = next(k for k in project.plan.kernels if not k.prebuilt)
    with pytest.raises(KernelgenError, match="what is prebuilt is a kernel with the lowering 'native', for one target"):
        prebuilt_request(project.catalog.emitters(kernel), kernel.spec, ("trn1",))
