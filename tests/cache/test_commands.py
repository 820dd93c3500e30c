"""`kernelgen cache`: its output for people and for scripts."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernelgen import cli
from kernelgen.cache import EntryHead, Folder, NeffKey
from kernelgen.compilers.settings import CompileConfig

from .conftest import manifest
from .store import Store

Neffs = list[tuple[NeffKey, bytes]]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Returns a function that runs a command line in this process, with the cache in `cache`."""
    monkeypatch.setenv("NEURON_KERNELGEN_NEFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NEURON_SDK", raising=False)

    def run(*arguments: str | Path) -> Done:
        capsys.readouterr()
        code = cli.run([str(a) for a in arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def folder(tmp_path: Path, neffs: Neffs) -> Folder:
    """Returns the cache with four entries; the first was used last."""
    made = Folder(tmp_path / "cache")
    for n, (key, neff) in enumerate(neffs):
        made.write(EntryHead.make(key, f"k{n}", neff), neff)
        for path in (made.path(key.name), made.neff(key.name)):
            os.utime(path, (1000 - n, 1000 - n))
    return made


def test_info(run: Run, folder: Folder, store: Store) -> None:
    done = run("cache", "info", "--shared-cache", store.url, "--shared-cache-mode", "read-only")
    first, second, third = done.out.splitlines()
    assert first.startswith(f"{folder}: 4 entries, ")
    assert second.startswith("  trn1  simulator 1: 4 entries, ")
    assert third == f"shared cache {store.url} (read-only): it answers"
    value = json.loads(run("cache", "info", "--format", "json").out)
    size = sum(p.stat().st_size for p in folder.root.iterdir())
    assert value["local"]["entries"] == 4 and value["local"]["bytes"] == size and value["shared"] is None
    assert run("cache", "info", "--cache", "off").out == "this machine's cache is off\n"


def test_info_says_what_does_not_answer(run: Run, folder: Folder, store: Store) -> None:
    store.status = {"GET": 502}
    assert "it does not answer: it answered 502" in run("cache", "info", "--shared-cache", store.url).out


@pytest.mark.parametrize("left", [0, 3, 4])
def test_prune_removes_what_was_not_used_for_longest(run: Run, folder: Folder, neffs: Neffs, left: int) -> None:
    sizes = [stored.size for key, _ in neffs for stored in folder.entries() if stored.name == key.name]
    done = run("cache", "prune", "--max-size", str(sum(sizes[:left])))
    assert done.code == 0
    assert f"{4 - left} {'entry' if left == 3 else 'entries'} removed, " in done.out
    assert {stored.name for stored in folder.entries()} == {key.name for key, _ in neffs[:left]}


def test_prune_takes_sizes_as_people_write_them(run: Run, folder: Folder) -> None:
    for size in ("1G", "500M", "20GiB", "3KB", "1T"):
        assert run("cache", "prune", "--max-size", size).code == 0
    for size in ("lots", "-1", "1.5G", "G", ""):
        done = run("cache", "prune", "--max-size", size)
        assert done.code == 2 and "expected a size" in done.err


def test_verify_names_and_removes_what_is_damaged(run: Run, folder: Folder, neffs: Neffs) -> None:
    assert run("cache", "verify").out == f"{folder}: 4 entries, 0 damaged\n"
    name = neffs[1][0].name
    folder.neff(name).write_bytes(neffs[1][1][:-1])
    damage = f"{folder.path(name)}: its .neff does not have the digest in its .json"
    done = run("cache", "verify", "--keep")
    assert done.code == 1 and folder.neff(name).exists()
    assert done.out == f"{damage}\n{folder}: 4 entries, 1 damaged\n"
    done = run("cache", "verify")
    assert done.code == 1 and not folder.neff(name).exists() and not folder.path(name).exists()
    assert done.out == f"{damage}: removed\n{folder}: 4 entries, 1 damaged\n"
    assert run("cache", "verify").out == f"{folder}: 3 entries, 0 damaged\n"


def test_verify_names_and_keeps_what_it_cannot_read(
    run: Run, folder: Folder, neffs: Neffs, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {folder.path(neffs[n][0].name): number for n, number in enumerate((errno.EACCES, errno.EIO, errno.ESTALE))}
    open_file = os.open

    def refuse(path: Path, *arguments: int, **more: int) -> int:
        if path in errors:
            raise OSError(errors[path], os.strerror(errors[path]), str(path))
        return open_file(path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        done = run("cache", "verify")
        assert "  3 entries damaged or unreadable" in run("cache", "info").out
    lines = {f"{path}: it can't be read and stays: {os.strerror(number)}" for path, number in errors.items()}
    assert done.code == 1
    assert {*done.out.splitlines()} == {*lines, f"{folder}: 4 entries, 0 damaged, 3 unreadable"}
    assert run("cache", "verify").out == f"{folder}: 4 entries, 0 damaged\n"


def test_export_and_import(run: Run, folder: Folder, tmp_path: Path) -> None:
    done = run("cache", "export", tmp_path / "a.tar")
    assert done.code == 0 and done.out.startswith(f"{tmp_path}/a.tar: 4 entries, ")
    done = run("cache", "import", tmp_path / "a.tar", "--cache", tmp_path / "other")
    assert (done.code, done.out) == (0, f"{tmp_path}/other: 4 entries added, 0 already there\n")
    (tmp_path / "bad.tar").write_bytes(b"not a tar" * 100)
    done = run("cache", "import", tmp_path / "bad.tar", "--cache", tmp_path / "third")
    assert done.code == 2 and "not an exported cache" in done.err
    assert not (tmp_path / "third").exists()
    done = run("cache", "import", tmp_path / "none.tar")
    assert done.code == 2 and done.err == f"error: {tmp_path}/none.tar: No such file or directory\n"
    os.mkfifo(tmp_path / "fifo.tar")
    done = run("cache", "import", tmp_path / "fifo.tar")
    assert done.code == 2 and done.err == f"error: {tmp_path}/fifo.tar: it is a FIFO, not a file\n"


@pytest.mark.parametrize("path", ["", ".", "/", ".."])
def test_a_path_that_names_no_file_is_refused(run: Run, folder: Folder, path: str) -> None:
    done = run("cache", "export", path)
    assert done.code == 2 and "Traceback" not in done.err
    assert run("cache", "import", path).code == 2


def test_what_is_off_cannot_be_kept_in_order(run: Run) -> None:
    for words in (["verify"], ["export", "x.tar"], ["prune", "--max-size", "1G"]):
        done = run("cache", *words, "--cache", "off")
        assert done.code == 2 and "the cache is off" in done.err
    done = run("cache", "explain", "k.hlo.pb", "--target", "trn1", "--cache", "off")
    assert done.code == 2 and "the cache is off" in done.err


# --- explain --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hlo(tmp_path: Path, modules: list[bytes]) -> Path:
    path = tmp_path / "k.hlo.pb"
    path.write_bytes(modules[0])
    return path


def put(folder: Folder, module: bytes, neff: bytes, kernel: str, compiler: str, config: CompileConfig) -> NeffKey:
    key = NeffKey.make(module, compiler, config.flags())
    folder.write(EntryHead.make(key, kernel, neff), neff)
    return key


def identity() -> str:
    from kernelgen.compilers.choice import Simulator

    return Simulator().identity


def test_an_emitters_output_is_not_part_of_the_answer(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/own.py").write_text(
        "from kernelgen.emitters import emitter\n\n\n@emitter('relu')\ndef relu(x):\n    print('[')\n    return x\n"
    )
    entry = '{op: relu, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}'
    (tmp_path / "m.yaml").write_text(f"format: 1\nname: m\ntargets: [trn1]\nkernels: [{entry}]\n")
    words = ["relu", tmp_path / "m.yaml", "--kernels", tmp_path / "mine", "--compiler", "simulator", "--format", "json"]
    done = run("cache", "explain", *words)
    assert done.code == 1 and len(json.loads(done.out)) == 1 and "[\n" in done.err


def test_a_hit_is_a_hit(run: Run, tmp_path: Path, hlo: Path, modules: list[bytes], neffs: Neffs, store: Store) -> None:
    config = CompileConfig.make("trn1")
    key = put(Folder(tmp_path / "cache"), modules[0], neffs[0][1], "k", identity(), config)
    words = ["cache", "explain", hlo, "--target", "trn1", "--compiler", "simulator"]
    done = run(*words)
    assert (done.code, done.out) == (0, "k for trn1: hit\n1 of 1 in the cache\n")
    for path in (tmp_path / "cache").glob(f"{key.name}.*"):
        store.objects[f"/neffs/{path.name}"] = path.read_bytes()
    done = run(*words, "--cache", tmp_path / "empty", "--shared-cache", store.url)
    assert (done.code, done.out) == (0, "k for trn1: hit, in the shared cache\n1 of 1 in the cache\n")


def test_a_miss_says_which_part_differs(
    run: Run, tmp_path: Path, hlo: Path, modules: list[bytes], neffs: Neffs
) -> None:
    folder = Folder(tmp_path / "cache")
    words = ["cache", "explain", hlo, "--target", "trn1", "--compiler", "simulator"]
    done = run(*words)
    assert (done.code, done.out.splitlines()[1]) == (1, "  there is no entry of this kernel or of the same HLO")

    def differs(module: bytes, kernel: str, compiler: str, config: CompileConfig) -> list[str]:
        key = put(folder, module, neffs[0][1], kernel, compiler, config)
        done = run(*words)
        assert done.code == 1
        folder.drop(key.name)
        first, second, *parts, last = done.out.splitlines()
        assert (first, last) == ("k for trn1: miss", "0 of 1 in the cache")
        of = "" if kernel == "k" else f" of {kernel}"
        assert second == f"  nearest: the entry {key.name[:12]}{of}; - is in its key, + in this one"
        return [part.removeprefix("    ") for part in parts]

    trn1, me = CompileConfig.make("trn1"), identity()
    version = ["- compiler simulator 0", f"+ compiler {me}"]
    assert differs(modules[0], "k", "simulator 0", trn1) == version
    assert differs(modules[0], "other", "simulator 0", trn1) == version
    assert differs(modules[0], "k", me, CompileConfig.make("inf2")) == ["- --target inf2", "+ --target trn1"]
    assert differs(modules[0], "k", me, CompileConfig.make("trn1", optlevel=3, extra_flags=("--fast",))) == [
        "- --optlevel 3",
        "+ --optlevel 2",
        "- --fast",
    ]
    there, here = (NeffKey.make(module, me, trn1.flags()).hlo_sha256[:12] for module in modules[1::-1])
    assert differs(modules[1], "k", me, trn1) == [f"- HLO {there}", f"+ HLO {here}"]
    # Of two entries, the one with fewer differences is the nearest.
    put(folder, modules[0], neffs[0][1], "k", "simulator 0", CompileConfig.make("trn1", optlevel=3))
    assert differs(modules[0], "k", "simulator 0", trn1) == version


def test_a_damaged_entry_is_a_miss_and_stays_as_it_is(
    run: Run, tmp_path: Path, hlo: Path, modules: list[bytes], neffs: Neffs
) -> None:
    folder = Folder(tmp_path / "cache")
    key = put(folder, modules[0], neffs[0][1], "k", identity(), CompileConfig.make("trn1"))
    folder.neff(key.name).write_bytes(b"damaged")
    done = run("cache", "explain", hlo, "--target", "trn1", "--compiler", "simulator")
    assert done.code == 1 and "its entry is damaged: " in done.out
    assert folder.path(key.name).exists()


def test_kernels_of_a_manifest_are_explained_by_id_op_or_glob(run: Run, tmp_path: Path) -> None:
    small = manifest(tmp_path, "relu", "silu", targets="trn1, inf2")
    build = ["--compiler", "simulator", "--target", "trn1"]
    assert run("build", small, "-o", tmp_path / "out", "--only", "relu", *build).code == 0
    done = run("cache", "explain", "*", small, *build, "--format", "json")
    assert done.code == 1
    found = {value["kernel"].partition("-")[0]: value for value in json.loads(done.out)}
    assert (found["relu"]["found"], found["silu"]["found"]) == ("local", None)
    assert found["silu"]["nearest"] is None
    done = run("cache", "explain", found["relu"]["kernel"], small, "--compiler", "simulator")
    assert done.code == 1 and "target" in done.out and "1 of 2 in the cache" in done.out
    done = run("cache", "explain", "gelu", small)
    assert done.code == 2 and "KERNEL gelu: none of 2 kernels matches" in done.err
    done = run("cache", "explain", "relu")
    assert done.code == 2 and "give the MANIFEST" in done.err


def test_a_store_that_cannot_be_listed_or_read_is_reported(run: Run, tmp_path: Path, hlo: Path, store: Store) -> None:
    words = ["cache", "explain", hlo, "--target", "trn1", "--compiler", "simulator", "--shared-cache", store.url]
    done = run(*words)
    assert done.code == 1 and "miss" in done.out and "does not list" in done.err
    store.status = {"GET": 500}
    done = run(*words)
    assert done.code == 1 and "can't be read" in done.err and "does not list" in done.err
