"""Kernels in a Python package: the imports of their modules, the dependencies of builds, and errors."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from kernelgen import manifest
from kernelgen.build.steps import Build
from kernelgen.cache import OFF
from kernelgen.compilers import nki_driver
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library, dependencies, of_sources
from kernelgen.errors import KernelgenError
from kernelgen.hlo import execute
from kernelgen.lowering.emission import emit
from kernelgen.plan import Plan
from kernelgen.render import bazel, cmake
from kernelgen.steps import worker

DATA = Path(__file__).resolve().parents[1] / "data" / "source_kernels" / "kernels" / "published"
SCALED = ["core.scaled", "__init__", "constants", "core.__init__", "core.utils.tiles"]
"""The modules on which the kernels of core/scaled.py depend."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DATA, tmp_path / "src" / "published")
    (tmp_path / "src" / "beside.py").write_text("FACTOR = 2.0\n")
    return tmp_path


def entry(function: str = "scaled", file: str = "src/published/core/scaled.py", package: str = "src/published") -> str:
    return f'  - {{source: "{file}:{function}", package: "{package}", inputs: ["f32[16,8]"], outputs: ["f32[16,8]"]}}\n'


BOTH = entry() + entry("shifted")


def planned(folder: Path, entries: str) -> tuple[Plan, Catalog]:
    path = folder / "m.yaml"
    path.write_text(f"format: 1\nname: m\ntargets: [trn1]\nkernels:\n{entries}")
    catalog = Catalog([builtin_library()])
    return Plan.merge(manifest.load([path], catalog)), catalog


def computed(folder: Path, entries: str) -> list[float]:
    """Returns the first element of each kernel's result for an input of twos."""
    plan, catalog = planned(folder, entries)
    made = [emit(catalog.emitters(kernel), kernel.spec, targets=("trn1",)).hlo for kernel in plan.kernels]
    return [float(execute.run(hlo, [np.full((16, 8), 2, np.float32)])[0][0, 0]) for hlo in made]


def test_modules_import_by_relative_names_and_by_the_packages_name(folder: Path) -> None:
    plan, catalog = planned(folder, BOTH)
    assert len({kernel.library for kernel in plan.kernels}) == len(catalog.sources) == 1
    assert {kernel.emitter for kernel in plan.kernels} == {"core.scaled"}
    assert computed(folder, BOTH) == [6, 5]
    assert not [name for name in sys.modules if name.split(".")[0] == "published"]
    # An edit of a shared module changes both kernels; another package of the same name has its own modules.
    shutil.copytree(folder / "src", folder / "other")
    (folder / "src" / "published" / "constants.py").write_text("FACTOR = 5.0\n")
    assert computed(folder, BOTH) == [10, 7]
    other = entry("shifted", "other/published/core/scaled.py", "other/published")
    assert computed(folder, entry() + other) == [10, 5]


def test_a_folder_and_the_package_that_it_is_are_two_things(folder: Path) -> None:
    plain = folder / "src" / "published" / "plain.py"
    plain.write_text("import numpy as np\n\n\ndef plain(x):\n    return np.exp(x)\n")
    alone = '  - {source: "src/published/plain.py:plain", inputs: ["f32[16,8]"], outputs: ["f32[16,8]"]}\n'
    _, catalog = planned(folder, entry() + alone)
    assert {(library.package, library.root) for library in catalog.sources.values()} == {
        (True, folder / "src" / "published"),
        (False, folder / "src" / "published"),
    }
    again = alone.replace("inputs", "package: src/published, inputs")
    with pytest.raises(KernelgenError, match=r"has two packages: none, and \S+/src/published"):
        planned(folder, alone + again)


def test_what_a_module_imports_is_what_its_kernels_depend_on(folder: Path) -> None:
    _, catalog = planned(folder, BOTH)
    (library,) = catalog.sources.values()
    assert [library.module(file) for file in dependencies(library, "core.scaled")] == SCALED
    (library.root / "core" / "utils" / "unused.py").write_text("")
    digest = of_sources(library, "core.scaled")
    for name in SCALED:
        file = library.file(name)
        text = file.read_text()
        file.write_text(text + "\n# A comment.\n")
        assert of_sources(library, "core.scaled") == digest
        file.write_text(text + "\nMORE = 1\n")
        assert of_sources(library, "core.scaled") != digest, name
        file.write_text(text)
    (library.root / "core" / "utils" / "unused.py").write_text("MORE = 1\n")
    assert of_sources(library, "core.scaled") == digest


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("from published.core import *", ["core.__init__", "core.more", "core.scaled"]),
        ("import published.core.utils.tiles as t", ["core.__init__", "core.utils.tiles"]),
        ("from ..core.utils import tiles, absent", ["core.__init__", "core.utils.tiles"]),
        ("from .. import constants", ["constants"]),
        ("from ... import beside", []),
        ("from kernelgen.kernels.movement import get_rows", None),
    ],
)
def test_every_form_of_import_names_its_files(folder: Path, line: str, names: list[str] | None) -> None:
    root = folder / "src" / "published"
    (root / "core" / "__init__.py").write_text("")
    (root / "core" / "more.py").write_text("")
    (root / "core" / "scaled.py").write_text("")
    (root / "lone").mkdir()
    (root / "lone" / "m.py").write_text(
        f"import numpy\n\ndef f(x):\n    {line.replace(' *', ' scaled')}\n    return x\n"
    )
    if "*" in line:
        (root / "lone" / "m.py").write_text(f"import numpy\n{line}\n\ndef f(x):\n    return x\n")
    _, catalog = planned(folder, entry("f", "src/published/lone/m.py"))
    (library,) = catalog.sources.values()
    found = dependencies(library, "lone.m")
    if names is None:
        assert builtin_library().file("movement") in found
    else:
        assert [library.module(file) for file in found] == ["lone.m", "__init__", *names]


def test_cmake_emits_again_where_a_file_of_the_package_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, catalog = planned(folder, BOTH)
    build = Build("simulator", "s", None, version("jax"), OFF, 2, 4096)
    for name, text in cmake.generate(plan, catalog.folders, build).items():
        (folder / "build" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "build" / name).write_text(text)
    monkeypatch.chdir(folder / "build")
    arguments = sorted((folder / "build" / "steps").glob("*.emit"))[0]
    code, said = worker.run(["emit", f"@{arguments}", f"--depfile={folder / 'depfile'}"])
    assert code == 0, said
    root = (folder / "src" / "published").resolve()
    named = [Path(line.strip(" \\")) for line in (folder / "depfile").read_text().splitlines()[1:]]
    wanted = {root / f"{name.replace('.', '/')}.py" for name in SCALED}
    assert {path for path in named if path.is_relative_to(root)} == wanted
    listed = (folder / "build" / "kernels.cmake").read_text()
    assert all(str(file) in listed for file in wanted)


def test_an_edit_of_a_language_emits_no_kernel_of_another_with_cmake(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process emits kernels of all languages, one after another."""
    for name, module in (("jax", "jax.numpy"), ("numpy", "numpy")):
        (folder / f"in_{name}.py").write_text(f"import {module} as np\n\ndef exp(x):\n    return np.exp(x)\n")
    (folder / "in_both.py").write_text("import jax\nimport kernelgen.languages.numpy\n\ndef exp(x):\n    return x\n")
    plain = "".join(
        f'  - {{source: "in_{name}.py:exp", name: {name}, inputs: ["f32[2]"], outputs: ["f32[2]"]}}\n'
        for name in ("jax", "numpy", "both")
    )
    plan, catalog = planned(folder, entry() + plain)
    build = Build("simulator", "s", None, version("jax"), OFF, 2, 4096)
    for name, text in cmake.generate(plan, catalog.folders, build).items():
        (folder / "build" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "build" / name).write_text(text)
    found = {}
    monkeypatch.chdir(folder / "build")
    files = sorted((folder / "build" / "steps").glob("*.emit"))
    for file in [*files, *files]:
        code, said = worker.run(["emit", f"@{file}", f"--depfile={folder / 'depfile'}"])
        assert code == 0, said
        needed = (folder / "depfile").read_text()
        module = next(name for name in ("in_jax", "in_numpy", "in_both", "scaled") if f"/{name}.py" in needed)
        found[module] = {name for name in ("jax", "numpy", "nki") if f"/kernelgen/languages/{name}/" in needed}
        assert "/kernelgen/languages/__init__.py" in needed
    own = {"in_jax": set(), "in_numpy": {"numpy"}, "in_both": {"numpy"}, "scaled": {"nki"}}
    assert {name: languages - {"jax"} for name, languages in found.items()} == own


@pytest.mark.parametrize("inner", [False, True], ids=["one package of Bazel's", "another one in it"])
def test_bazel_has_the_files_of_the_package_as_inputs(folder: Path, inner: bool) -> None:
    (folder / "src" / "BUILD.bazel").write_text("")
    if inner:
        (folder / "src" / "published" / "core" / "BUILD.bazel").write_text("")
    plan, catalog = planned(folder, BOTH)
    roots = {folder: "@@"}
    sources = [bazel.package_of(library, roots) for library in catalog.sources.values()]
    sources += bazel.inner_packages(plan, [*catalog.sources.values()], roots)
    text = bazel.generate(plan, sources, "@@rules")["kernels/BUILD.bazel"]
    emitters, helpers, *_ = [
        ast.literal_eval(node.value) for node in ast.parse(text).body if isinstance(node, ast.Assign)
    ]
    core = "@@//src/published/core:" if inner else "@@//src:published/core/"
    assert [*emitters.values()] == [f"{core}scaled.py"]
    assert {*next(iter(helpers.values()))} == {
        "@@//src:published/__init__.py",
        "@@//src:published/constants.py",
        f"{core}__init__.py",
        f"{core}utils/tiles.py",
    }
    assert text.count('module = "core.scaled"') == 2
    watched = {file.parent.relative_to(folder).as_posix() for source in sources for file in bazel.build_files(source)}
    assert watched == {"src", "src/published", "src/published/core", "src/published/core/utils"}


def test_nkis_own_compiler_is_given_the_module_of_the_package(folder: Path) -> None:
    root = folder / "src" / "published"
    (root / "core" / "scaled.py").write_text(
        "import published.constants\nfrom ..constants import FACTOR\n\n"
        "def scaled():\n    return published.READY, published.constants.FACTOR, FACTOR, __name__\n"
    )
    (root / "__init__.py").write_text("READY = __name__\n")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(nki_driver.__file__).parent)!r}); import nki_driver, pathlib;"
        f"print(nki_driver._function(pathlib.Path({str(root / 'core' / 'scaled.py')!r}), 'scaled', 'core.scaled')())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "('published', 3.0, 3.0, 'published.core.scaled')\n"


@pytest.mark.parametrize(
    ("file", "package", "message"),
    [
        ("core/scaled.py", "src/absent", "there is no folder 'src/absent'"),
        ("core/scaled.py", "src/empty", "'src/published/core/scaled.py' is not in the package 'src/empty'"),
        ("core/scaled.py", "src/pub", "'src/published/core/scaled.py' is not in the package 'src/pub'"),
        ("core/scaled.py", ".", "'.' is not a name that Python imports"),
        ("a-b/k.py", "src/published", "'a-b' is not a name that Python imports"),
        ("core/scaled.py", "/src", "package: expected a folder, from the manifest's"),
        ("imports_linked.py", "src/published", "linked.py is a link out of the package"),
        ("imports_broken.py", "src/published", "not valid Python"),
    ],
)
def test_a_package_that_the_file_is_not_in_is_refused(folder: Path, file: str, package: str, message: str) -> None:
    root = folder / "src" / "published"
    for name in ("src/other.py", "src/published/a-b/k.py", "src/pub/k.py", "src/empty/k.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("import numpy as np\n\ndef scaled(x):\n    return np.exp(x)\n")
    (root / "linked.py").symlink_to(folder / "src" / "other.py")
    (root / "broken.py").write_text("def\n")
    for name in ("linked", "broken"):
        (root / f"imports_{name}.py").write_text(f"from .{name} import scaled\n")
    with pytest.raises(KernelgenError) as error:
        planned(folder, entry(file=f"src/published/{file}", package=package))
    assert message in str(error.value) and "m.yaml:5:" in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from .... import beside", "attempted relative import beyond top-level package"),
        ("import beside", "No module named 'beside'"),
        ("from published.absent.more import x", "No module named 'published.absent'"),
        ("from .compiled import x", "No module named 'published.lone.compiled'"),
    ],
)
def test_nothing_else_than_the_packages_sources_is_imported(folder: Path, line: str, message: str) -> None:
    lone = folder / "src" / "published" / "lone"
    lone.mkdir()
    (lone / "compiled.pyc").write_bytes(b"")
    (lone / "k.py").write_text(f"import numpy as np\n{line}\n\ndef f(x):\n    return np.exp(x)\n")
    with pytest.raises(KernelgenError) as error:
        computed(folder, entry("f", "src/published/lone/k.py"))
    assert message in str(error.value) and "lone/k.py:2:1" in str(error.value)
