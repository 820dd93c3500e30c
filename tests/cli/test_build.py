"""`kernelgen build` runs a whole build; a kernel that fails in any way fails alone."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import Done, environment

pytestmark = pytest.mark.usefixtures("kept_workers")

Run = Callable[..., Done]

EMITTERS = """
import os, pathlib, signal, sys, time
from kernelgen.emitters import emitter

@emitter("refuse")
def refuse(x):
    raise ValueError("this kernel is broken")

@emitter("too_short")
def too_short(x, *, out):
    from kernelgen.kernels.common import result
    return result(x[..., :2], out)

@emitter("die")
def die(x):
    print("last words", file=sys.__stderr__, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

@emitter("hang")
def hang(x):
    pathlib.Path(__file__).with_name("hanging").write_text(str(os.getpid()))
    time.sleep(600)

@emitter("twice")
def twice(x):
    return x + x
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with emitters in `mine`, some of them broken."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/own.py").write_text(EMITTERS)
    return tmp_path


def manifest(folder: Path, *ops: str, name: str = "small", targets: str = "trn1") -> Path:
    lines = ["format: 1", f"name: {name}", f"targets: [{targets}]", "kernels:"]
    for op in ops:
        second = ', "(8,4,1,1)/f32"' if op in ("add", "mul") else ""
        lines.append(f'  - {{op: {op}, inputs: ["(8,4,1,1)/f32"{second}], output: "(8,4,1,1)/f32"}}')
    path = folder / f"{name}.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def build(kernelgen: Run, folder: Path, *more: str | Path) -> Done:
    return kernelgen("build", *more, "-o", folder / "out", "--kernels", folder / "mine", "--compiler", "simulator")


def leftovers(out: Path) -> list[Path]:
    return [p for p in out.rglob("*") if p.suffix in (".tmp", ".old")]


def test_the_whole_job(kernelgen: Run, basic: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = kernelgen("build", basic, "--target", "trn1", "-o", out, "-j", "2", "--compiler", "simulator")
    assert done.code == 0, done.err
    assert re.search(r"^10 built \(10 compiled, 0 up to date\), 0 failed, \d+\.\d s$", done.out, re.MULTILINE)
    assert done.err.splitlines()[-1] == "[21/21] bundle basic_trn1" and "\x1b" not in done.err
    index = json.loads((out / "basic_trn1/index.json").read_text())
    assert len(index["kernels"]) == 10
    for kernel in index["kernels"]:
        assert (out / "basic_trn1" / kernel["neff"]).stat().st_size == kernel["neff_size"]
    assert (out / "basic_trn1.kernels.gguf").read_bytes()[:4] == b"GGUF"
    assert sorted(p.name for p in out.iterdir()) == [".kernelgen", "basic_trn1", "basic_trn1.kernels.gguf"]
    assert leftovers(out) == []


def test_what_is_up_to_date_is_not_compiled_again(kernelgen: Run, folder: Path) -> None:
    first = manifest(folder, "add", "relu")
    assert "2 built (2 compiled, 0 up to date)" in build(kernelgen, folder, first).out
    pack = (folder / "out/small_trn1.kernels.gguf").read_bytes()
    done = build(kernelgen, folder, first)
    assert "2 built (0 compiled, 2 up to date)" in done.out and "no work to do" in done.err
    assert (folder / "out/small_trn1.kernels.gguf").read_bytes() == pack
    more = manifest(folder, "add", "relu", "silu")
    assert "3 built (1 compiled, 2 up to date)" in build(kernelgen, folder, more).out
    other = manifest(folder, "relu", name="other", targets="trn1, inf2")
    assert "2 built (1 compiled, 1 up to date)" in build(kernelgen, folder, other).out
    # The folder may move.
    (folder / "out").rename(folder / "moved")
    words = ["build", other, "-o", folder / "moved", "--kernels", folder / "mine", "--compiler", "simulator"]
    assert "(0 compiled, 2 up to date)" in kernelgen(*words).out


def test_an_emitter_is_compiled_again_only_when_its_meaning_changes(kernelgen: Run, folder: Path) -> None:
    path = manifest(folder, "twice")
    assert "(1 compiled" in build(kernelgen, folder, path).out
    source = folder / "mine/own.py"
    source.write_text(EMITTERS.replace("return x + x", "# a comment\n    return x + x"))
    done = build(kernelgen, folder, path)
    assert "(0 compiled, 1 up to date)" in done.out and "emit twice-" in done.err
    source.write_text(EMITTERS.replace("return x + x", "return x * 2"))
    assert "(1 compiled" in build(kernelgen, folder, path).out


def test_a_neff_that_changed_is_refused_and_then_made_again(kernelgen: Run, folder: Path) -> None:
    path = manifest(folder, "add")
    build(kernelgen, folder, path)
    (neff,) = (folder / "out/.kernelgen/neff").glob("*.neff")
    whole = neff.read_bytes()
    changed = bytearray(whole)
    changed[60] ^= 1  # no digest of the payload covers this byte
    neff.write_bytes(changed)
    done = build(kernelgen, folder, path)
    assert done.code == 1 and "changed after it was compiled" in done.err
    done = build(kernelgen, folder, path)
    assert (done.code, neff.read_bytes()) == (0, whole)
    assert "(1 compiled" in done.out


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("refuse", "this kernel is broken"),
        ("too_short", "the kernel returns [1, 1, 4, 2], and the manifest says (8,4,1,1)/f32, which is [1, 1, 4, 8]"),
        ("die", "error: the process that ran this step died"),
    ],
)
def test_a_kernel_that_fails_costs_that_kernel_only(kernelgen: Run, folder: Path, op: str, reason: str) -> None:
    path, good = manifest(folder, "add", op, "relu"), manifest(folder, "relu", name="good")
    done = build(kernelgen, folder, path, good, "-j", "1")
    assert done.code == 1
    assert re.search(rf"^FAILED: \[code=1\] hlo/{op}-8x4-f32-[0-9a-f]{{12}}\.hlo\.pb ", done.err, re.MULTILINE)
    assert reason in done.err and (op != "die" or "last words" in done.err)
    assert "2 built (2 compiled, 0 up to date), 1 failed" in done.out
    assert "small_trn1 was not written: 1 of its 3 kernels failed" in done.out and "good_trn1 was not" not in done.out
    assert [p.name for p in (folder / "out").glob("*.gguf")] == ["good_trn1.kernels.gguf"]
    assert leftovers(folder / "out") == []
    # The kernel that is mended is all that is compiled.
    body = EMITTERS.partition(f"def {op}(x")[2].partition("\n@")[0]
    (folder / "mine/own.py").write_text(EMITTERS.replace(body, body.partition(":")[0] + ":\n    return -x\n"))
    assert "2 built (1 compiled, 1 up to date), 0 failed" in build(kernelgen, folder, manifest(folder, "add", op)).out


def test_only_builds_a_part_and_no_bundle(kernelgen: Run, basic: Path, tmp_path: Path) -> None:
    words = ["build", basic, "-o", tmp_path, "--target", "trn1", "--compiler", "simulator"]
    done = kernelgen(*words, "--only", "add", "--dry-run")
    assert [line.partition("-1024")[0] for line in done.out.splitlines()] == ["compile add", "emit add"]
    done = kernelgen(*words, "--only", "re*")
    assert done.code == 0
    assert "2 built" in done.out
    assert "no bundles were written: --only leaves kernels out" in done.out
    assert [p.name for p in tmp_path.iterdir()] == [".kernelgen"]
    done = kernelgen(*words, "--only", "nothing*")
    assert done.code == 2
    assert "--only nothing*: none of 10 kernels matches" in done.err


def test_forms(kernelgen: Run, folder: Path) -> None:
    path = manifest(folder, "add")
    assert build(kernelgen, folder, path, "--form", "embed").code == 0
    out = folder / "out"
    assert {p.suffix for p in out.iterdir() if p.is_file()} == {".gguf", ".S", ".c", ".h"}
    assert not (out / "small_trn1").exists()


class Hanging:
    """A build in its own process that hangs in a kernel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "mine/hanging"
        self.process: subprocess.Popen[str] | None = None

    def start(self, path: Path) -> subprocess.Popen[str]:
        out = str(self.folder / "out")
        arguments = ["build", str(path), "-o", out, "-j", "1", "--kernels", str(self.folder / "mine")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kernelgen", *arguments, "--compiler", "simulator"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while not self.file.exists() or not self.file.read_text():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)
        return self.process

    def is_alive(self) -> bool:
        try:
            state = Path(f"/proc/{self.file.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        return state != "Z"


@pytest.fixture
def hanging(folder: Path) -> Iterator[Hanging]:
    made = Hanging(folder)
    yield made
    if made.process:
        made.process.terminate()
        made.process.communicate()


def test_a_stopped_build_stops_its_steps_and_leaves_nothing_half_written(
    kernelgen: Run, folder: Path, hanging: Hanging
) -> None:
    process = hanging.start(manifest(folder, "hang", "add"))
    other = build(kernelgen, folder, manifest(folder, "add", name="second"))
    assert other.code == 2 and f"{folder}/out: another build is at work there" in other.err
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert time.monotonic() - begun < 5
    assert "Traceback" not in err
    while hanging.is_alive():
        assert time.monotonic() - begun < 5
        time.sleep(0.02)
    assert leftovers(folder / "out") == []
    assert build(kernelgen, folder, manifest(folder, "add")).code == 0


def test_a_terminal_gets_one_line_of_progress(folder: Path) -> None:
    path = manifest(folder, "add", "refuse")
    arguments = ["build", str(path), "-o", str(folder / "out"), "--kernels", str(folder / "mine")]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kernelgen", *arguments, "--compiler", "simulator"],
        env={**environment(), "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        seen += chunk
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 1
    assert b"\r[1/" in seen and b"this kernel is broken" in seen
    assert "1 built" in out


def test_an_output_folder_that_cannot_be_made(kernelgen: Run, folder: Path) -> None:
    (folder / "out").write_text("a file")
    done = build(kernelgen, folder, manifest(folder, "add"))
    assert done.code == 2
    assert str(folder / "out") in done.err
    assert "Traceback" not in done.err


def test_settings_of_jax_and_a_missing_home_reach_no_build(
    process: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    settings = {"HOME": "/dev/null/home", "JAX_PLATFORMS": "cuda", "XLA_FLAGS": "--xla_no_such_flag=1"}
    words = ["build", manifest(folder, "add"), "-o", folder / "out", "--compiler", "simulator"]
    done = process(*words, NEURON_KERNELGEN_NEFF_CACHE="", **settings)
    assert done.returncode == 0, done.stderr
    assert "ignored: JAX_PLATFORMS, XLA_FLAGS" in process("doctor", **settings).stdout
