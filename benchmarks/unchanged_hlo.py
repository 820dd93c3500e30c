"""Makes changes that leave HLO unchanged, and counts the kernels that each build compiles after them; the expected count is 0.

A `Way` builds one small manifest in a scratch checkout, with the simulator or with the tests' double of neuronx-cc.
Changes are made one after another and stay. A build identifies packages and interpreter by an environment whose key
contains the lock and the interpreter's version. Other environments are copies of this machine's environment under their
keys.

`incremental_bazel.py` prints the table.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import cmake_project
import scratch

COMPILERS = ("neuronx-cc", "simulator")

MANIFEST = """
format: 1
name: basic
targets: [trn1, inf2]
kernels:
  - {op: add, inputs: ["(64,4,1,1)/f32", "(64,1,1,1)/f32"], output: "(64,4,1,1)/f32"}
  - {op: rms_norm, inputs: ["(64,4,1,1)/f32"], output: "(64,4,1,1)/f32", params: {eps: 1.0e-5}}
  - {op: mul_mat, inputs: ["(64,32,1,1)/f16", "(64,4,1,1)/f32"], output: "(32,4,1,1)/f32"}
  - {op: silu, inputs: ["(64,4,1,1)/f32"], output: "(64,4,1,1)/f32"}
"""
KERNELS = 4

CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.20)
project(user LANGUAGES CXX)
set(COMPILER simulator CACHE STRING "")
set(TARGETS trn1 CACHE STRING "")
include("{root}/rules/cmake/NeuronKernels.cmake")
add_neuron_kernels(kernels MANIFEST "{root}/manifests/basic.yaml" TARGETS ${{TARGETS}} COMPILER ${{COMPILER}} FORM PACK)
"""


@dataclass(frozen=True)
class Counts:
    """The counts of a build: kernels emitted, compiles started, and runs of the compiler itself; None if not reported."""

    emits: int | None
    compiles: int
    runs: int | None = None


@dataclass(frozen=True)
class Row:
    """One change, built in one way.

    Attributes:
        way, compiler, change: the way to build, the compiler, and the change.
        counts: the counts of the build.
        want_compiles: the expected number of compiles.
        want_runs: the expected number of runs of the compiler, if it differs.
    """

    way: str
    compiler: str
    change: str
    counts: Counts
    want_compiles: int
    want_runs: int

    @property
    def right(self) -> bool:
        runs = self.counts.runs
        return self.counts.compiles == self.want_compiles and (runs is None or runs == self.want_runs)


class Environments:
    """Python environments in a separate cache folder, under the keys that the rules look up.

    Args:
        folder: the value of NEURON_KERNELGEN_CACHE.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = os.environ.get("NEURON_KERNELGEN_PYTHON") or shutil.which("python3") or sys.executable
        self._script = str(scratch.CHECKOUT / "rules/private/repositories/python_env.py")
        lock = str(scratch.CHECKOUT / "requirements.txt")
        made = subprocess.run([self.python, self._script, "--lock", lock], check=True, capture_output=True, text=True)
        self._base = Path(json.loads(made.stdout)["path"])
        shown = [self.python, "-c", "import sys; sys.stdout.write(sys.version)"]
        self._version = subprocess.run(shown, check=True, capture_output=True, text=True).stdout

    def add(self, lock: bytes, release: str | None = None, jaxlib: str | None = None) -> Path:
        """Returns the environment of a lock, of another release of Python (`3.11.99`), or with another version of jaxlib."""
        version = self._version if release is None else self._version.replace(self._version.split()[0], release)
        path = self.folder / "python" / self._key(lock, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        if jaxlib is None:
            path.symlink_to(self._base)
            return path
        subprocess.run(["cp", "-al", self._base, path], check=True)
        (old,) = path.glob("lib/python3*/site-packages/jaxlib-*.dist-info")
        new = old.rename(old.with_name(f"jaxlib-{jaxlib}.dist-info"))
        text = (new / "METADATA").read_text()
        (new / "METADATA").unlink()  # a link to the original file
        (new / "METADATA").write_text(re.sub(r"^Version: .*$", f"Version: {jaxlib}", text, count=1, flags=re.MULTILINE))
        return path

    def interpreter(self, release: str) -> Path:
        """Returns a program like this machine's Python, except for the version in an environment's key."""
        program = self.folder / f"python{release}"
        version = self._version.replace(self._version.split()[0], release)
        (self.folder / f"{program.name}.py").write_text(
            f"import runpy, sys\nsys.version = {version!r}\nsys.argv = sys.argv[1:]\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        )
        program.write_text(
            "#!/bin/sh\n"
            f'case "$*" in *python_env.py*) exec "{self.python}" "{self.folder}/{program.name}.py" "$@" ;; esac\n'
            f'exec "{self.python}" "$@"\n'
        )
        program.chmod(0o755)
        return program

    def _key(self, lock: bytes, version: str) -> str:
        code = (
            "import sys; sys.version = sys.argv[2]; import runpy; "
            "m = runpy.run_path(sys.argv[1]); print(m['key'](sys.stdin.buffer.read(), ''))"
        )
        words = [self.python, "-c", code, self._script, version]
        return subprocess.run(words, input=lock, check=True, capture_output=True).stdout.decode().strip()


@dataclass
class Tree:
    """A scratch checkout, and the environment of its builds.

    Attributes:
        path: the checkout.
        environments: its Python environments.
        variables: environment variables of the builds.
        python: the current interpreter.
        release: the simulated release of Python, if any.
        targets: the targets to build.
    """

    path: Path
    environments: Environments
    variables: dict[str, str] = field(default_factory=dict)
    python: Path = Path()
    release: str | None = None
    targets: tuple[str, ...] = ("trn1",)

    def edit(self, file: str, old: str, new: str) -> None:
        """Replaces text in a file; raises ValueError if the text is missing."""
        path = self.path / file
        text = path.read_text()
        if old not in text:
            raise ValueError(f"{file} does not contain {old!r}")
        path.write_text(text.replace(old, new, 1))

    def use_environment(self, release: str | None = None, jaxlib: str | None = None) -> None:
        """Makes builds use the environment of the current lock."""
        lock = (self.path / "requirements.txt").read_bytes()
        self.release = release or self.release
        self.python = self.environments.add(lock, self.release, jaxlib) / "bin" / "python"
        if release:
            self.variables["NEURON_KERNELGEN_PYTHON"] = str(self.environments.interpreter(release))


class Way(Protocol):
    """A way to build, in its own tree."""

    name: str
    tree: Tree

    def build(self, *flags: str) -> Counts:
        """Builds `tree.targets`."""

    def moved(self) -> Counts:
        """Builds in a copy of the tree at another path, with a shared cache."""

    def close(self) -> None:
        """Stops the processes that still run."""


class Bazel:
    """Bazel; counts the actions in its execution log."""

    name = "Bazel"

    def __init__(self, folder: Path, tree: Tree, compiler: str, checkouts: scratch.Checkouts) -> None:
        self.tree = tree
        self._checkouts = checkouts
        self._lent = contextlib.ExitStack()
        self._flags = [f"--disk_cache={folder / 'disk-cache'}", f"--//rules:compiler={compiler}", *scratch.ONE_WORKER]
        self._checkout = self._lent.enter_context(checkouts.lend("project", source=tree.path, flags=self._flags))
        tree.path = self._checkout.path
        tree.edit("MODULE.bazel", 'neuron.kernels(manifest = ["//manifests:llama3.yaml"])\n', "")
        tree.edit("manifests/BUILD.bazel", 'neuron_manifest(name = "llama3")\n', "")
        tree.variables |= {"NEURON_KERNELGEN_NEFF_CACHE": str(folder / "neffs")}
        scratch.provide_bazel(tree.environments.folder)

    def build(self, *flags: str, checkout: scratch.Checkout | None = None) -> Counts:
        checkout = checkout or self._checkout
        checkout.env = self.tree.variables
        targets = [f"//manifests:basic_{target}" for target in self.tree.targets]
        done = checkout.bazel("build", *targets, flags=flags)
        return Counts(done.emits, done.compiles)

    def moved(self) -> Counts:
        with self._checkouts.lend("elsewhere/moved", source=self.tree.path, flags=self._flags) as moved:
            return self.build(checkout=moved)

    def close(self) -> None:
        self._lent.close()


class CMake:
    """CMake with Ninja; counts their commands."""

    name = "CMake"

    def __init__(self, folder: Path, tree: Tree, compiler: str, checkouts: scratch.Checkouts) -> None:
        self.tree = tree
        self._folder = folder
        self._compiler = compiler
        self._project = self._make_project(tree.path, folder / "user")

    def _make_project(self, root: Path, folder: Path) -> cmake_project.Project:
        folder.mkdir(parents=True)
        (folder / "CMakeLists.txt").write_text(CMAKE_LISTS.format(root=root))
        return cmake_project.Project(folder, folder / "build")

    def build(self, *flags: str, project: cmake_project.Project | None = None) -> Counts:
        project = project or self._project
        project.variables = {"NEURON_KERNELGEN_NEFF_CACHE": str(self._folder / "neffs"), **self.tree.variables}
        named = self.tree.variables.get("NEURON_KERNELGEN_PYTHON", "")
        words = [f"-DCOMPILER={self._compiler}", f"-DTARGETS={';'.join(self.tree.targets)}"]
        project.configure(*words, f"-DNEURON_KERNELGEN_PYTHON={named}", python=None)
        result = project.make()
        return Counts(result.emits, len(result.compiles))

    def moved(self) -> Counts:
        path = self._folder / "elsewhere" / "moved"
        shutil.copytree(self.tree.path, path, symlinks=True)
        counts = self.build(project=self._make_project(path, self._folder / "elsewhere" / "user"))
        # A new build folder has no NEFFs yet: each step runs, and takes its NEFF from the cache.
        (pack,) = (self._folder / "elsewhere").glob("user/build/**/basic_inf2.kernels.gguf")
        assert pack.stat().st_size
        return Counts(counts.emits, self._compiled)

    @property
    def _compiled(self) -> int:
        """The number of NEFFs that the moved build compiled, as its compile steps report."""
        found = list((self._folder / "elsewhere").glob("user/build/**/*.origin"))
        assert found
        return sum(json.loads(path.read_text())["source"] == "compiled" for path in found)

    def close(self) -> None:
        pass


class CommandLine:
    """`kernelgen build`, which reports its counts."""

    name = "kernelgen build"

    def __init__(self, folder: Path, tree: Tree, compiler: str, checkouts: scratch.Checkouts) -> None:
        self.tree = tree
        self._folder = folder
        self._compiler = compiler

    def build(self, *flags: str, root: Path | None = None, output: str = "out") -> Counts:
        root = root or self.tree.path
        site = self._folder / "site"
        site.mkdir(exist_ok=True)
        release = self.tree.release
        lines = f"import platform\nplatform.python_version = lambda: {release!r}\n" if release else ""
        (site / "sitecustomize.py").write_text(lines)
        env = cmake_project.environment() | {
            "NEURON_KERNELGEN_NEFF_CACHE": str(self._folder / "neffs"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": f"{site}:{root / 'tools'}",
            **self.tree.variables,
        }
        targets = [f"--target={target}" for target in self.tree.targets]
        words = [self.tree.python, "-m", "kernelgen", "build", root / "manifests/basic.yaml", *targets]
        text = cmake_project.run(*words, "-j1", "--compiler", self._compiler, "-o", self._folder / output, env=env)
        match = re.search(r"\d+ built \((\d+) compiled", text)
        assert match, text
        return Counts(None, int(match[1]))

    def moved(self) -> Counts:
        path = self._folder / "elsewhere" / "moved"
        shutil.copytree(self.tree.path, path, symlinks=True)
        return self.build(root=path, output="out2")

    def close(self) -> None:
        pass


WAYS: Mapping[str, Callable[[Path, Tree, str, scratch.Checkouts], Way]] = {
    "Bazel": Bazel,
    "CMake": CMake,
    "kernelgen build": CommandLine,
}


# --- the changes ----------------------------------------------------------------------------------------------------------


def comment_everywhere(tree: Tree) -> None:
    for module in sorted((tree.path / "tools/kernelgen").rglob("*.py")):
        module.write_text(module.read_text() + "\n# A comment.\n")


def add_op(tree: Tree) -> None:
    head = "_ALL = (\n"
    tree.edit("tools/kernelgen/ggml/ops.py", head, f'{head}    Op("sqr2", ("src0",), 1),\n')


def add_lint_rule(tree: Tree, finds: str = "lambda m, target: iter(())") -> None:
    rule = f'Rule("kernelgen/added", {finds}, "nothing", "what is added", per_target=True),'
    head = "RULES: tuple[Rule, ...] = (\n"
    tree.edit("tools/kernelgen/hlo/lint.py", head, f"{head}    {rule}\n")


def raise_version(tree: Tree) -> None:
    file = "tools/kernelgen/__init__.py"
    version = re.search(r'__version__ = "([^"]+)"', (tree.path / file).read_text())
    assert version
    tree.edit(file, version[0], f'__version__ = "{version[1]}.99"')


def ask_for_memory(tree: Tree) -> None:
    tree.edit("manifests/basic.yaml", "\nkernels:", "\ncompiler: {memory_per_compile: 2G}\nkernels:")


def bump_package(tree: Tree) -> None:
    bump(tree, "click")
    tree.use_environment()


def bump_jaxlib(tree: Tree) -> None:
    tree.use_environment(jaxlib=bump(tree, "jaxlib"))


def bump(tree: Tree, package: str) -> str:
    """Locks another version of a package; returns the version."""
    locked = re.search(rf"^{package}==(\S+)", (tree.path / "requirements.txt").read_text(), re.MULTILINE)
    assert locked
    tree.edit("requirements.txt", locked[0], f"{locked[0]}.post1")
    return f"{locked[1]}.post1"


def patch_release(tree: Tree) -> None:
    tree.use_environment(release="3.11.99")


def minor_release(tree: Tree) -> None:
    tree.use_environment(release="3.99.0")


def second_target(tree: Tree) -> None:
    tree.targets = ("trn1", "inf2")


def change_driver(tree: Tree) -> None:
    tree.edit("tools/kernelgen/compilers/neuronx_cc_driver.py", "TAIL_LINES = 20", "TAIL_LINES = 21")


def nothing(tree: Tree) -> None:
    pass


MOVED = "another checkout path"


@dataclass(frozen=True)
class Change:
    """One change, and what a build may compile after it.

    Attributes:
        name: a description of the change.
        make: makes the change.
        all_of: the compilers whose NEFFs are all made again.
        added: the number of new NEFFs.
        ways: the ways to build to which the change applies.
        flags: flags of the build.
        found: whether kernelgen's cache has every NEFF that an action makes again, so that the compiler does not run.
        of: the thing that it changes. Changes with the same value may be made at once: if none of them compiles a
            kernel, all of them together don't.
    """

    name: str
    make: Callable[[Tree], None]
    all_of: Sequence[str] = ()
    added: int = 0
    ways: Sequence[str] = tuple(WAYS)
    flags: Sequence[str] = ()
    found: bool = False
    compilers: Sequence[str] = COMPILERS
    of: str = ""


CHANGES = (
    Change("cold build", nothing, added=KERNELS),
    Change("a comment in every module of kernelgen", comment_everywhere, of="kernelgen"),
    Change("an op added to ggml's table", add_op, of="kernelgen"),
    Change("a lint rule added", add_lint_rule, of="kernelgen"),
    Change("another version of kernelgen", raise_version, of="kernelgen"),
    Change("another memory_per_compile in the manifest", ask_for_memory, of="kernelgen"),
    Change("-c opt --copt=-O3", nothing, ways=("Bazel",), flags=("-c", "opt", "--copt=-O3"), of="kernelgen"),
    Change("a package bumped in the lock", bump_package, of="environment"),
    Change("another patch release of Python", patch_release, of="environment"),
    Change("another minor release of Python", minor_release, of="environment"),
    Change("a second target", second_target, added=KERNELS),
    Change(MOVED, nothing),
    Change(
        "other code in neuronx-cc's driver, with kernelgen's cache",
        change_driver,
        all_of=("neuronx-cc",),
        ways=("Bazel",),
        compilers=("neuronx-cc",),
        found=True,
    ),
    Change("another version of jaxlib in the lock", bump_jaxlib, all_of=("simulator",)),
)


@contextlib.contextmanager
def prepared(way: str, compiler: str, checkouts: scratch.Checkouts) -> Iterator[tuple[Way, Path]]:
    """Yields a way to build, and the file to which the double of neuronx-cc writes its runs; Bazel builds in one of `checkouts`."""
    with tempfile.TemporaryDirectory(prefix="neuron-kernelgen-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        tree = Tree(scratch.copy(folder / "project"), Environments(folder / "cache"))
        (tree.path / "manifests/basic.yaml").write_text(MANIFEST)
        tree.variables["NEURON_KERNELGEN_CACHE"] = str(folder / "cache")
        tree.use_environment()
        record = folder / "record"
        record.write_text("")
        if compiler == "neuronx-cc":
            program = folder / "sdk" / "bin" / "neuronx-cc"
            program.parent.mkdir(parents=True)
            shutil.copy(scratch.CHECKOUT / "tests/compilers/fake_neuronx_cc", program)
            program.chmod(0o755)
            program.with_name("neuronx-cc.json").write_text(json.dumps({"record": str(record), "steady": True}))
            tree.variables["NEURON_SDK"] = str(folder / "sdk")
        built = WAYS[way](folder, tree, compiler, checkouts)
        try:
            yield built, record
        finally:
            built.close()


def run(way: str, compiler: str, checkouts: scratch.Checkouts, *, at_once: bool = False) -> Iterator[Row]:
    """Yields a row per change, built in one way with one compiler; with `at_once`, one per group with the same `of`."""
    with prepared(way, compiler, checkouts) as (built, record):
        changes = [change for change in CHANGES if way in change.ways and compiler in change.compilers]
        alike = itertools.groupby(changes, lambda change: change.of if at_once and change.of else change.name)
        for group in (list(changes) for _, changes in alike):
            before = _runs(record)
            for one in group:
                one.make(built.tree)
            # All changes of a group have the same expected counts.
            change = group[-1]
            counts = (
                built.moved() if change.name == MOVED else built.build(*(flag for one in group for flag in one.flags))
            )
            runs = _runs(record) - before if compiler == "neuronx-cc" else None
            compiles = change.added or (KERNELS * len(built.tree.targets) if compiler in change.all_of else 0)
            counts = Counts(counts.emits, counts.compiles, runs)
            yield Row(
                way, compiler, ", ".join(one.name for one in group), counts, compiles, 0 if change.found else compiles
            )


def _runs(record: Path) -> int:
    """Returns the number of compiles of the double."""
    return sum(json.loads(line)["arguments"][:1] == ["compile"] for line in record.read_text().splitlines())
