"""A build runs the steps that are not up to date, as many at once as memory and CPUs allow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kernelgen.build import executor, up_to_date
from kernelgen.build import folder as build_folder
from kernelgen.build.determinism import DeterminismResult
from kernelgen.build.pool import Answer
from kernelgen.compilers.neuronx_cc_driver import machine_memory_mb
from kernelgen.compilers.settings import CompileConfig
from kernelgen.emitters.library import Library, builtin_library
from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.plan import Kernel, Plan, Request
from kernelgen.spec.kernel import KernelSpec
from kernelgen.targets import SIMULATOR_MEMORY_MB


@dataclass
class FakePool:
    """Runs nothing: writes made-up outputs when a step ends, and records which steps ran at once."""

    size: int
    hlo: bytes | None = None
    running: list[tuple[Any, Sequence[str]]] = field(default_factory=list)
    together: list[list[str]] = field(default_factory=list)
    emitters: list[str] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    fail: set[str] = field(default_factory=set)
    say: str = ""

    @property
    def idle(self) -> int:
        return self.size - len(self.running)

    def start(self, task: Any, arguments: Sequence[str], timeout: float | None = None) -> None:
        assert self.idle > 0
        self.running.append((task, arguments))
        self.together.append([a[0] for _, a in self.running])

    def wait(self) -> list[Answer]:
        if not self.running:
            return []
        task, arguments = self.running.pop(0)
        given = dict(a.removeprefix("--").split("=", 1) for a in arguments[1:])
        if arguments[0] == "emit":
            if given["spec"] in self.fail:
                return [Answer(task, 1, "refused", 0.0)]
            self.emitters.append(given["emitter"])
            Path(given["output"]).write_bytes(self.hlo or given["spec"].encode())
        else:
            self.compiled.append(given["kernel"])
            if given["kernel"] in self.fail:
                return [Answer(task, 1, "no", 0.0)]
            Path(given["output"]).write_bytes(b"not a NEFF")
            return [Answer(task, 0, self.say, 0.5)]
        return [Answer(task, 0, "", 0.5)]


class Steps(list[executor.BuildStep]):
    def __init__(self) -> None:
        super().__init__()
        self.warned: list[str] = []

    def step(self, step: executor.BuildStep) -> None:
        self.append(step)

    def warn(self, text: str) -> None:
        self.warned.append(text)


def plan(
    count: int,
    *,
    memory_mb: int = 1000,
    cpus: int = 1,
    targets: Sequence[str] = ("trn1",),
    emitter: str = "elementwise",
    library: str = "kernelgen",
) -> Plan:
    specs = [
        KernelSpec.make("relu", [TensorDesc.make((n, 1, 1, 1), "f32")], TensorDesc.make((n, 1, 1, 1), "f32"))
        for n in range(1, count + 1)
    ]
    kernels = tuple(Kernel(spec, emitter, library) for spec in specs)
    configs = tuple(CompileConfig.make(target) for target in targets)
    return Plan.merge([Request("m", kernels, configs, memory_mb, cpus)])


def run(
    pool: FakePool, what: Plan, tmp_path: Path, libraries: Sequence[Library] = (), **settings: Any
) -> tuple[executor.BuildResult, Steps]:
    given = {"compiler": "neuronx-cc", "identity": "neuronx-cc 2", "executable": Path("/x"), "memory_mb": 10**6}
    made = build_folder.BuildSettings(output=tmp_path, jobs=pool.size, **{**given, **settings})
    for folder in ("hlo", "neff", "tmp"):
        (tmp_path / build_folder.STATE / folder).mkdir(parents=True, exist_ok=True)
    steps = Steps()
    result = executor.Executor(
        what, libraries or [builtin_library()], made, steps, pool, DeterminismResult({}, {})
    ).run()  # type: ignore[arg-type]  # a double of the steps
    assert not pool.running
    if not pool.say:
        assert steps.warned == []
    return result, steps


def most(pool: FakePool, step: str) -> int:
    return max(running.count(step) for running in pool.together)


@pytest.mark.parametrize(("memory_mb", "expected"), [(10**6, 8), (3999, 3), (1000, 1), (10, 1)])
def test_compiles_at_once_fit_into_memory(tmp_path: Path, memory_mb: int, expected: int) -> None:
    pool = FakePool(8)
    result, _ = run(pool, plan(20), tmp_path, memory_mb=memory_mb)
    assert most(pool, "compile") == expected
    assert len(result.neffs) == 20


def test_compiles_at_once_fit_into_the_jobs_requested(tmp_path: Path) -> None:
    pool = FakePool(8)
    run(pool, plan(20, cpus=4), tmp_path)
    assert most(pool, "compile") == 2


def test_simulated_compiles_are_not_counted_at_what_neuronx_cc_needs(tmp_path: Path) -> None:
    pool = FakePool(8)
    run(pool, plan(20, memory_mb=16000), tmp_path, compiler="simulator", memory_mb=4 * SIMULATOR_MEMORY_MB)
    assert most(pool, "compile") == 4


def test_emits_go_on_while_compiles_wait_for_memory(tmp_path: Path) -> None:
    pool = FakePool(4)
    run(pool, plan(20), tmp_path, memory_mb=1000)
    assert any(running.count("emit") == 3 and "compile" in running for running in pool.together)


def test_every_target_is_compiled_from_one_emit(tmp_path: Path) -> None:
    pool = FakePool(2)
    result, steps = run(pool, plan(3, targets=("trn1", "trn2")), tmp_path)
    assert result.emitted == 3
    assert len(pool.compiled) == 6
    assert len(set(result.neffs.values())) == 6
    assert sorted(s.neff.id for s in steps) == sorted(result.neffs)


def test_kernels_with_equal_hlo_are_compiled_once(tmp_path: Path) -> None:
    pool = FakePool(4, hlo=b"the same")
    result, steps = run(pool, plan(5), tmp_path)
    assert len(pool.compiled) == 1
    assert len(set(result.neffs.values())) == 1 and len(result.neffs) == 5
    assert [s.fresh for s in steps].count(True) == 1


def test_kernels_with_equal_hlo_fail_together(tmp_path: Path) -> None:
    what = plan(5)
    pool = FakePool(4, hlo=b"the same", fail={k.spec.id for k in what.kernels})
    result, steps = run(pool, what, tmp_path)
    assert len(pool.compiled) == 1
    assert result.neffs == {} and [s.failure for s in steps] == ["no"] * 5


def test_warnings_of_compiles_are_reported_once_and_fail_nothing(tmp_path: Path) -> None:
    pool = FakePool(2, say="warning: the same\nsomething else\n")
    result, steps = run(pool, plan(3), tmp_path)
    assert len(result.neffs) == 3 and steps.warned == ["warning: the same"]


def test_other_settings_another_compiler_or_target_compile_again(tmp_path: Path) -> None:
    neffs: set[str] = set()
    base = plan(1)
    variants: list[tuple[Plan, dict[str, Any]]] = [
        (base, {}),
        (base, {"identity": "neuronx-cc 3"}),
        (plan(1, targets=["inf2"]), {}),
        (Plan.merge([Request("m", base.kernels, (CompileConfig.make("trn1", optlevel=3),))]), {}),
    ]
    for number, (what, settings) in enumerate(variants):
        result, _ = run(FakePool(1), what, tmp_path / str(number), **settings)
        neffs |= {path.name for path in result.neffs.values()}
    assert len(neffs) == len(variants)
    again, _ = run(FakePool(1), plan(1, memory_mb=5, cpus=3), tmp_path / "again")
    assert {path.name for path in again.neffs.values()} <= neffs  # resources do not change the result


def test_the_machines_memory_is_a_sensible_number() -> None:
    assert 100 < machine_memory_mb() < 10**8


@pytest.fixture
def mine(tmp_path: Path) -> Library:
    """Returns a library whose emitter of relu imports a helper."""
    root = tmp_path / "mine"
    root.mkdir()
    emitter = "from kernelgen.emitters import emitter\n\nfrom .helper import f\n\n\n@emitter('relu')\ndef relu(x):\n    return f(x)\n"
    (root / "unary.py").write_text(emitter)
    (root / "helper.py").write_text("def f(x):\n    return x\n")
    (root / "other.py").write_text("")
    return Library("mine", root)


def emitted(count: int, tmp_path: Path, mine: Library) -> int:
    """Returns how many of `count` kernels of `mine` a build emits."""
    what = plan(count, emitter="unary", library="mine")
    result, _ = run(FakePool(2), what, tmp_path / "out", [mine])
    assert len(result.hlos) == len(what.kernels)
    return result.emitted


def test_what_is_as_an_emit_would_make_it_is_not_emitted_again(
    mine: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert emitted(3, tmp_path, mine) == 3
    assert emitted(3, tmp_path, mine) == 0
    assert emitted(5, tmp_path, mine) == 2
    (mine.root / "other.py").write_text("# not what relu imports\n")
    assert emitted(5, tmp_path, Library("mine", mine.root)) == 0
    for file in ("unary.py", "helper.py"):
        with (mine.root / file).open("a") as stream:
            stream.write("# a comment\n")
        assert emitted(5, tmp_path, Library("mine", mine.root)) == 5
        assert emitted(5, tmp_path, Library("mine", mine.root)) == 0
    monkeypatch.setattr("kernelgen.build.up_to_date.version", lambda name: f"{name} of tomorrow")
    assert emitted(5, tmp_path, mine) == 5


def test_the_plan_says_which_emitter_computes_a_kernel(mine: Library, tmp_path: Path) -> None:
    builtin, pool = builtin_library(), FakePool(1)
    run(pool, plan(1), tmp_path / "one", [mine, builtin])
    run(pool, plan(1, emitter="unary", library="mine"), tmp_path / "two", [mine, builtin])
    assert pool.emitters == [str(builtin.root / "elementwise.py"), str(mine.root / "unary.py")]


def test_hlo_that_is_not_what_was_emitted_is_emitted_again(mine: Library, tmp_path: Path) -> None:
    assert emitted(3, tmp_path, mine) == 3
    folder = tmp_path / "out" / build_folder.STATE / "hlo"
    one, two, three = sorted(folder.glob("*.hlo.pb"))
    whole = one.read_bytes()
    one.write_bytes(whole[:5])
    two.unlink()
    three.with_name(three.name.replace(".hlo.pb", ".inputs")).write_bytes(b"\xff")
    assert emitted(3, tmp_path, mine) == 3
    assert one.read_bytes() == whole


def test_an_emitter_that_is_edited_while_it_runs_runs_again(mine: Library, tmp_path: Path) -> None:
    helper = mine.root / "helper.py"
    before = helper.read_text()

    class Editing(FakePool):
        def wait(self) -> list[Answer]:
            helper.write_text("# an edit\n")
            return super().wait()

    run(Editing(1), plan(1, emitter="unary", library="mine"), tmp_path / "out", [mine])
    helper.write_text(before)  # as at the start of the emit, but maybe not as at the time of the read
    assert emitted(1, tmp_path, mine) == 1
    assert emitted(1, tmp_path, mine) == 0


def test_a_source_that_does_not_parse_any_more_is_left_to_the_emit(mine: Library, tmp_path: Path) -> None:
    mine.scan()
    (mine.root / "helper.py").write_text("def f(:\n")
    assert emitted(2, tmp_path, mine) == 2
    assert emitted(2, tmp_path, mine) == 2


@pytest.mark.parametrize(
    ("line", "again"),
    [
        ("import elsewhere", 2),
        ("from elsewhere.deep import g", 2),
        ("from .folder import g", 2),
        ("from . import folder", 2),
        ("from .folder.deep import g", 2),
        ("from .. import g", 2),
        ("import math, jax.numpy, numpy as np", 0),
        ("from kernelgen.kernels import common", 0),
        ("from . import helper", 0),
    ],
)
def test_what_imports_more_than_a_digest_covers_is_emitted_by_every_build(
    mine: Library, tmp_path: Path, line: str, again: int
) -> None:
    (mine.root / "folder").mkdir()
    with (mine.root / "helper.py").open("a") as stream:
        stream.write(f"{line}\n")
    assert emitted(2, tmp_path, mine) == 2
    assert emitted(2, tmp_path, mine) == again


def test_a_module_of_the_same_name_in_the_built_in_library_counts_too(
    mine: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin = Library("kernels", tmp_path / "kernels")
    builtin.root.mkdir()
    (builtin.root / "helper.py").write_text("X = 1\n")
    monkeypatch.setattr("kernelgen.emitters.library.builtin_library", lambda: builtin)
    with (mine.root / "helper.py").open("a") as stream:
        stream.write("from kernelgen.kernels import helper\n")
    assert emitted(2, tmp_path, mine) == 2
    assert emitted(2, tmp_path, mine) == 0
    (builtin.root / "helper.py").write_text("X = 2\n")
    assert emitted(2, tmp_path, mine) == 2


def test_no_emitter_of_the_built_in_library_is_emitted_by_every_build(tmp_path: Path) -> None:
    source = builtin_library()
    made = up_to_date.HloFiles(tmp_path, [source])
    relu = plan(1).kernels[0].spec
    known = {
        # As many inputs as an in-place op may have.
        r.module: made.inputs(Kernel(KernelSpec.make(op, relu.inputs * 3, relu.output), r.module))
        for op, r in source.scan().items()
    }
    assert len(known) > 10
    assert [module for module, inputs in known.items() if inputs is None] == []


def test_an_input_of_one_language_is_not_an_input_of_kernels_in_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, library = tmp_path / "kernelgen", Library("mine", tmp_path / "mine")
    files = ["hlo/lower.py", "languages/__init__.py", "../nki_interpreter/language.py", "languages/numpy/tensor.py"]
    for file in files:
        (own / file).parent.mkdir(parents=True, exist_ok=True)
        (own / file).write_text("")
    library.root.mkdir()
    sources = {
        "plain": ("jax", "import jax.numpy\n"),
        "around": ("jax", "from kernelgen.languages.nki import inline\n"),
        "any": ("jax", "from kernelgen import languages\n"),
        "nki": ("nki", "import nki.language\n"),
        "numpy": ("numpy", "from nkipy.core import tensor_apis\n"),
    }
    for name, (_, text) in sources.items():
        (library.root / f"{name}.py").write_text(text)
    monkeypatch.setattr(up_to_date, "_KERNELGEN", own)
    spec = plan(1).kernels[0].spec

    def inputs() -> dict[str, str]:
        made = up_to_date.HloFiles(tmp_path, [library])
        found = {n: made.inputs(Kernel(spec, n, "mine", language=of)) for n, (of, _) in sources.items()}
        return {name: digest for name, digest in found.items() if digest}

    changes = {}
    before = inputs()
    assert len(before) == len(sources)
    for file in files:
        (own / file).write_text("# edited")
        after = inputs()
        changes[file] = {name for name in sources if after[name] != before[name]}
        before = after
    assert changes == {
        "hlo/lower.py": {*sources},
        "languages/__init__.py": {*sources},
        "../nki_interpreter/language.py": {"around", "any", "nki"},
        "languages/numpy/tensor.py": {"any", "numpy"},
    }


@pytest.mark.parametrize("name", ["hlo", "neff", "logs", "tmp", "lock"])
def test_a_link_in_the_place_of_our_own_files_is_refused(tmp_path: Path, name: str) -> None:
    other = tmp_path / "other"
    other.write_text("somebody's") if name == "lock" else other.mkdir()
    settings = build_folder.BuildSettings(tmp_path / "out", "simulator", "simulator 1", None, jobs=1, memory_mb=1000)
    settings.state.mkdir(parents=True)
    (settings.state / name).symlink_to(other)
    with (
        pytest.raises(KernelgenError, match=rf"{name} is a link: kernelgen .*; remove it"),
        build_folder.locked(settings),
    ):
        pass
    assert name != "lock" or other.read_text() == "somebody's"


def test_a_pipe_in_the_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    settings = build_folder.BuildSettings(tmp_path / "out", "simulator", "simulator 1", None, jobs=1, memory_mb=1000)
    settings.state.mkdir(parents=True)
    os.mkfifo(settings.state / "lock")
    with pytest.raises(KernelgenError, match="lock is not a file"), build_folder.locked(settings):
        pass
