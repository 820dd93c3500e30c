"""Data that an emitter reads beside its sources is an input of its HLO, for any way and time of reading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.errors import KernelgenError
from kernelgen.steps import worker

from .conftest import Done

pytestmark = pytest.mark.usefixtures("kept_workers")

Run = Callable[..., Done]

TENSOR = "(4,1,1,1)/f32"

HEAD = """
import functools, io, os, pathlib, sqlite3, subprocess, sys
import jax.numpy as jnp
import numpy as np
from kernelgen.emitters import emitter

HERE = pathlib.Path(__file__).parent
"""

WHEN = {
    "when it emits": "@emitter('scaled')\ndef scaled(x):\n    return x * float((HERE / 'factor.txt').read_text())\n",
    "when it is imported": (
        "FACTOR = float((HERE / 'factor.txt').read_text())\n\n@emitter('scaled')\ndef scaled(x):\n    return x * FACTOR\n"
    ),
    "once for all kernels": (
        "@functools.cache\ndef factor():\n    return float((HERE / 'factor.txt').read_text())\n\n"
        "@emitter('scaled')\ndef scaled(x):\n    return x * factor()\n"
    ),
    "by its descriptor": (
        "@emitter('scaled')\ndef scaled(x):\n    file = os.open(HERE / 'factor.txt', os.O_RDONLY)\n"
        "    return x * float(os.read(file, 100))\n"
    ),
    "relative to where it goes": (
        "@emitter('scaled')\ndef scaled(x):\n    os.chdir(HERE)\n    return x * float(open('factor.txt').read())\n"
    ),
    "in NumPy": "@emitter('scaled')\ndef scaled(x):\n    return x * float(np.loadtxt(HERE / 'factor.txt'))\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/factor.txt").write_text("2")
    return tmp_path


def emitter(folder: Path, source: str) -> None:
    (folder / "mine/own.py").write_text(HEAD + source)


def build(kernelgen: Run, folder: Path, *more: str) -> Done:
    entries = "".join(f'  - {{op: scaled, inputs: ["({n},1,1,1)/f32"], output: "({n},1,1,1)/f32"}}\n' for n in (4, 5))
    (folder / "m.yaml").write_text(f"format: 1\nname: m\ntargets: [trn1]\nkernels:\n{entries}")
    words = ["-o", folder / "out", "-j", "1", "--compiler", "simulator", "--kernels", folder / "mine", *more]
    return kernelgen("build", folder / "m.yaml", *words)


@pytest.mark.parametrize(
    "when",
    [
        "when it emits",
        *(pytest.param(when, marks=pytest.mark.long) for when in ("when it is imported", "once for all kernels")),
    ],
)
def test_an_edit_of_data_builds_what_was_made_from_it(kernelgen: Run, folder: Path, when: str) -> None:
    emitter(folder, WHEN[when])
    done = build(kernelgen, folder)
    assert "2 built (2 compiled, 0 up to date)" in done.out, done.err
    assert "would emit 0 of 2 kernels" in build(kernelgen, folder, "--dry-run").out
    assert "2 built (0 compiled, 2 up to date)" in build(kernelgen, folder).out
    status = (folder / "mine/factor.txt").stat()
    (folder / "mine/factor.txt").write_text("3")
    os.utime(folder / "mine/factor.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "would emit 2 of 2 kernels" in build(kernelgen, folder, "--dry-run").out
    assert "2 built (2 compiled, 0 up to date)" in build(kernelgen, folder).out
    (folder / "mine/other.txt").write_text("what is not read")
    assert "would emit 0 of 2 kernels" in build(kernelgen, folder, "--dry-run").out


def test_a_file_that_was_not_there_and_a_folder_that_was_listed_are_data_too(kernelgen: Run, folder: Path) -> None:
    emitter(
        folder,
        "@emitter('scaled')\ndef scaled(x):\n"
        "    try:\n        x = x * float((HERE / 'more.txt').read_text())\n    except FileNotFoundError:\n        pass\n"
        "    return x + len(list((HERE / 'tables').glob('*.txt')))\n",
    )
    (folder / "mine/tables").mkdir()
    assert "2 built (2 compiled, 0 up to date)" in build(kernelgen, folder).out
    assert "2 built (0 compiled, 2 up to date)" in build(kernelgen, folder).out
    (folder / "mine/more.txt").write_text("5")
    assert "2 built (2 compiled, 0 up to date)" in build(kernelgen, folder).out
    (folder / "mine/tables/a.txt").touch()
    assert "2 built (2 compiled, 0 up to date)" in build(kernelgen, folder).out
    assert "2 built (0 compiled, 2 up to date)" in build(kernelgen, folder).out


def test_a_file_that_the_emitter_writes_first_is_not_data(kernelgen: Run, folder: Path) -> None:
    emitter(
        folder,
        "import tempfile\n\n@emitter('scaled')\ndef scaled(x):\n"
        "    with tempfile.TemporaryDirectory() as scratch:\n        file = pathlib.Path(scratch, 'own')\n"
        "        file.write_text('2')\n        return x * float(file.read_text())\n",
    )
    assert build(kernelgen, folder).code == 0
    assert "would emit 0 of 2 kernels" in build(kernelgen, folder, "--dry-run").out


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run(['true'])",
        pytest.param("os.system('true')", marks=pytest.mark.long),
        pytest.param("open('/dev/zero', 'rb').read(1)", marks=pytest.mark.long),
        pytest.param("open('/proc/uptime').read()  # of no size, and never the same", marks=pytest.mark.long),
    ],
)
def test_what_kernelgen_cannot_follow_is_emitted_by_every_build(kernelgen: Run, folder: Path, line: str) -> None:
    emitter(folder, f"@emitter('scaled')\ndef scaled(x):\n    {line}\n    return x + x\n")
    assert "2 built (2 compiled, 0 up to date)" in build(kernelgen, folder).out
    assert "would emit 2 of 2 kernels" in build(kernelgen, folder, "--dry-run").out
    assert "2 built (0 compiled, 2 up to date)" in build(kernelgen, folder).out


# --- the steps as Bazel and CMake call them -------------------------------------------------------------------------------


def step(folder: Path, name: str, *more: str) -> tuple[int, str]:
    spec = json.dumps({"op": "scaled", "inputs": [TENSOR], "output": TENSOR, "params": {}, "alias": None})
    words = [f"--spec={spec}", "--library=mine", f"--emitter={folder / 'mine/own.py'}"]
    return worker.run([name, *words, *more])


def declared(folder: Path, *data: Path) -> tuple[int, str]:
    words = [f"--data={path}" for path in data]
    return step(folder, "emit", f"--output={folder / 'k.hlo.pb'}", "--undeclared=refuse", *words)


@pytest.mark.parametrize("when", WHEN)
def test_data_that_is_not_declared_is_refused_with_its_place(folder: Path, when: str) -> None:
    emitter(folder, WHEN[when])
    data = folder / "mine/factor.txt"
    code, said = declared(folder)
    line = next(n for n, text in enumerate((HEAD + WHEN[when]).splitlines(), 1) if "factor.txt" in text)
    assert code == 1 and f"own.py:{line}:1: error: kernel scaled-4-f32-" in said
    assert f"its emitter reads {data}, which is not a declared input" in said and "`data` of neuron.kernels" in said
    assert not (folder / "k.hlo.pb").exists()
    # The same process, as a persistent worker: one request's reads do not affect the next.
    assert declared(folder, data) == (0, "")
    two = (folder / "k.hlo.pb").read_bytes()
    assert declared(folder)[0] == 1
    assert declared(folder, folder / "mine") == (0, "")
    data.write_text("3")
    assert declared(folder, data) == (0, "")
    assert (folder / "k.hlo.pb").read_bytes() != two
    data.write_text("2")
    assert declared(folder, data) == (0, "")
    assert (folder / "k.hlo.pb").read_bytes() == two


def test_data_that_is_not_declared_and_so_not_there_is_named(folder: Path) -> None:
    emitter(folder, WHEN["when it emits"])
    (folder / "mine/factor.txt").unlink()
    code, said = declared(folder)
    assert code == 1 and "FileNotFoundError" in said and "factor.txt, which is not a declared input" in said


def test_packages_of_an_environment_below_this_one_are_no_data(folder: Path) -> None:
    """A folder of sources on the interpreter's path is data."""
    paths = [folder / "base" / "site-packages", folder / "sources"]
    for path in paths:
        path.mkdir(parents=True)
    code = "import sys; from kernelgen.emitters import foreign; print([foreign._is_own(path + '/m.py') for path in sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *paths],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*filter(None, sys.path), *paths]))},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[True, False]\n"


def test_another_librarys_data_is_ignored(folder: Path) -> None:
    emitter(folder, WHEN["when it is imported"])
    assert declared(folder, folder / "mine/factor.txt") == (0, "")
    other = folder / "other"
    (other / "mine").mkdir(parents=True)
    emitter(other, "@emitter('scaled')\ndef scaled(x):\n    return x + x\n")
    assert declared(other) == (0, "")


def test_a_depfile_names_the_data(folder: Path) -> None:
    emitter(
        folder, WHEN["when it is imported"] + "\nassert not (HERE / 'x').exists()\nos.path.exists(HERE / 'none/x')\n"
    )
    words = [f"--{name}={folder / name}" for name in ("folder", "stamp", "depfile")]
    (folder / "folder").mkdir()
    assert step(folder, "emit-batch", *words) == (0, "")
    assert f" {folder / 'mine/factor.txt'}" in (folder / "depfile").read_text()
    before = [file.read_bytes() for file in (folder / "folder").iterdir()]
    (folder / "mine/factor.txt").write_text("3")
    assert step(folder, "emit-batch", *words) == (0, "")
    assert before != [file.read_bytes() for file in (folder / "folder").iterdir()]


def test_a_depfile_names_the_folder_of_a_file_that_is_not_there(folder: Path) -> None:
    emitter(
        folder,
        "@emitter('scaled')\ndef scaled(x):\n    try:\n        return x * float((HERE / 'no/such.txt').read_text())\n"
        "    except OSError:\n        return x\n",
    )
    words = [f"--{name}={folder / name}" for name in ("folder", "stamp", "depfile")]
    assert step(folder, "emit-batch", *words) == (0, "")
    assert f"  {folder / 'mine'} \\\n" in (folder / "depfile").read_text()


@pytest.mark.parametrize("step_name", ["emit", "emit-batch"])
def test_what_no_build_tool_can_follow_is_refused(folder: Path, step_name: str) -> None:
    emitter(folder, "@emitter('scaled')\ndef scaled(x):\n    subprocess.run(['/bin/true'])\n    return x + x\n")
    words = [f"--{name}={folder / name}" for name in ("folder", "stamp", "depfile", "output")]
    code, said = step(folder, step_name, *words, "--undeclared=refuse")
    assert code == 1 and "its emitter runs '/bin/true': the build can't tell when the result of that changes" in said
    assert f"own.py:{(HEAD.count(chr(10)) + 3)}:1: error: kernel scaled-4-f32-" in said
    assert not (folder / "output").exists() and not (folder / "stamp").exists()


def test_an_error_of_the_emitters_own_is_a_failure(folder: Path) -> None:
    emitter(
        folder,
        "from kernelgen.errors import KernelgenError\n\n"
        "@emitter('scaled')\ndef scaled(x):\n    raise KernelgenError('done', exit_code=0)\n",
    )
    code, said = step(folder, "emit", f"--output={folder / 'k'}")
    assert code == 1 and "done" in said
    assert issubclass(KernelgenError, Exception) and not (folder / "k").exists()
