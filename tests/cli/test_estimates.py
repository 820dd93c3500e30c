"""Checks of a kernel's HLO before any compile: `kernelgen plan --estimate` and `kernelgen validate --lint`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.cli import estimates
from kernelgen.cli import plan as cli_plan

from .conftest import Done

Run = Callable[..., Done]

MANIFEST = """
format: 1
name: m
targets: [trn1, trn2]
kernels:
  - {op: mul_mat, inputs: ["(512,1024,1,1)/f16", "(512,256,1,1)/f32"], output: "(1024,256,1,1)/f32"}
  - {op: relu, inputs: ["(8,4,1,1)/f32"], output: "(8,4,1,1)/f32"}
"""

NARROW = """
from kernelgen.emitters import emitter

@emitter("narrow")
def narrow(x):
    print("not for standard output")
    return x.astype("float8_e4m3fn").astype("float32")
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "m.yaml"
    path.write_text(MANIFEST)
    return path


def limited(monkeypatch: pytest.MonkeyPatch, instructions: int) -> None:
    (what, name, _, taker), descriptors = estimates.LIMITS
    monkeypatch.setattr(estimates, "LIMITS", ((what, name, instructions, taker), descriptors))


def test_each_compile_has_a_line(kernelgen: Run, manifest: Path) -> None:
    done = kernelgen("plan", manifest, "--estimate")
    assert (done.code, done.err) == (0, "")
    lines = [line.split()[:2] for line in done.out.splitlines()]
    assert [(kernel.split("-")[0], key) for kernel, key in lines] == [
        ("mul_mat", "trn1"),
        ("mul_mat", "trn2"),
        ("relu", "trn1"),
        ("relu", "trn2"),
    ]
    assert " instructions (PE " in done.out and "DMA descriptors, code " in done.out and ", compile 1.0 GiB" in done.out
    some = kernelgen("plan", manifest, "--estimate", "--only", "relu", "--target", "trn2")
    assert some.out == done.out.splitlines(keepends=True)[-1]


def test_half_of_a_limit_is_a_warning_and_all_of_it_an_error(
    kernelgen: Run, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = kernelgen("plan", manifest, "--estimate", "--only", "mul_mat", "--target", "trn1").out.splitlines()
    total = int(line.split()[2].replace(",", ""))
    limited(monkeypatch, total)
    done = kernelgen("plan", manifest, "--estimate", "--target", "trn1")
    assert done.code == 0 and done.err.count("warning: ") == 1
    assert (
        f"warning: kernel {line.split()[0]} for trn1: about {total:,} instructions; neuronx-cc takes {total:,}"
        in done.err
    )
    limited(monkeypatch, 2 * total)
    assert kernelgen("plan", manifest, "--estimate", "--target", "trn1").err == ""
    limited(monkeypatch, total // 3)
    done = kernelgen("plan", manifest, "--estimate", "--target", "trn1")
    assert done.code == 1 and "error: kernel mul_mat-" in done.err and "relu" not in done.err
    assert "64 tokens in place of 256 would do" in done.err
    limited(monkeypatch, 1)  # relu has 4 rows, and more than 4 instructions
    done = kernelgen("plan", manifest, "--estimate", "--target", "trn1")
    assert done.code == 1 and "no number of tokens would do" in done.err


GROUP = """
format: 1
name: g
targets: [trn1, trn2]
graphs:
  - name: g
    inputs: {w: "(512,1024,1,1)/f16", x: "(512,4,1,1)/f32"}
    nodes:
      - {name: a, op: mul_mat, inputs: [w, x], output: "(1024,4,1,1)/f32"}
      - {name: b, op: silu, inputs: [a], output: "(1024,4,1,1)/f32"}
    outputs: [b]
"""


def test_a_plan_warns_of_groups_with_too_many_products(
    kernelgen: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "g.yaml"
    path.write_text(GROUP)
    assert kernelgen("plan", path).err == ""
    # 4 tiles of the summed axis times 2 of 512 columns, and twice 4 by 8 transposes: 72 times 1.5.
    monkeypatch.setattr(cli_plan, "MAX_INSTRUCTIONS", 200)
    done = kernelgen("plan", path)
    assert done.code == 0 and done.err.startswith("warning: kernel graph-2-")
    assert done.err.count("warning: ") == 1, "trn2 has two cores for it"
    assert " for trn1: its products may take 108 instructions, and neuronx-cc takes 200: fewer layers" in done.err


def test_the_table_is_all_there_is(kernelgen: Run, manifest: Path) -> None:
    for options in (["--estimate", "--format", "json"], ["--only", "relu"]):
        done = kernelgen("plan", manifest, *options)
        assert done.code == 2 and "--estimate prints a table" in done.err


def test_validate_lints_what_is_emitted(kernelgen: Run, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "narrow.py").write_text(NARROW)
    manifest = tmp_path / "m.yaml"

    def write(flags: str) -> None:
        entry = '{op: narrow, inputs: ["(8,1,1,1)/f32"], output: "(8,1,1,1)/f32"}'
        manifest.write_text(
            f"format: 1\nname: m\ntargets: [trn1, trn2]\ncompiler: {{extra_flags: [{flags}]}}\nkernels: [{entry}]\n"
        )

    write("--verbose=info")
    assert kernelgen("validate", manifest, "--kernels", folder).code == 0
    done = kernelgen("validate", manifest, "--kernels", folder, "--lint")
    assert (done.code, done.out) == (1, "")
    assert done.err.count("[NCC_EVRF051]") == 2 and "for trn1: " in done.err and "for trn2: " in done.err
    write("--experimental-unsafe-fp8e4m3fn-as-fp8e4m3")
    done = kernelgen("validate", manifest, "--kernels", folder, "--lint")
    assert (done.code, done.out) == (0, "m: 1 kernel for trn1, trn2\n"), done.err
