"""What a bundle holds, as a value: the one thing that all of its forms are written from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kernelgen.bundle.index import KernelIndex
from kernelgen.errors import KernelgenError
from kernelgen.neff.memory import NeffMemory
from kernelgen.spec.graph_kernel import GraphSpec, Spec
from kernelgen.spec.op_kernel import MAX_ID
from kernelgen.spec.source_kernel import SourceSpec

FORMATS = (1, 2, 3)
"""Versions of the bundle format that are read (docs/reference/bundle-format.md).

A bundle with kernels that are named by their source has the third, else one with graph kernels the second.
"""

SPEC_DEPTH = 3
"""The arrays and objects of a tree's index that a spec and notes are in."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def file_name(text: str) -> str:
    """Returns `text` if it can be one component of a path: nothing is written outside a folder, whatever an id or a name says.

    Raises:
        KernelgenError: it can't.
    """
    if not _NAME.fullmatch(text) or len(text) > 200:
        raise KernelgenError(f"{text!r} cannot be the name of a file in a bundle")
    return text


def pack_name(bundle_id: str) -> str:
    """Returns the file name of a bundle's pack: `llama3_trn1.kernels.gguf`."""
    return f"{bundle_id}.kernels.gguf"


def is_kernel_id(text: str) -> bool:
    """Returns whether a text can be the id of a kernel in a bundle."""
    return 0 < len(text.encode()) <= MAX_ID and "\0" not in text


def is_sha256(text: str) -> bool:
    """Returns whether a text is a SHA-256 in lower-case hexadecimal digits."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class BundleOrigin:
    """What a bundle is and what made it.

    Attributes:
        name: the manifest's name.
        target: the target.
        lnc: physical cores per logical one that the NEFFs are compiled for.
        simulated: whether the NEFFs are the simulator's.
        compiler: the compiler's identity.
        flags: its flags.
        version: version of kernelgen.
        jax_version: version of the jax that emitted the HLO; `unknown` when it was not told.
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
        """Returns the problem with this kernel in a bundle that was read, or None."""
        for name in ("name", "target"):
            try:
                file_name(getattr(self, name))  # an embedded bundle's files are named after them
            except KernelgenError as error:
                return f"{name}: {error.diagnostics[0].message}"
        for name in ("compiler", "flags", "version", "jax_version"):
            if "\0" in "".join(getattr(self, name)):
                return f"{name} holds a NUL"
        return None if 0 < self.lnc < 2**32 else f"lnc is {self.lnc}; expected 1 or more physical cores"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file to be stored.

    Attributes:
        path: where it is now.
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
        origin: what it is.
        index: the lookup tables; a kernel's number is its position in `index.ids`.
        specs: each kernel's spec, by number.
        hlos: each kernel's HLO, by number.
        neffs: the distinct NEFFs, in the order in which kernels first use them.
        kernel_neff: for each kernel, the position of its NEFF in `neffs`.
        notes: what is noted about each kernel, as JSON; a text is empty where there is nothing, and there is none at
            all where nothing is noted.
        special_flags: (number, the compiler's flags) of kernels that were compiled with others than the bundle's.
        neff_memory: what the program of each NEFF takes, as `neffs`.
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

    @property
    def format(self) -> int:
        """The version of the bundle format that it is written in."""
        return format_of(self.specs)


def format_of(specs: Iterable[Spec]) -> int:
    """Returns the first version of the bundle format that has such kernels."""
    return max((3 if isinstance(s, SourceSpec) else 2 if isinstance(s, GraphSpec) else 1 for s in specs), default=1)


def readable() -> str:
    """Returns the formats that are read, for messages."""
    return f"formats {FORMATS[0]} to {FORMATS[-1]}"
