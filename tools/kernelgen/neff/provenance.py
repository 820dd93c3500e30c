"""Origins of a build folder's NEFFs, and their digests: files by which the steps of a build share this information.

A compile step writes, beside its NEFF, the digest of the HLO, the digest of the NEFF, and whether it compiled it. A NEFF is
intact if its digest matches: the hash in a NEFF's header can't be checked, as neuronx-cc's algorithm is not documented.
The bundle step refuses a NEFF that is not intact, and one of an earlier HLO: ninja and make compare file times, and miss changes
after the clock was set back.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelgen import fileio
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError
from kernelgen.spec.canonical import canonical_json


@dataclass(frozen=True, slots=True)
class NeffOrigin:
    """A compile step's record of its NEFF.

    Attributes:
        hlo_sha256: digest of its HLO, in hex.
        source: `compiled`, or a cache level.
        run: a value that differs for each run of the step.
        neff_sha256: digest of the NEFF, in hex.
    """

    hlo_sha256: str
    source: str
    run: str
    neff_sha256: str


def beside(neff: Path) -> Path:
    """Returns the path of a NEFF's origin."""
    return neff.with_suffix(".origin")


def write(path: str | Path, hlo: str | Path, source: str, neff_sha256: str) -> None:
    """Writes the origin of a new NEFF.

    Raises:
        OSError: a file can't be read or written.
    """
    digest = hashlib.sha256(Path(hlo).read_bytes()).hexdigest()
    value = {"hlo_sha256": digest, "neff_sha256": neff_sha256, "run": secrets.token_hex(8), "source": source}
    fileio.write_bytes(path, canonical_json(value).encode())


def read(path: str | Path) -> NeffOrigin | None:
    """Returns an origin, or None if there is no readable one."""
    try:
        value = json.loads(Path(path).read_bytes())
        return NeffOrigin(*(str(value[name]) for name in ("hlo_sha256", "source", "run", "neff_sha256")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_as_made(neff: Path, origin: NeffOrigin | None) -> bool:
    """Returns whether a NEFF has the bytes that its step wrote; a full disk or another program may have changed them."""
    if origin is None:
        return False
    try:
        return hashlib.sha256(neff.read_bytes()).hexdigest() == origin.neff_sha256
    except OSError:
        return False


def check(origins: Mapping[str, Path], hlos: Mapping[str, Path], neffs: Mapping[str, Path]) -> dict[str, NeffOrigin]:
    """Returns the origins of kernels' NEFFs, after comparing them with the current HLO and NEFFs.

    Args:
        origins: the origins' files, by kernel.
        hlos: their HLO files.
        neffs: their NEFF files.

    Raises:
        KernelgenError: NEFFs are of other HLO, or not intact. They are removed, so that the next build makes them.
    """
    known: dict[str, NeffOrigin] = {}
    stale = []
    for kernel, path in origins.items():
        origin = read(path)
        try:
            digest = hashlib.sha256(hlos[kernel].read_bytes()).hexdigest()
        except OSError:
            continue  # the bundle's own checks give a better message
        if origin is None or origin.hlo_sha256 != digest:
            neffs[kernel].unlink(missing_ok=True)
            stale.append(
                Diagnostic(
                    f"kernel {kernel}: {neffs[kernel]} was not compiled from the current HLO",
                    hint="it was removed: build again (files' times do not tell what changed, as after a clock was set back)",
                )
            )
        elif neffs[kernel].exists() and not is_as_made(neffs[kernel], origin):
            neffs[kernel].unlink(missing_ok=True)
            stale.append(
                Diagnostic(
                    f"kernel {kernel}: {neffs[kernel]} changed after it was compiled: its SHA-256 differs",
                    hint="it was removed: build again",
                )
            )
        else:
            known[kernel] = origin
    if stale:
        raise KernelgenError(stale, exit_code=EXIT_FAILED)
    return known


def count(path: str | Path, known: Mapping[str, NeffOrigin]) -> tuple[int, int, int]:
    """Returns how many NEFFs were compiled since the last call for this path, came from a cache since then, and were there before.

    Args:
        path: a file for the next call.
        known: the origins of all NEFFs, by kernel.
    """
    try:
        before = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        before = {}
    before = before if isinstance(before, dict) else {}
    runs = {kernel: origin.run for kernel, origin in known.items()}
    fileio.write_if_changed(path, canonical_json(before | runs).encode())
    new = [origin for kernel, origin in known.items() if before.get(kernel) != origin.run]
    compiled = sum(origin.source == "compiled" for origin in new)
    return compiled, len(new) - compiled, len(known) - len(new)
