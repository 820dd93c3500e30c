"""A kernel's output of NKI's compiler in a file, so that builds without that compiler have the kernel, too.

The file is JSON: the compiler's record (`kernelgen.compilers.nki_driver`), its kernel and target, and a digest of its sources.
`recording` makes it, `using` reads it. The rest is the same as with the compiler itself, so the HLO has the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen import fileio
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError
from kernelgen.languages.nki import native
from kernelgen.spec.canonical import canonical_json

FORMAT = 1
"""Version of the file."""

AGAIN = "make it again where NKI's own compiler is installed: `kernelgen prebuild MANIFEST`"


@dataclass(frozen=True, slots=True)
class PrebuiltRequest:
    """The kernel to emit.

    Attributes:
        kernel: `SourceSpec.id`.
        target: neuronx-cc's name of the device.
        sources: digest of the kernel's sources (`kernelgen.emitters.library`).
        file: the kernel's file, for messages.
    """

    kernel: str
    target: str
    sources: str
    file: str


@contextlib.contextmanager
def using(file: Path, request: PrebuiltRequest) -> Iterator[None]:
    """Uses the file's record for the kernel that the block emits.

    Raises:
        KernelgenError: the file is missing or was changed, or belongs to another kernel, target or source.
    """
    kept = read(file)
    for what, was, wanted in (
        ("of the kernel {}", kept["kernel"], request.kernel),
        ("for {}", kept["target"], request.target),
    ):
        if was != wanted:
            raise _error(f"{file}: it was made {what.format(was)}, not {what.format(wanted)}")
    if kept["sources"] != request.sources:
        raise _error(
            f"{file}: its sources differ from {request.file} and the modules that it imports",
            f"undo the edit, or {AGAIN}; comments and empty lines do not count",
        )
    with native.known(file, kept["made"]):
        yield


def read(file: Path) -> dict[str, Any]:
    """Returns a file's content.

    Raises:
        KernelgenError: it is missing, or was changed.
    """
    try:
        kept = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise _error(f"{file} is missing: it holds what NKI's own compiler made of the kernel") from None
    except OSError as error:
        raise _error(f"{file}: {error.strerror or error}") from None
    except ValueError:
        kept = None
    if not isinstance(kept, dict) or kept.get("format") != FORMAT:
        raise _error(f"{file}: not what `kernelgen prebuild` writes, of format {FORMAT}")
    if kept.pop("digest", None) != digest(kept):
        raise _error(f"{file}: it was changed after it was made")
    return kept


@contextlib.contextmanager
def recording(file: Path, request: PrebuiltRequest) -> Iterator[None]:
    """Writes this machine's toolchain's output for the kernel that the block emits, when the block ends.

    An existing file with the same content keeps its time.

    Raises:
        KernelgenError: there is no toolchain.
        OSError: the file can't be written.
    """
    native.toolchain()
    with native.keeping() as records:
        yield
    if len(records) != 1:
        raise KernelgenError(
            f"kernel {request.kernel}: {len(records)} records were made, not one", exit_code=EXIT_FAILED
        )
    kept = {
        "format": FORMAT,
        "kernel": request.kernel,
        "target": request.target,
        "sources": request.sources,
        "made": records[0],
    }
    text = json.dumps(kept | {"digest": digest(kept)}, indent=1)
    fileio.write_if_changed(file, f"{text}\n".encode())


def digest(kept: Mapping[str, Any]) -> str:
    """Returns the digest of the file's other fields."""
    return hashlib.sha256(canonical_json(kept).encode()).hexdigest()


def _error(message: str, hint: str = AGAIN) -> KernelgenError:
    return KernelgenError(Diagnostic(message, hint=hint), exit_code=EXIT_FAILED)
