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

from kernelgen.build import pool

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

@emitter("close")
def close(x):
    os.closerange(0, 256)
    return x + x

@emitter("close_and_wait")
def close_and_wait(x):
    os.closerange(0, 256)
    time.sleep(600)

@emitter("leave")
def leave(x):
    os._exit(7)

@emitter("hang")
def hang(x):
    pathlib.Path(os.environ["HANG_FILE"]).write_text(str(os.getpid()))
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


def no_leftovers(out: Path) -> bool:
    return not [p for p in out.rglob("*") if p.suffix in (".tmp", ".old")] and not (out / ".kernelgen/tmp").exists()


def test_the_whole_job(kernelgen: Run, basic: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = kernelgen("build", basic, "--target", "trn1", "-o", out, "-j", "2", "--compiler", "simulator")
    assert done.code == 0, done.err
    assert re.search(r"^10 built \(10 compiled, 0 up to date\), 0 failed, \d+\.\d s$", done.out, re.MULTILINE)
    index = json.loads((out / "basic_trn1/index.json").read_text())
    assert len(index["kernels"]) == 10
    for kernel in index["kernels"]:
        assert (out / "basic_trn1" / kernel["neff"]).stat().st_size == kernel["neff_size"]
    assert (out / "basic_trn1.kernels.gguf").read_bytes()[:4] == b"GGUF"
    assert sorted(p.name for p in out.iterdir()) == [".kernelgen", "basic_trn1", "basic_trn1.kernels.gguf"]
    assert no_leftovers(out)


def test_what_is_up_to_date_is_not_compiled_again(kernelgen: Run, folder: Path) -> None:
    first = manifest(folder, "add", "relu")
    assert "2 built (2 compiled, 0 up to date)" in build(kernelgen, folder, first).out
    pack = (folder / "out/small_trn1.kernels.gguf").read_bytes()
    assert "2 built (0 compiled, 2 up to date)" in build(kernelgen, folder, first).out
    assert (folder / "out/small_trn1.kernels.gguf").read_bytes() == pack
    more = manifest(folder, "add", "relu", "silu")
    assert "3 built (1 compiled, 2 up to date)" in build(kernelgen, folder, more).out
    other = manifest(folder, "relu", name="other", targets="trn1, inf2")
    assert "2 built (1 compiled, 1 up to date)" in build(kernelgen, folder, other).out


def test_a_bundle_of_another_manifest_is_not_replaced(kernelgen: Run, folder: Path) -> None:
    first = manifest(folder, "add")
    (folder / "elsewhere").mkdir()
    other = manifest(folder / "elsewhere", "relu")
    assert build(kernelgen, folder, first).code == 0
    pack = (folder / "out/small_trn1.kernels.gguf").read_bytes()
    done = build(kernelgen, folder, other)
    assert done.code == 2
    assert f"{folder / 'out'} has a bundle small_trn1 of another manifest, {first}" in done.err
    assert (folder / "out/small_trn1.kernels.gguf").read_bytes() == pack
    first.rename(folder / "moved.yaml")
    assert build(kernelgen, folder, folder / "moved.yaml").code == 0


def test_an_emitter_is_compiled_again_only_when_its_meaning_changes(kernelgen: Run, folder: Path) -> None:
    path = manifest(folder, "twice")
    assert "(1 compiled" in build(kernelgen, folder, path).out
    source = folder / "mine/own.py"
    source.write_text(EMITTERS.replace("return x + x", "# a comment\n    return x + x"))
    assert "(0 compiled, 1 up to date)" in build(kernelgen, folder, path).out
    source.write_text(EMITTERS.replace("return x + x", "return x * 2"))
    assert "(1 compiled" in build(kernelgen, folder, path).out


def test_a_damaged_neff_is_compiled_again(kernelgen: Run, folder: Path) -> None:
    path = manifest(folder, "add")
    build(kernelgen, folder, path)
    (neff,) = (folder / "out/.kernelgen/neff").glob("*.neff")
    whole = neff.read_bytes()
    changed = bytearray(whole)
    changed[60] ^= 1  # no digest of the payload covers this byte
    for damaged in (b"", whole[:500], whole[:-100], bytes(changed)):
        neff.write_bytes(damaged)
        done = build(kernelgen, folder, path)
        assert (done.code, neff.read_bytes()) == (0, whole)
        assert "(1 compiled" in done.out


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("refuse", "this kernel is broken"),
        (
            "too_short",
            "the kernel returns [1, 1, 4, 2], and the manifest says (8,4,1,1)/f32, which is [1, 1, 4, 8]",
        ),
        (
            "die",
            "its worker was killed by SIGKILL, and not because memory ran out: what it ran killed it, or another process",
        ),
        pytest.param("leave", "its worker ended with exit status 7", marks=pytest.mark.long),
        pytest.param("close", "its worker ended with exit status ", marks=pytest.mark.long),
        ("close_and_wait", "its worker closed its standard output, which answers go to: a source closes only what"),
    ],
)
def test_a_kernel_that_fails_costs_that_kernel_only(kernelgen: Run, folder: Path, op: str, reason: str) -> None:
    path = manifest(folder, "add", op, "relu", "silu", "mul")
    done = build(kernelgen, folder, path, "-j", "1")
    assert done.code == 1
    assert re.search(rf"trn1 {op}-8x4-f32-[0-9a-f]{{12}} FAILED\n", done.err)
    assert reason in done.err
    assert "4 built (4 compiled, 0 up to date), 1 failed" in done.out
    assert "small_trn1 was not written: 1 of its 5 kernels failed" in done.out
    assert not list((folder / "out").glob("small_trn1*"))
    assert no_leftovers(folder / "out")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (5, 6, "was killed by SIGKILL: the machine ran out of memory; fewer jobs (-j) need less"),
        (None, None, "was killed by SIGKILL: most likely the machine ran out of memory; fewer jobs (-j) need less"),
    ],
)
def test_a_worker_that_linux_killed_for_want_of_memory_is_reported_as_such(
    kernelgen: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, before: int | None, after: int | None, reason: str
) -> None:
    counts = iter([before, after])
    monkeypatch.setattr(pool, "_oom_kills", lambda: next(counts))
    assert reason in build(kernelgen, folder, manifest(folder, "die"), "-j", "1").err


def test_what_a_dead_worker_printed_is_shown(kernelgen: Run, folder: Path) -> None:
    assert "    last words" in build(kernelgen, folder, manifest(folder, "die")).err


def test_a_bundle_without_the_broken_kernel_is_written(kernelgen: Run, folder: Path) -> None:
    good = manifest(folder, "add", "relu", name="good")
    bad = manifest(folder, "add", "refuse", name="bad")
    done = build(kernelgen, folder, good, bad)
    assert done.code == 1
    assert (folder / "out/good_trn1.kernels.gguf").exists()
    assert not (folder / "out/bad_trn1.kernels.gguf").exists()
    assert "bad_trn1 was not written" in done.out and "good_trn1 was not" not in done.out


def test_a_program_of_two_kernels_is_not_up_to_date(kernelgen: Run, folder: Path) -> None:
    """The folder is empty: the second kernel takes the program that this build compiled for the first."""
    (folder / "mine/own.py").write_text(f'{EMITTERS}\n@emitter("again")\ndef again(x):\n    return x + x\n')
    path = manifest(folder, "twice", "again")
    assert "2 built (1 compiled, 1 equal to another, 0 up to date), 0 failed" in build(kernelgen, folder, path).out
    assert "2 built (0 compiled, 2 up to date), 0 failed" in build(kernelgen, folder, path).out


def test_a_kernel_that_was_mended_is_all_that_is_compiled(kernelgen: Run, folder: Path) -> None:
    path = manifest(folder, "add", "refuse")
    assert build(kernelgen, folder, path).code == 1
    source = folder / "mine/own.py"
    source.write_text(EMITTERS.replace('raise ValueError("this kernel is broken")', "return -x"))
    done = build(kernelgen, folder, path)
    assert done.code == 0
    assert "2 built (1 compiled, 1 up to date), 0 failed" in done.out


def test_a_kernel_that_takes_too_long_is_stopped(kernelgen: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANG_FILE", str(folder / "hanging"))
    monkeypatch.setattr("kernelgen.build.executor.TIMEOUT_GRACE", 0.0)
    done = build(kernelgen, folder, manifest(folder, "add", "hang"), "--timeout", "5")
    assert done.code == 1
    assert "it took longer than its time limit and was stopped" in done.err
    assert "1 built (1 compiled, 0 up to date), 1 failed" in done.out
    assert not alive(int((folder / "hanging").read_text()))


def test_only_builds_a_part_and_no_bundle(kernelgen: Run, basic: Path, tmp_path: Path) -> None:
    done = kernelgen("build", basic, "-o", tmp_path, "--target", "trn1", "--only", "re*", "--compiler", "simulator")
    assert done.code == 0
    assert "2 built" in done.out
    assert "no bundles were written: --only leaves kernels out" in done.out
    assert [p.name for p in tmp_path.iterdir()] == [".kernelgen"]
    done = kernelgen("build", basic, "-o", tmp_path, "--only", "nothing*")
    assert done.code == 2
    assert "--only nothing*: none of 10 kernels matches" in done.err


def test_dry_run_only_says_what_would_be_built(kernelgen: Run, basic: Path, tmp_path: Path) -> None:
    done = kernelgen("build", basic, "-o", tmp_path / "out", "--dry-run", "--only", "add")
    assert done.code == 0
    first, last = done.out.splitlines()
    assert re.fullmatch(r"add-1024x64-f32-[0-9a-f]{12}  kernelgen/elementwise.py  inf2, trn1, trn2", first)
    assert last == f"would emit 1 of 1 kernel, compile at most 3 of 3, and write to {tmp_path}/out: no bundles"
    assert not (tmp_path / "out").exists()


def test_dry_run_looks_at_what_is_there(kernelgen: Run, folder: Path) -> None:
    def would() -> str:
        return build(kernelgen, folder, path, "--dry-run").out.splitlines()[-1].partition(", and write")[0]

    path = manifest(folder, "add", "twice")
    assert would() == "would emit 2 of 2 kernels, compile at most 2 of 2"
    assert build(kernelgen, folder, path).code == 0
    assert would() == "would emit 0 of 2 kernels, compile 0 of 2"
    (folder / "mine/own.py").write_text(EMITTERS.replace("return x + x", "# a comment\n    return x + x"))
    assert would() == "would emit 1 of 2 kernels, compile at most 1 of 2"
    for neff in (folder / "out/.kernelgen/neff").iterdir():
        neff.write_bytes(b"")
    assert would() == "would emit 1 of 2 kernels, compile at most 2 of 2"


def test_forms(kernelgen: Run, folder: Path) -> None:
    path = manifest(folder, "add")
    assert build(kernelgen, folder, path, "--form", "embed").code == 0
    out = folder / "out"
    assert {p.suffix for p in out.iterdir() if p.is_file()} == {".gguf", ".S", ".c", ".h"}
    assert not (out / "small_trn1").exists()


def test_two_builds_in_one_folder_do_not_mix(kernelgen: Run, folder: Path, hanging: Hanging) -> None:
    hanging.start(manifest(folder, "hang"))
    done = build(kernelgen, folder, manifest(folder, "add", name="second"))
    assert done.code == 2
    assert f"{folder}/out: another build is at work there" in done.err


class Hanging:
    """A build in its own process that hangs in a kernel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "hanging"
        self.process: subprocess.Popen[str] | None = None

    def start(self, path: Path) -> subprocess.Popen[str]:
        out = str(self.folder / "out")
        arguments = ["build", str(path), "-o", out, "-j", "1", "--kernels", str(self.folder / "mine")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kernelgen", *arguments, "--compiler", "simulator"],
            env={**environment(), "HANG_FILE": str(self.file)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while not self.file.exists() or not self.file.read_text():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)
        return self.process

    @property
    def worker(self) -> int:
        return int(self.file.read_text())


@pytest.fixture
def hanging(folder: Path) -> Iterator[Hanging]:
    made = Hanging(folder)
    yield made
    if made.process:
        made.process.kill()
        made.process.communicate()
        if alive(made.worker):
            os.kill(made.worker, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_a_stopped_build_stops_its_workers_and_leaves_nothing_half_written(
    kernelgen: Run, folder: Path, hanging: Hanging, number: signal.Signals, code: int
) -> None:
    process = hanging.start(manifest(folder, "add", "hang"))
    begun = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert time.monotonic() - begun < 5
    assert "Traceback" not in err
    assert not alive(hanging.worker)
    assert no_leftovers(folder / "out")
    # Finished work counts, and the folder is unlocked.
    done = build(kernelgen, folder, manifest(folder, "add"))
    assert (done.code, done.err.count("another build")) == (0, 0)


def test_a_build_that_was_killed_leaves_no_lock(kernelgen: Run, folder: Path, hanging: Hanging) -> None:
    process = hanging.start(manifest(folder, "hang"))
    process.kill()
    process.communicate()
    leftover = folder / "out/.kernelgen/neff/.x.neff.1-abc.tmp"
    leftover.write_bytes(b"half")
    done = build(kernelgen, folder, manifest(folder, "add"))
    assert done.code == 0, done.err
    assert not leftover.exists()


def test_a_terminal_gets_a_progress_bar_and_a_file_plain_lines(folder: Path) -> None:
    path = manifest(folder, "add", "refuse")
    arguments = ["build", str(path), "-o", str(folder / "out"), "--kernels", str(folder / "mine")]
    command = [sys.executable, "-m", "kernelgen", *arguments, "--compiler", "simulator"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, env={**environment(), "TERM": "xterm"}, stdout=subprocess.PIPE, stderr=theirs, text=True
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
    assert b"\x1b[" in seen and "━".encode() in seen and b"2/2" in seen
    assert b"FAILED" in seen and b"this kernel is broken" in seen
    assert "1 built" in out
    plain = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=60)
    assert "\x1b" not in plain.stderr
    assert re.search(r"^\[[12]/2\] trn1 add-8x4-f32-[0-9a-f]{12} up to date$", plain.stderr, re.MULTILINE)


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
    done = process(
        "build",
        manifest(folder, "add"),
        "-o",
        folder / "out",
        "--compiler",
        "simulator",
        NEURON_KERNELGEN_NEFF_CACHE="",
        **settings,
    )
    assert done.returncode == 0, done.stderr
    assert "ignored: JAX_PLATFORMS, XLA_FLAGS" in process("doctor", **settings).stdout
