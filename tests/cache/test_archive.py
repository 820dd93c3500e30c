"""Equal entries export to equal bytes; an import verifies everything in an archive."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.cache import EntryHead, Folder, NeffKey, archive
from kernelgen.errors import KernelgenError

Neffs = list[tuple[NeffKey, bytes]]


@pytest.fixture
def folder(tmp_path: Path, neffs: Neffs) -> Folder:
    filled = Folder(tmp_path / "cache")
    for key, neff in neffs:
        filled.write(EntryHead.make(key, "k", neff), neff)
    return filled


@pytest.fixture
def target(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "deep" / "target")


def test_exported_entries_can_be_imported(tmp_path: Path, folder: Folder, target: Folder) -> None:
    names = [stored.name for stored in folder.entries()]
    assert archive.write(tmp_path / "a.tar", folder) == (4, [])
    assert archive.read(tmp_path / "a.tar", target) == (4, 0)
    for name in names:
        assert target.path(name).read_bytes() == folder.path(name).read_bytes()
        assert target.neff(name).read_bytes() == folder.neff(name).read_bytes()
    assert archive.read(tmp_path / "a.tar", target) == (0, 4)
    # An import replaces a damaged entry.
    target.neff(names[0]).write_bytes(b"damaged")
    assert archive.read(tmp_path / "a.tar", target) == (1, 3)
    # An export leaves a damaged entry out.
    folder.neff(names[0]).write_bytes(b"damaged")
    assert archive.write(tmp_path / "b.tar", folder) == (3, [names[0]])


def test_same_entries_give_the_same_bytes(tmp_path: Path, folder: Folder, target: Folder, neffs: Neffs) -> None:
    archive.write(tmp_path / "a.tar", folder)
    for key, neff in reversed(neffs):
        target.write(EntryHead.make(key, "k", neff), neff)
        os.utime(target.path(key.name), (1, 1))
        target.path(key.name).chmod(0o600)
    (target.root / "stray").touch()
    archive.write(tmp_path / "b.tar", target)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


Change = Callable[[tarfile.TarInfo, bytes], bytes]


def renamed(name: str) -> Change:
    def change(member: tarfile.TarInfo, data: bytes) -> bytes:
        member.name = name.replace("NAME", member.name)
        return data

    return change


def typed(kind: bytes, link: str = "") -> Change:
    def change(member: tarfile.TarInfo, data: bytes) -> bytes:
        member.type, member.linkname = kind, link
        return b""

    return change


HOSTILE: dict[str, Change] = {
    "absolute": renamed("/tmp/NAME"),
    "above": renamed("../NAME"),
    "in a folder": renamed("x/NAME"),
    "another name": renamed("0" * 64 + ".neff"),
    "no name": renamed("lock"),
    "control characters": renamed("\x1b[2J\n.neff"),
    "symlink": typed(tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": typed(tarfile.LNKTYPE, "../../target"),
    "device": typed(tarfile.CHRTYPE),
    "folder": typed(tarfile.DIRTYPE),
    "cut off": lambda member, data: data[:-1],
    "one bit": lambda member, data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "longer": lambda member, data: data + b"\0",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_archive_is_refused_whole(tmp_path: Path, folder: Folder, target: Folder, what: str) -> None:
    archive.write(tmp_path / "good.tar", folder)
    with tarfile.open(tmp_path / "good.tar") as good, tarfile.open(tmp_path / "bad.tar", "w") as bad:
        members = good.getmembers()
        for member in members:
            file = good.extractfile(member)
            assert file
            data = file.read()
            if member is members[-1]:
                data = HOSTILE[what](member, data)
                member.size = len(data)
            bad.addfile(member, io.BytesIO(data))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KernelgenError) as caught:
        archive.read(tmp_path / "bad.tar", target)
    assert str(tmp_path / "bad.tar") in str(caught.value) and "\x1b" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_archive_that_is_cut_off_or_damaged_is_refused(tmp_path: Path, folder: Folder, target: Folder) -> None:
    archive.write(tmp_path / "good.tar", folder)
    data = (tmp_path / "good.tar").read_bytes()
    with tarfile.open(tmp_path / "good.tar") as tar:
        third = tar.getmembers()[2].offset
    # tarfile alone takes an archive that ends before a header, or that has a damaged one, for a shorter archive.
    bad = [data[:length] for length in (0, 1, 511, 512, 513, third, third + 1, third + 512)]
    bad += [data[:third] + b"x" + data[third + 1 :], data[:third] + data, b"not a tar " * 1000, b"\x1f\x8b" + data]
    for damaged in bad:
        (tmp_path / "bad.tar").write_bytes(damaged)
        with pytest.raises(KernelgenError):
            archive.read(tmp_path / "bad.tar", target)
        assert not target.root.exists()
