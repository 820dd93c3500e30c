"""Equal entries export to equal bytes; an import verifies everything in an archive."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.cache import Folder, NeffKey, archive, entry
from kernelgen.cache.archive import Exported, ImportResult
from kernelgen.errors import KernelgenError

from .conftest import little_memory

Neffs = list[tuple[NeffKey, bytes]]


@pytest.fixture
def folder(tmp_path: Path, neffs: Neffs) -> Folder:
    made = Folder(tmp_path / "cache")
    for key, neff in neffs:
        made.write(key.name, entry.pack(key, "k", neff))
    return made


@pytest.fixture
def target(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "deep" / "target")


def names(folder: Folder) -> list[str]:
    return sorted(stored.name for stored in folder.entries())


def everything(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_what_is_exported_can_be_imported(tmp_path: Path, folder: Folder, target: Folder) -> None:
    assert archive.write(tmp_path / "a.tar", folder) == Exported(4, ())
    assert archive.read(tmp_path / "a.tar", target) == ImportResult(4, 0)
    for name in names(folder):
        assert target.path(name).read_bytes() == folder.path(name).read_bytes()
    assert archive.read(tmp_path / "a.tar", target) == ImportResult(0, 4)
    # An import replaces a damaged entry.
    target.path(names(target)[0]).write_bytes(b"damaged")
    assert archive.read(tmp_path / "a.tar", target) == ImportResult(1, 3)


def test_the_same_entries_give_the_same_bytes(tmp_path: Path, folder: Folder, target: Folder, neffs: Neffs) -> None:
    archive.write(tmp_path / "a.tar", folder)
    for key, neff in reversed(neffs):
        target.write(key.name, entry.pack(key, "k", neff))
        os.utime(target.path(key.name), (1, 1))
        target.path(key.name).chmod(0o600)
    (target.root / "stray").touch()
    archive.write(tmp_path / "b.tar", target)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = tar.getmembers()
    assert [m.name for m in members] == sorted(m.name for m in members)
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o644)}


def test_a_damaged_entry_is_not_exported(tmp_path: Path, folder: Folder) -> None:
    first, *rest = names(folder)
    folder.path(first).write_bytes(folder.path(first).read_bytes()[:-1])
    assert archive.write(tmp_path / "a.tar", folder) == Exported(len(rest), (first,))


Hostile = Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes]]


def renamed(name: str) -> Hostile:
    def change(member: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        member.name = name.replace("NAME", member.name)
        return member, data

    return change


def typed(kind: bytes, link: str = "") -> Hostile:
    def change(member: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        member.type, member.linkname, member.size = kind, link, 0
        return member, b""

    return change


def content(make: Callable[[bytes], bytes]) -> Hostile:
    def change(member: tarfile.TarInfo, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
        data = make(data)
        member.size = len(data)
        return member, data

    return change


HOSTILE = {
    "absolute": renamed("/tmp/NAME"),
    "above": renamed("../NAME"),
    "above inside": renamed("x/../../NAME"),
    "in a folder": renamed("x/NAME"),
    "hidden": renamed("./NAME"),
    "another name": renamed("0" * 64 + ".entry"),
    "no name": renamed("lock"),
    "control characters": renamed("\x1b[2J\n.entry"),
    "symlink": typed(tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": typed(tarfile.LNKTYPE, "../../target"),
    "device": typed(tarfile.CHRTYPE),
    "block device": typed(tarfile.BLKTYPE),
    "fifo": typed(tarfile.FIFOTYPE),
    "folder": typed(tarfile.DIRTYPE),
    "empty": content(lambda data: b""),
    "cut off": content(lambda data: data[:-1]),
    "one bit": content(lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]),
    "longer": content(lambda data: data + b"\0"),
}


def rewrite(source: Path, output: Path, change: Hostile, form: int) -> None:
    """Copies an exported cache and changes its last member."""
    with tarfile.open(source) as old, tarfile.open(output, "w", format=form) as new:
        members = old.getmembers()
        for member in members:
            file = old.extractfile(member)
            assert file
            data = file.read()
            if member is members[-1]:
                member, data = change(member, data)
            new.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("what", list(HOSTILE))
def test_a_hostile_archive_is_refused_whole(
    tmp_path: Path, folder: Folder, target: Folder, what: str, form: int
) -> None:
    archive.write(tmp_path / "good.tar", folder)
    rewrite(tmp_path / "good.tar", tmp_path / "bad.tar", HOSTILE[what], form)
    before = everything(tmp_path)
    with pytest.raises(KernelgenError) as caught:
        archive.read(tmp_path / "bad.tar", target)
    assert str(tmp_path / "bad.tar") in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert everything(tmp_path) == before


def test_a_member_that_is_there_twice_is_refused(tmp_path: Path, folder: Folder, target: Folder) -> None:
    archive.write(tmp_path / "good.tar", folder)
    data = (tmp_path / "good.tar").read_bytes()[:-1024]
    (tmp_path / "bad.tar").write_bytes(data + data + bytes(1024))
    with pytest.raises(KernelgenError, match="is a duplicate"):
        archive.read(tmp_path / "bad.tar", target)
    assert not target.root.exists()


def test_every_mistake_is_named(tmp_path: Path, folder: Folder, target: Folder) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        for name in ("../a", "b"):
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(KernelgenError) as caught:
        archive.read(tmp_path / "bad.tar", target)
    assert len(caught.value.diagnostics) == 2


def test_headers_that_speak_of_the_next_are_refused(tmp_path: Path, target: Folder) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 100
    chained = (header.tobuf(tarfile.GNU_FORMAT) + bytes(512)) * 20000
    (tmp_path / "bad.tar").write_bytes(chained + bytes(1024))
    with pytest.raises(KernelgenError, match="is not a regular file") as caught:
        archive.read(tmp_path / "bad.tar", target)
    assert len(caught.value.diagnostics) == 1000


def test_a_member_that_is_larger_than_memory_is_refused_unread(
    tmp_path: Path, folder: Folder, target: Folder, neffs: Neffs
) -> None:
    for kind, name in ((tarfile.GNUTYPE_LONGNAME, "long"), (tarfile.REGTYPE, "0" * 64 + ".entry")):
        header = tarfile.TarInfo(name)
        header.type, header.size = kind, 300 << 30
        (tmp_path / "bad.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT))
        os.truncate(tmp_path / "bad.tar", (300 << 30) + (1 << 20))
        with little_memory(), pytest.raises(KernelgenError, match=r"bad\.tar: '"):
            archive.read(tmp_path / "bad.tar", target)


def test_an_archive_that_is_cut_off_or_damaged_anywhere_is_refused(
    tmp_path: Path, folder: Folder, target: Folder
) -> None:
    archive.write(tmp_path / "good.tar", folder)
    data = (tmp_path / "good.tar").read_bytes()
    chance = random.Random(3)
    bad = [data[:length] for length in (0, 1, 511, 512, 513, len(data) - 1024, *chance.choices(range(len(data)), k=60))]
    bad += [b"not a tar " * 1000, b"\x1f\x8b" + data]
    refused = 0
    for damaged in bad:
        if data.startswith(damaged) and len(data) - len(damaged) <= 512:
            continue
        (tmp_path / "bad.tar").write_bytes(damaged)
        with pytest.raises(KernelgenError):
            archive.read(tmp_path / "bad.tar", target)
        refused += 1
        assert not target.root.exists()
    assert refused > 60
