"""Which HLO files of a build folder are what an emit would write now, so that only the others are emitted.

Beside a kernel's HLO lies `<kernel>.made`, with two digests: of all that the HLO was made from (the kernel, its emitter and the
modules that this imports, kernelgen, Python, the packages that emitting uses and the environment variables that they read) and of
the HLO. Both must be as they are now; times of files say nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kernelgen import fileio
from kernelgen.errors import KernelgenError
from kernelgen.library import Library, dependencies, find
from kernelgen.plan import Kernel, canonical_json, spec_json

_PACKAGES = ("jax", "jaxlib", "ml_dtypes", "numpy", "protobuf")
_VARIABLES = ("JAX_", "XLA_")
_KERNELGEN = Path(__file__).resolve().parent.parent


class Emits:
    """What is there, and what it was made from.

    Args:
        folder: where the HLO files are.
        libraries: where emitters are looked for; the first that has an op wins.
    """

    def __init__(self, folder: Path, libraries: Sequence[Library]) -> None:
        self._folder = folder
        self._libraries = libraries
        self._common = {
            "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
            "kernelgen": {str(p.relative_to(_KERNELGEN)): _digest(p) for p in sorted(_KERNELGEN.rglob("*.py"))},
            "packages": {name: _version(name) for name in _PACKAGES},
            "python": platform.python_version(),
        }

    def hlo(self, kernel: Kernel) -> Path:
        """Returns where a kernel's HLO is, or will be."""
        return self._folder / f"{kernel.spec.id}.hlo.pb"

    def inputs(self, kernel: Kernel) -> str | None:
        """Returns a digest of what the kernel's HLO is made from; None when a source is broken, which the emit will say."""
        library, registration = find(kernel.spec.op, self._libraries)
        try:
            sources = {file.name: _digest(file) for file in dependencies(library, registration.module)}
        except (KernelgenError, OSError):
            return None
        own = {
            "library": library.name,
            "module": registration.module,
            "sources": sources,
            "spec": spec_json(kernel.spec),
        }
        return hashlib.sha256(canonical_json(self._common | own).encode()).hexdigest()

    def is_current(self, kernel: Kernel, inputs: str | None) -> bool:
        """Returns whether the HLO was made from these inputs, and is as it was made."""
        if inputs is None:
            return False
        try:
            return self._made(kernel).read_text() == _text(inputs, self.hlo(kernel))
        except (OSError, UnicodeDecodeError):
            return False

    def note(self, kernel: Kernel, inputs: str) -> None:
        """Remembers what the HLO that was just written was made from.

        Raises:
            OSError: the folder can't be written.
        """
        fileio.write_bytes(self._made(kernel), _text(inputs, self.hlo(kernel)).encode())

    def _made(self, kernel: Kernel) -> Path:
        return self._folder / f"{kernel.spec.id}.made"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the emit will say so
        return "none"


def _text(inputs: str, hlo: Path) -> str:
    return f"inputs {inputs}\nhlo {_digest(hlo)}\n"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
