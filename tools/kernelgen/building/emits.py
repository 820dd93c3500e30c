"""Which HLO files of a build folder are what an emit would write now, so that only the others are emitted.

Beside a kernel's HLO lies `<kernel>.inputs`, with two digests: of all that the HLO was made from (the kernel, its emitter and the
modules that this imports, kernelgen, Python, the packages that emitting uses and the environment variables that they read) and of
the HLO. Both must be as they are now; times of files say nothing. What imports anything else is emitted by every build.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kernelgen import fileio
from kernelgen.canonical import canonical_json
from kernelgen.emitters.dependencies import dependencies
from kernelgen.emitters.library import Library
from kernelgen.errors import KernelgenError
from kernelgen.filenames import hlo_file
from kernelgen.kernel import spec_json
from kernelgen.plan import Kernel

_PACKAGES = ("gguf", "jax", "jaxlib", "ml_dtypes", "numpy", "protobuf")
_KNOWN = frozenset({*sys.stdlib_module_names, *_PACKAGES, "kernelgen"})
"""What may be imported: the digest covers it."""

_VARIABLES = ("JAX_", "XLA_")
_KERNELGEN = Path(__file__).resolve().parent.parent


class Emits:
    """What is there, and what it was made from.

    Args:
        folder: where the HLO files are.
        libraries: every kernel library that the plan names.
    """

    def __init__(self, folder: Path, libraries: Sequence[Library]) -> None:
        self._folder = folder
        self._libraries = {library.name: library for library in libraries}
        self._common = {
            "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
            "kernelgen": {str(p.relative_to(_KERNELGEN)): _digest(p) for p in sorted(_KERNELGEN.rglob("*.py"))},
            "packages": {name: _version(name) for name in _PACKAGES},
            "python": platform.python_version(),
        }

    def hlo(self, kernel: Kernel) -> Path:
        """Returns where a kernel's HLO is, or will be."""
        return self._folder / hlo_file(kernel.spec.id)

    def emitter(self, kernel: Kernel) -> Path:
        """Returns the module that computes a kernel."""
        return self._libraries[kernel.library].file(kernel.emitter)

    def inputs(self, kernel: Kernel) -> str | None:
        """Returns a digest of what the kernel's HLO is made from.

        None when that is not known: a source imports what is none of the library's own, or it is broken, which the emit will say.
        """
        library = self._libraries[kernel.library]
        try:
            files = dependencies(library, kernel.emitter)
            if any(_imports_others(file.read_bytes(), file.parent) for file in files):
                return None
            sources = [[file.parent == library.root, file.name, _digest(file)] for file in files]
        except (KernelgenError, OSError):
            return None
        own = {
            "library": library.name,
            "module": kernel.emitter,
            "sources": sources,
            "spec": spec_json(kernel.spec),
        }
        return hashlib.sha256(canonical_json(self._common | own).encode()).hexdigest()

    def is_current(self, kernel: Kernel, inputs: str | None) -> bool:
        """Returns whether the HLO was made from these inputs, and is as it was made."""
        if inputs is None:
            return False
        try:
            return self._note_file(kernel).read_text() == _text(inputs, self.hlo(kernel))
        except (OSError, UnicodeDecodeError):
            return False

    def note(self, kernel: Kernel, inputs: str) -> None:
        """Remembers what the HLO that was just written was made from.

        Raises:
            OSError: the folder can't be written.
        """
        fileio.write_bytes(self._note_file(kernel), _text(inputs, self.hlo(kernel)).encode())

    def _note_file(self, kernel: Kernel) -> Path:
        return self._folder / f"{kernel.spec.id}.inputs"


@lru_cache(maxsize=1024)
def _imports_others(source: bytes, folder: Path) -> bool:
    """Returns whether a module imports what is neither one of `_KNOWN` nor a module beside it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` and `from .x import …`: a folder's files, or those above this one, are not looked at.
            beside = [node.module] if node.module else [alias.name for alias in node.names]
            if node.level > 1 or any("." in name or (folder / name).is_dir() for name in beside):
                return True
            continue
        else:
            continue
        if any(name.partition(".")[0] not in _KNOWN for name in names):
            return True
    return False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the emit will say so
        return "none"


def _text(inputs: str, hlo: Path) -> str:
    return f"inputs {inputs}\nhlo {_digest(hlo)}\n"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
