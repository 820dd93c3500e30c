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
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path in errors:
            raise OSError(errors[path], os.strerror(errors[path]), str(path))
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        done = run("cache", "verify")
        assert "  3 entries damaged or unreadable" in run("cache", "info").out
    lines = {f"{path}: it can't be read and stays: {os.strerror(number)}" for path, number in errors.items()}
    assert done.code == 1
    assert {*done.out.splitlines()} == {*lines, f"{folder}: 4 entries, 0 damaged, 3 unreadable"}
    assert run("cache", "verify").out == f"{folder}: 4 entries, 0 damaged\n"


def test_what_is_off_cannot_be_kept_in_order(run: Run) -> None:
    for words in (["verify"], ["prune", "--max-size", "1G"]):
        done = run("cache", *words, "--cache", "off")
        assert done.code == 2 and "the cache is off" in done.err
