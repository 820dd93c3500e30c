"""Outputs appear complete or not at all."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelgen import cli, fileio
from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.lowering import emit
from kernelgen.spec.kernel import KernelSpec


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


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError), fileio.replacing_folder(tmp_path / "file"):
        pass
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "kept")]


@pytest.fixture(params=["device", "FIFO", "socket"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A device, FIFO or socket; the device is a copy of /dev/null, if the test may make one."""
    path = tmp_path / "special"
    if request.param == "FIFO":
        os.mkfifo(path)
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root may make a device")
    yield path


def test_what_is_not_a_file_is_not_replaced(special: Path) -> None:
    kind = stat.S_IFMT(special.lstat().st_mode)
    for write in (fileio.write_bytes, fileio.write_if_changed):
        with pytest.raises(KernelgenError, match=rf"{special} is a (device|FIFO|socket): expected the path of a file"):
            write(special, b"data")
    assert stat.S_IFMT(special.lstat().st_mode) == kind
    assert [p.name for p in special.parent.iterdir()] == ["special"]


def test_no_command_replaces_what_is_not_a_file(special: Path, tmp_path: Path) -> None:
    kind = stat.S_IFMT(special.lstat().st_mode)
    hlo = Path(tempfile.mkdtemp()) / "k.hlo.pb"
    tensor = TensorDesc.parse("(4,1,1,1)/f32")
    hlo.write_bytes(emit(KernelSpec.make("sqr", [tensor], tensor), lambda x: x * x))
    commands = [
        ["compile", str(hlo), "--target=trn1", "--compiler=simulator", "--cache=off", "-o", str(special)],
        ["cache", "export", str(special), "--cache", str(hlo.parent / "cache")],
    ]
    for command in commands:
        assert cli.run(command) == 2
        assert stat.S_IFMT(special.lstat().st_mode) == kind
