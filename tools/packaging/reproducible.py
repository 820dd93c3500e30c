"""The build backend (PEP 517) of the wheel and the sdist: setuptools', with archives that are the same on each machine.

Times, modes and owners of files in an archive depend on the machine that builds it. This backend fixes them, so that
the same commit gives the same bytes. A file `commit.txt` names the commit; an archive built from an sdist keeps the
sdist's commit.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import runpy
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta

get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
build_editable = build_meta.build_editable

TIME = (1980, 1, 1, 0, 0, 0)
"""The time of each file in a wheel: the earliest that a ZIP archive can store."""
SECONDS = 315_532_800
"""The same time for a tar archive, in seconds since 1970."""
COMPRESSION = 6
PACKAGE = Path("tools/kernelgen")


def build_wheel(folder: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """Builds the wheel into a folder and returns its name."""
    with _commit():
        name: str = build_meta.build_wheel(folder, settings, metadata)
    fix_wheel(Path(folder, name))
    return name


def build_sdist(folder: str, settings: dict[str, Any] | None = None) -> str:
    """Builds the sdist into a folder and returns its name."""
    with _commit():
        name: str = build_meta.build_sdist(folder, settings)
    _fix_sdist(Path(folder, name))
    return name


@contextlib.contextmanager
def _commit() -> Iterator[None]:
    """Adds the file with the commit to a checkout's package while the block runs."""
    version = runpy.run_path(str(PACKAGE / "cli" / "version.py"))
    commit = version["describe"](Path.cwd()) if Path(".git").exists() else None
    if commit is None:
        yield
        return
    file = PACKAGE / version["COMMIT"]
    file.write_text(f"{commit}\n")
    try:
        yield
    finally:
        file.unlink()


def fix_wheel(wheel: Path, programs: Collection[str] = ()) -> None:
    """Writes a wheel again with fixed times and modes; `programs` are its executable files."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=COMPRESSION) as archive:
        # RECORD stays last, as PEP 427 recommends.
        for name in sorted(files, key=lambda name: (name.endswith(".dist-info/RECORD"), name)):
            entry = zipfile.ZipInfo(name, TIME)
            entry.external_attr = (0o100755 if name in programs else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])


def _fix_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {
            member.name: stream.read()
            for member in archive.getmembers()
            if member.isfile() and (stream := archive.extractfile(member)) is not None
        }
    with (
        sdist.open("wb") as output,
        gzip.GzipFile("", "wb", COMPRESSION, output, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(files[name]), 0o644, SECONDS
            archive.addfile(entry, io.BytesIO(files[name]))
