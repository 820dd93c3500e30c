"""`--used` selects the kernels of a recorded manifest that ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Done

pytestmark = pytest.mark.usefixtures("kept_workers")

Kernelgen = Callable[..., Done]

HEAD = "format: 1\nname: m\ntargets: [trn1]\nkernels:\n"


def entry(op: str, comment: str = "") -> str:
    return f'  - {{op: "{op}", inputs: ["(64,4,1,1)/f32"], output: "(64,4,1,1)/f32"}}{comment}\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


RECORDED = (
    HEAD
    + entry("relu", "  # asked for 3 times, executed 1 time")
    + entry("silu", "  # asked for 12 times, executed 0 times")
    + '  # - {op: "nothing", inputs: [], output: "(64,4,1,1)/f32"}  # asked for 1 time, executed 4 times\n'
    + entry("gelu", "  # asked for 1 time, executed 10 times")
)


def test_what_did_not_run_is_left_out(kernelgen: Kernelgen) -> None:
    Path("m.yaml").write_text(RECORDED)
    done = kernelgen("plan", "m.yaml", "--used")
    assert done.code == 0 and [line.split("-")[0] for line in done.out.splitlines()[:2]] == ["gelu", "relu"], done
    assert "2 kernels, 2 compiles, 1 bundles" in done.out
    assert "3 kernels, " in kernelgen("plan", "m.yaml").out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("build", "--dry-run", "-o", "out", "--compiler", "simulator"), "would emit 2 of 2 kernels"),
        (("emit", "-o", "out"), "relu-64x4-f32-"),
        (("generate", "cmake", "-o", "out", "--compiler", "simulator"), "2 kernels, 2 compiles"),
        (("generate", "bazel", "-o", "out"), ""),
    ],
    ids=["build", "emit", "cmake", "bazel"],
)
def test_every_command_that_makes_something_of_a_manifest_takes_it(
    kernelgen: Kernelgen, words: tuple[str, ...], expected: str
) -> None:
    Path("m.yaml").write_text(RECORDED)
    done = kernelgen(*words, "--used", "m.yaml")
    assert done.code == 0 and expected in done.out, done
    assert "silu" not in done.out
    assert not [f for f in Path("out").rglob("*") if f.is_file() and ("silu-" in f.name or b"silu-" in f.read_bytes())]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEAD
            + entry("relu", "  # asked for 3 times")
            + entry("silu", "  # asked for 3 times, executed 2 times")
            + entry("gelu"),
            "m.yaml:5:5: error: nothing says how often this kernel ran, nor 1 of the others\n    record it again with",
        ),
        (
            HEAD + entry("relu", "  # asked for 3 times, executed 0 times") + entry("silu"),
            "m.yaml:6:5: error: nothing says how often this kernel ran\n",
        ),
        (
            HEAD
            + entry("relu", "  # asked for 3 times, executed 0 times")
            + entry("gelu", "  # asked for 1 time, executed 0 times"),
            "m.yaml:5:3: error: none of the 2 kernels ran while the manifest was recorded\n",
        ),
        (
            "format: 1\nname: m\ntargets: [trn1]\ngraphs: []\n",
            "m.yaml:1:1: error: this manifest was not recorded, so it does not list which kernels ran\n    leave out --used",
        ),
    ],
)
def test_a_manifest_that_does_not_say_what_ran_is_an_error(kernelgen: Kernelgen, text: str, message: str) -> None:
    Path("m.yaml").write_text(text)
    done = kernelgen("plan", "m.yaml", "--used")
    assert (done.code, done.out) == (2, "") and message in done.err, done
