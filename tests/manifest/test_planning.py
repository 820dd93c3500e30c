"""`kernelgen validate` and `plan` print the same bytes everywhere, and are quick."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen import cli
from kernelgen.emitters.library import Library
from kernelgen.plan import Plan

ROOT = Path(__file__).parents[2]
MANIFESTS = [ROOT / "manifests" / name for name in ("basic.yaml", "llama3.yaml")]


def kernelgen(*args: object, cwd: Path | None = None, **environment: str) -> str:
    """Runs the program in a process of its own; returns its output."""
    command = [sys.executable, "-m", "kernelgen", *map(str, args)]
    path = os.pathsep.join([str(ROOT / "tools"), *filter(None, sys.path)])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plan_is_the_same_anywhere(library: Library, tmp_path: Path) -> None:
    first = kernelgen("plan", *MANIFESTS, "--kernels", library.root, "--format", "json", PYTHONHASHSEED="1")
    shutil.copytree(library.root, tmp_path / "elsewhere" / library.root.name)
    for path in MANIFESTS:
        shutil.copy(path, tmp_path)
    moved = ["llama3.yaml", "basic.yaml", "--kernels", f"elsewhere/{library.root.name}"]
    second = kernelgen(
        "plan", *moved, "--format", "json", cwd=tmp_path, PYTHONHASHSEED="2", LC_ALL="C", TZ="Asia/Tokyo"
    )
    assert first == second
    plan = Plan.from_json(first)
    assert [b.id for b in plan.bundles] == [f"{m}_{t}" for m in ("basic", "llama3") for t in ("inf2", "trn1", "trn2")]
    assert len(plan.neffs) == 3 * len(plan.kernels)


def test_planning_imports_nothing_heavy(library: Library) -> None:
    code = (
        "import sys; from kernelgen import cli;"
        f"cli.run(['plan', {str(MANIFESTS[0])!r}, '--kernels', {str(library.root)!r}]);"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'jax', 'jaxlib', 'numpy', 'jsonschema', 'gguf', 'jinja2', 'rich'}))"
    )
    path = os.pathsep.join([str(ROOT / "tools"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("10 kernels, 30 compiles, 3 bundles\n[]\n")


def test_validate_says_what_a_manifest_holds(capsys: pytest.CaptureFixture[str], library: Library) -> None:
    assert cli.run(["validate", *map(str, MANIFESTS), "--kernels", str(library.root)]) == 0
    assert (
        capsys.readouterr().out == "basic: 10 kernels for trn1, inf2, trn2\nllama3: 186 kernels for trn1, inf2, trn2\n"
    )


def test_a_plan_for_one_target_and_one_it_is_not_for(capsys: pytest.CaptureFixture[str], library: Library) -> None:
    args = ["plan", str(MANIFESTS[0]), "--kernels", str(library.root)]
    assert cli.run([*args, "--target", "trn1"]) == 0
    assert capsys.readouterr().out.endswith(
        "bundle basic_trn1: 10 kernels, compiled as trn1\n10 kernels, 10 compiles, 1 bundles\n"
    )
    assert cli.run([*args, "--target", "trn3"]) == 2
    assert "manifest 'basic' is for trn1, inf2, trn2, not for trn3" in capsys.readouterr().err


def group(count: int, wrong: bool) -> str:
    """A manifest with a chain of nodes, each with its own weight; `wrong` makes every reference wrong."""
    inputs = "".join(f'      w{i}: "(64,1,1,1)/f32"\n' for i in range(count))
    nodes = "".join(
        f"      - {{name: n{i}, op: mul, inputs: [{'m' if wrong else 'n'}{i - 1}, w{i}], output: '(64,1,1,1)/f32'}}\n"
        for i in range(1, count)
    )
    head = "format: 1\nname: big\ntargets: [trn1]\ngraphs:\n  - inputs:\n" + inputs + "    nodes:\n"
    first = "      - {name: n0, op: sqr, inputs: [w0], output: '(64,1,1,1)/f32'}\n"
    return f"{head}{first}{nodes}    outputs: [{'m' if wrong else 'n'}{count - 1}]\n"


def kernels(count: int, wrong: bool) -> str:
    """A manifest with op kernels; `wrong` makes every result wrong."""
    entry = "  - {{op: mul, inputs: ['({n},1,1,1)/f32', '({n},1,1,1)/f32'], output: '({m},1,1,1)/f32'}}\n"
    entries = "".join(entry.format(n=n, m=n + wrong) for n in range(1, count + 1))
    return f"format: 1\nname: big\ntargets: [trn1]\nkernels:\n{entries}"


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("make", [group, kernels])
def test_work_grows_as_a_manifest(
    library: Library, tmp_path: Path, make: Callable[[int, bool], str], wrong: bool
) -> None:
    calls = []
    # The first run imports and compiles what the others use.
    for count in (10, 300, 600, 1200):
        (tmp_path / "big.yaml").write_text(make(count, wrong))
        done = 0

        def called(*_: object) -> None:
            nonlocal done
            done += 1

        sys.setprofile(called)
        try:
            code = cli.run(["plan", str(tmp_path / "big.yaml"), "--kernels", str(library.root)])
        finally:
            sys.setprofile(None)
        assert code == (2 if wrong else 0)
        calls.append(done)
    # Twice the entries, twice the calls: the second step is twice the first.
    assert calls[3] - calls[2] < 2.2 * (calls[2] - calls[1]), calls
