"""Outputs appear whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kernelgen import fileio


def test_a_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with fileio.replacing(path) as temporary:
        temporary.write_text("half")
        assert not path.exists() and temporary.parent == path.parent
    assert path.read_text() == "half" and [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    fileio.write_bytes(path, b"old")
    with pytest.raises(error), fileio.replacing(path) as temporary:
        temporary.write_text("new")
        raise error
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_mode_is_that_of_a_plain_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        fileio.write_bytes(tmp_path / "file", b"")
        with fileio.replacing_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o750


@pytest.mark.parametrize("before", ["absent", "empty", "full"])
def test_a_folder_is_replaced_whole(tmp_path: Path, before: str) -> None:
    path = tmp_path / "folder"
    if before != "absent":
        path.mkdir()
    if before == "full":
        (path / "old").write_text("")
    with fileio.replacing_folder(path) as temporary:
        (temporary / "new").write_text("")
    assert [p.name for p in path.iterdir()] == ["new"]
    with pytest.raises(RuntimeError), fileio.replacing_folder(path) as temporary:
        (temporary / "newer").write_text("")
        raise RuntimeError
    assert [p.name for p in path.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError), fileio.replacing_folder(tmp_path / "file"):
        pass
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "kept")]
