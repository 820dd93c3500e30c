"""The contents of a bundle as a value: the single source of all its forms."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from kernelgen.bundle.key import KernelIndex
from kernelgen.errors import KernelgenError
from kernelgen.neff.memory import NeffMemory
from kernelgen.spec.kernel import MAX_ID, Spec

FORMAT = 3
"""Version of the bundle format (docs/reference/bundle-format.md)."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def file_name(text: str) -> str:
    """Returns `text` if it can be one component of a path, so that no id or name can cause a write outside a folder.

    Raises:
        KernelgenError: `text` can't be one component of a path.
    """
    if not _NAME.fullmatch(text) or len(text) > 200:
        raise KernelgenError(f"{text!r} cannot be the name of a file in a bundle")
    return text


def pack_name(bundle_id: str) -> str:
    """Returns the file name of a bundle's pack: `llama3_trn1.kernels.gguf`."""
    return f"{bundle_id}.kernels.gguf"


def is_kernel_id(text: str) -> bool:
    """Returns whether a text can be the id of a kernel in a bundle."""
    return 0 < len(text.encode()) <= MAX_ID and not has_control(text)


def has_control(text: str) -> bool:
    """Returns whether a text has control characters, which a terminal obeys."""
    return any(unicodedata.category(c) == "Cc" for c in text)


def is_sha256(text: str) -> bool:
    """Returns whether a text is a SHA-256 in lower-case hexadecimal digits."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class BundleOrigin:
    """The identity of a bundle and the tools that made it.

    Attributes:
        name: the manifest's name.
        target: the target.
        lnc: physical cores per logical core that the NEFFs are compiled for.
        simulated: whether the simulator compiled the NEFFs.
        compiler: the compiler's identity.
        flags: its flags.
        version: version of kernelgen.
        jax_version: version of the jax that emitted the HLO, or `unknown`.
    """

    name: str
    target: str
    lnc: int
    simulated: bool
    compiler: str
    flags: tuple[str, ...]
    version: str
    jax_version: str

    @property
    def id(self) -> str:
        return f"{self.name}_{self.target}"

    def problem(self) -> str | None:
        """Returns the problem with these values in a bundle that was read, or None."""
        for name in ("name", "target"):
            try:
                file_name(getattr(self, name))  # these values name an embedded bundle's files
            except KernelgenError as error:
                return f"{name}: {error.diagnostics[0].message}"
        for name in ("compiler", "flags", "version", "jax_version"):
            if has_control("".join(getattr(self, name))):
                return f"{name} holds a NUL or another control character"
        return None if 0 < self.lnc < 2**32 else f"lnc is {self.lnc}; expected 1 or more physical cores"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that the bundle stores.

    Attributes:
        path: its current path.
        sha256: 64 hexadecimal digits.
        size: bytes.
    """

    path: Path
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Contents:
    """A bundle before it is written.

    Attributes:
        origin: its identity.
        index: the lookup tables; a kernel's number is its position in `index.ids`.
        specs: each kernel's spec, by number.
        hlos: each kernel's HLO, by number.
        neffs: the distinct NEFFs, in the order in which kernels first use them.
        kernel_neff: for each kernel, the position of its NEFF in `neffs`.
        notes: each kernel's notes as JSON, empty for a kernel without any; an empty tuple if no kernel has notes.
        special_flags: (number, the compiler's flags) of kernels whose flags differ from the bundle's.
        neff_memory: memory of each NEFF's program, in the order of `neffs`.
    """

    origin: BundleOrigin
    index: KernelIndex
    specs: tuple[Spec, ...]
    hlos: tuple[StoredFile, ...]
    neffs: tuple[StoredFile, ...]
    kernel_neff: tuple[int, ...]
    notes: tuple[str, ...] = ()
    special_flags: tuple[tuple[int, tuple[str, ...]], ...] = ()
    neff_memory: tuple[NeffMemory, ...] = ()
