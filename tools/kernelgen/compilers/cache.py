"""A folder of NEFFs by what they depend on, which builds and machines may share.

A NEFF depends on the HLO's bytes, the compiler's identity and its flags, and on nothing else; their digest is its name. What is
there under a name is up to date, whichever kernel, manifest or build it was made for.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from kernelgen import fileio, neff
from kernelgen.errors import KernelgenError
from kernelgen.plan import CompileConfig, canonical_json


def key(hlo_sha256: str, identity: str, config: CompileConfig) -> str:
    """Returns the name of a NEFF, 40 hex digits.

    Args:
        hlo_sha256: digest of the HLO's bytes, in hex.
        identity: the compiler's.
        config: target and settings.
    """
    return hashlib.sha256(canonical_json([hlo_sha256, identity, config.flags()]).encode()).hexdigest()[:40]


def path(folder: str | Path, hlo: bytes, identity: str, config: CompileConfig) -> Path:
    """Returns where in a cache the NEFF of an HLO is."""
    return Path(folder) / f"{key(hashlib.sha256(hlo).hexdigest(), identity, config)}.neff"


def read(file: Path) -> bytes | None:
    """Returns a NEFF that is there and whole, else None; one that a full disk or a stray hand has damaged is made again."""
    try:
        data = file.read_bytes()
        neff.read_header(data, source=str(file))
    except (OSError, KernelgenError):
        return None
    return data


def write(file: Path, data: bytes) -> None:
    """Adds a NEFF. A cache that can't be written is done without: a build must not fail for it."""
    try:
        fileio.write_bytes(file, data)
    except OSError:
        return
