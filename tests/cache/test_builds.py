"""Builds in their own processes share a cache: nothing is compiled twice, and no failure gives a wrong result."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.cache import Folder

from .conftest import ROOT, compiles, environment, install, manifest
from .store import Store

Kernelgen = Callable[..., subprocess.CompletedProcess[str]]

OPS = ("relu", "silu", "sqr")
BUILDS_AT_ONCE = 5


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Returns the file where the double of neuronx-cc records its calls."""
    return tmp_path / "record"


@pytest.fixture
def build(tmp_path: Path, record: Path, kernelgen: Kernelgen) -> Kernelgen:
    """Returns a function that builds three kernels with the double of neuronx-cc into a folder."""
    manifest(tmp_path, *OPS)
    install(tmp_path / "sdk", record=str(record))

    def build(output: str = "out", *more: str, **environment: object) -> subprocess.CompletedProcess[str]:
        words = ["build", tmp_path / "small.yaml", "-o", tmp_path / output, "-j", "1", "--compiler", "neuronx-cc"]
        return kernelgen(*words, *more, **{"NEURON_SDK": tmp_path / "sdk", **environment})

    return build


def pack(folder: Path) -> bytes:
    return (folder / "small_trn1.kernels.gguf").read_bytes()


def counts(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """Returns the numbers of compiled kernels and of kernels from a cache, from the build's output."""
    assert done.returncode == 0, done.stderr
    match = re.search(
        r"^3 built \((\d+) compiled, (?:(\d+) from the cache, )?\d+ up to date\), 0 failed", done.stdout, re.M
    )
    assert match, done.stdout
    return int(match[1]), int(match[2] or 0)


def warnings(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("warning: ")]


def entries(folder: Path) -> dict[str, bytes]:
    """Returns the NEFFs of a cache by entry; all must be whole."""
    found = {}
    for stored in Folder(folder).entries():
        whole = Folder(folder).read(stored.name)
        assert whole is not None
        found[stored.name] = whole[1]
    return found


# --- sharing --------------------------------------------------------------------------------------------------------------


def test_a_second_build_compiles_nothing_and_is_the_same(build: Kernelgen, tmp_path: Path, record: Path) -> None:
    assert counts(build()) == (3, 0)
    done = build("other")
    assert counts(done) == (0, 3)
    assert pack(tmp_path / "other") == pack(tmp_path / "out")
    # Another machine, which shares the shared cache.
    shared = {"NEURON_KERNELGEN_SHARED_CACHE": tmp_path / "shared"}
    shutil.rmtree(tmp_path / "cache")
    assert counts(build("third", **shared)) == (3, 0)
    assert counts(build("fourth", NEURON_KERNELGEN_NEFF_CACHE=tmp_path / "another machine", **shared)) == (0, 3)
    assert pack(tmp_path / "fourth") == pack(tmp_path / "out")
    assert len(compiles(record)) == 6
    assert entries(tmp_path / "shared") == entries(tmp_path / "cache") == entries(tmp_path / "another machine")


class CMake:
    """A CMake project with the three kernels, configured once; its build folder is `build`."""

    def __init__(self, folder: Path, generator: str, *arguments: str, **settings: object) -> None:
        if shutil.which("cmake") is None or shutil.which("ninja" if generator == "Ninja" else "make") is None:
            pytest.skip(f"CMake with {generator} is not installed")
        self.build = folder / "build"
        self.source = folder / "project"
        self.source.mkdir()
        (self.source / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.20)\nproject(p LANGUAGES NONE)\n"
            f'include("{ROOT}/rules/cmake/NeuronKernels.cmake")\n'
            f'add_neuron_kernels(k MANIFEST "{folder}/small.yaml" FORM PACK {" ".join(arguments)})\n'
        )
        flags = [f"-D{name}={value}" for name, value in {"NEURON_KERNELGEN_PYTHON": sys.executable, **settings}.items()]
        assert self._run("-S", self.source, "-B", self.build, "-G", generator, *flags).returncode == 0

    def make(self, expect: int = 0) -> str:
        """Builds; returns the output."""
        done = self._run("--build", self.build, "-j", "2")
        assert (done.returncode != 0) == expect, done.stdout
        return done.stdout

    def _run(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["cmake", *map(str, words)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def test_cmake_and_the_command_line_share_a_cache(build: Kernelgen, tmp_path: Path, record: Path) -> None:
    assert counts(build(NEURON_KERNELGEN_SHARED_CACHE=tmp_path / "shared")) == (3, 0)
    project = CMake(
        tmp_path,
        "Ninja",
        NEURON_SDK=tmp_path / "sdk",
        NEURON_KERNELGEN_NEFF_CACHE=tmp_path / "cmake's own",
        NEURON_KERNELGEN_SHARED_CACHE=tmp_path / "shared",
    )
    assert "small_trn1: 3 kernels: 0 compiled, 3 from the cache, 0 up to date" in project.make()
    assert len(compiles(record)) == 3
    [made] = project.build.rglob("*.gguf")
    assert made.read_bytes() == pack(tmp_path / "out")


@pytest.mark.long
def test_cmakes_steps_ask_a_failing_shared_cache_once(
    build: Kernelgen, tmp_path: Path, store: Store, record: Path
) -> None:
    store.status = {"GET": 500}
    project = CMake(
        tmp_path,
        "Ninja",
        NEURON_SDK=tmp_path / "sdk",
        NEURON_KERNELGEN_NEFF_CACHE=tmp_path / "cmake's own",
        NEURON_KERNELGEN_SHARED_CACHE=store.url,
    )
    output = project.make()
    assert "small_trn1: 3 kernels: 3 compiled, 0 from the cache" in output
    assert output.count("warning: the cache http") == 3 and "it answered 500" in output
    # Two compiles may run at once.
    assert 1 <= store.count("GET") <= 2 and store.count("PUT") == 0


@pytest.mark.long
def test_cmake_takes_no_neff_of_an_earlier_hlo_when_the_clock_was_set_back(tmp_path: Path, record: Path) -> None:
    (tmp_path / "mine").mkdir()
    emitter = 'from kernelgen.emitters import emitter\n\n\n@emitter("relu")\ndef relu(x, *, out):\n    return {}\n'
    (tmp_path / "mine" / "own.py").write_text(emitter.format("x * 2"))
    manifest(tmp_path, "relu")
    install(tmp_path / "sdk", record=str(record))
    settings = {"NEURON_SDK": tmp_path / "sdk", "NEURON_KERNELGEN_NEFF_CACHE": tmp_path / "cache"}
    # make compares times alone; Ninja records them.
    project = CMake(tmp_path, "Unix Makefiles", f'KERNELS "{tmp_path}/mine"', **settings)
    project.make()
    [made] = project.build.rglob("*.gguf")
    first = made.read_bytes()
    # The NEFF was compiled before the clock was set back, and the kernel is emitted again after that.
    [neff] = project.build.rglob("*.neff")
    os.utime(neff, (time.time() + 86400, time.time() + 86400))
    (tmp_path / "mine" / "own.py").write_text(emitter.format("x * 3"))
    said = project.make(expect=1)
    assert "was not compiled from the current HLO" in said and "build again" in said
    assert made.read_bytes() == first
    assert "1 kernels: 1 compiled" in project.make()
    assert made.read_bytes() != first and len(compiles(record)) == 2


def test_cold_builds_at_once_compile_each_kernel_once(tmp_path: Path, record: Path) -> None:
    manifest(tmp_path, *OPS, targets="trn1, inf2")
    install(tmp_path / "sdk", record=str(record), seconds=0.3)
    settings = {"NEURON_SDK": tmp_path / "sdk", "NEURON_KERNELGEN_NEFF_CACHE": tmp_path / "cache"}
    words = ["build", str(tmp_path / "small.yaml"), "-j", "1", "--compiler", "neuronx-cc"]
    builds = [
        subprocess.Popen(
            [sys.executable, "-m", "kernelgen", *words, "-o", str(tmp_path / f"out{n}")],
            env=environment(**settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(BUILDS_AT_ONCE)
    ]
    total = 0
    for process in builds:
        out, err = process.communicate(timeout=280)
        assert process.returncode == 0, err
        match = re.search(r"^6 built \((\d+) compiled", out, re.MULTILINE)
        assert match
        total += int(match[1])
    assert (total, sorted(compiles(record))) == (6, ["inf2"] * 3 + ["trn1"] * 3)
    for bundle in ("small_trn1", "small_inf2"):
        assert len({(tmp_path / f"out{n}" / f"{bundle}.kernels.gguf").read_bytes() for n in range(BUILDS_AT_ONCE)}) == 1
    assert len(entries(tmp_path / "cache")) == 6


# --- the compiler -----------------------------------------------------------------------------------------------------


def test_what_the_compiler_did_not_finish_is_never_stored(build: Kernelgen, tmp_path: Path, record: Path) -> None:
    install(tmp_path / "sdk", record=str(record), output="half")
    done = build()
    assert done.returncode == 1 and "3 failed" in done.stdout
    assert entries(tmp_path / "cache") == {}
    install(tmp_path / "sdk", record=str(record))
    assert counts(build()) == (3, 0)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_clock_that_was_set_back_changes_nothing(build: Kernelgen, tmp_path: Path, record: Path) -> None:
    build()
    # After the clock is set back, all existing files have future times.
    future = time.time() + 10 * 365 * 86400
    for folder in ("out", "cache", "sdk"):
        for path in (tmp_path / folder).rglob("*"):
            os.utime(path, (future, future))
    assert counts(build())[0] == 0
    assert counts(build("other")) == (0, 3)
    # Changed inputs are compiled; the NEFFs of the earlier inputs are not used.
    install(tmp_path / "sdk", record=str(record), version="NeuronX Compiler version 9.9.9+abc\n")
    before = pack(tmp_path / "out")
    done = build()
    assert counts(done) == (3, 0) and warnings(done) == []
    assert len(entries(tmp_path / "cache")) == 6
    assert b"9.9.9+abc" in pack(tmp_path / "out") and b"9.9.9+abc" not in before


def in_a_mount(script: str, build: list[str], **more: object) -> subprocess.CompletedProcess[str]:
    """Runs a script as root in a mount namespace that ends with it; `"$@"` in the script is a build."""
    for unshare in (["unshare", "-m"], ["unshare", "-rm"]):
        command = [*unshare, "sh", "-ec"]
        if shutil.which("unshare") and not subprocess.call(
            [*command, "mount -t tmpfs tmpfs /mnt"], stderr=subprocess.DEVNULL
        ):
            return subprocess.run(
                [*command, script, "sh", sys.executable, "-m", "kernelgen", *build],
                env=environment(**more),
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
    pytest.skip("mounting is not permitted here")


def test_a_full_disk_under_the_cache_costs_the_cache_only(build: Kernelgen, tmp_path: Path, record: Path) -> None:
    build()
    whole = entries(tmp_path / "cache")
    record.unlink()
    (tmp_path / "small disk").mkdir()
    # 20 KiB: enough for one entry of 12 KiB, but not for two.
    done = in_a_mount(
        f"""
        cd '{tmp_path}'; mount -t tmpfs -o size=20k tmpfs 'small disk'
        "$@" -o full; ls -A 'small disk'; cp 'small disk'/*.* kept/
        """.replace("cp ", "mkdir kept; cp "),
        ["build", str(tmp_path / "small.yaml"), "-j", "1", "--compiler", "neuronx-cc"],
        NEURON_SDK=tmp_path / "sdk",
        NEURON_KERNELGEN_NEFF_CACHE=tmp_path / "small disk",
    )
    assert counts(done) == (3, 0)
    assert pack(tmp_path / "full") == pack(tmp_path / "out")
    assert len({*warnings(done)}) == 1 and "No space left on device" in warnings(done)[0]
    # The entries that fit are whole, and no half-written file is beside them.
    kept = entries(tmp_path / "kept")
    assert 1 <= len(kept) < 3 and kept.items() <= whole.items()
    listed = done.stdout.rpartition("lock\n")
    assert sorted(listed[0].split()[-2 * len(kept) :]) == sorted(
        f"{name}{suffix}" for name in kept for suffix in (".json", ".neff")
    ), done.stdout


def test_a_full_disk_under_the_output_is_an_error_and_leaves_nothing_half_written(
    build: Kernelgen, tmp_path: Path
) -> None:
    build()
    done = in_a_mount(
        f"""
        cd '{tmp_path}'; mkdir -p small; mount -t tmpfs -o size=48k tmpfs small
        "$@" -o small || echo "exit $?"; ls -A small; mount -o remount,size=1m small; "$@" -o small; cp -r small kept
        """,
        ["build", str(tmp_path / "small.yaml"), "-j", "1", "--compiler", "neuronx-cc"],
        NEURON_SDK=tmp_path / "sdk",
        NEURON_KERNELGEN_NEFF_CACHE=tmp_path / "cache",
    )
    assert done.returncode == 0, done.stderr
    assert "exit 1" in done.stdout and "No space left on device" in done.stdout + done.stderr
    first = done.stdout.partition("exit 1\n")[2].partition("/")[0]
    assert ".tmp" not in first and "Traceback" not in done.stderr
    assert pack(tmp_path / "kept") == pack(tmp_path / "out")


def test_a_read_only_cache_is_read(build: Kernelgen, tmp_path: Path, record: Path) -> None:
    build()
    [dropped, *_] = entries(tmp_path / "cache")
    Folder(tmp_path / "cache").drop(dropped)
    record.unlink()
    done = in_a_mount(
        f"""
        cd '{tmp_path}'; mount --bind cache cache; mount -o remount,bind,ro cache
        if touch cache/x 2>/dev/null; then echo "it can be written"; exit 9; fi
        "$@" -o one
        """,
        ["build", str(tmp_path / "small.yaml"), "-j", "1", "--compiler", "neuronx-cc"],
        NEURON_SDK=tmp_path / "sdk",
        NEURON_KERNELGEN_NEFF_CACHE=tmp_path / "cache",
    )
    assert counts(done) == (1, 2)
    assert len(warnings(done)) == 1 and "Read-only file system" in warnings(done)[0]
    assert pack(tmp_path / "one") == pack(tmp_path / "out")
    assert len(entries(tmp_path / "cache")) == 2


# --- nothing is written outside -------------------------------------------------------------------------------------------


def outside(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def test_a_manifest_cannot_name_a_place_outside(kernelgen: Kernelgen, tmp_path: Path) -> None:
    path = manifest(tmp_path, "relu")
    path.write_text(path.read_text().replace("name: small", "name: ../evil"))
    before = outside(tmp_path)
    done = kernelgen("build", path, "-o", tmp_path / "deep" / "out", "--compiler", "simulator")
    assert done.returncode == 2 and f"{path}:2:7: error" in done.stderr
    assert outside(tmp_path) == before


def test_a_link_in_the_output_folder_is_not_written_through(build: Kernelgen, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "small_trn1").symlink_to(victim)
    assert "Traceback" not in build().stderr
    assert [p.name for p in victim.iterdir()] == ["file"] and (victim / "file").read_text() == "precious"
