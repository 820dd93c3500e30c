"""Finds the HLO files of a build folder that an emit would reproduce, so that only the others are emitted.

Beside a kernel's HLO lies `<kernel>.inputs` with the digests of the HLO and of its inputs: the kernel, its emitter and the modules
that it imports, kernelgen without languages that none of these uses, Python, and the packages that emitting uses. Times of sources
do not count; of other files beside a user's emitter, which may be its data, size and time count. Every build emits a kernel whose
emitter imports anything else.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kernelgen import fileio
from kernelgen.emitters.library import BUILTIN, INTERPRETER, Library, dependencies, language_of_file, languages_of
from kernelgen.errors import KernelgenError
from kernelgen.plan import Kernel
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.filenames import hlo_file, native_file, notes_file

_PACKAGES = ("gguf", "jax", "jaxlib", "ml_dtypes", "neuronx-cc", "nki", "numpy", "protobuf")
_KNOWN = frozenset(
    {
        *sys.stdlib_module_names,
        *_PACKAGES,
        "kernelgen",
        "neuronxcc",
        "nki_interpreter",
        "nkigen",
        "nkipy",
        "torch_neuronx",
    }
)
"""Modules that an emitter may import: the digest covers them."""

_KERNELGEN = Path(__file__).resolve().parent.parent


class HloFiles:
    """The HLO files of a build folder and their recorded inputs.

    Args:
        folder: the folder of the HLO files.
        libraries: every kernel library that the plan names.
    """

    def __init__(self, folder: Path, libraries: Sequence[Library]) -> None:
        self._folder = folder
        self.libraries = {library.name: library for library in libraries}
        packages = (_KERNELGEN, _KERNELGEN.with_name(INTERPRETER))
        files = [(p.relative_to(root.parent), p) for root in packages for p in sorted(root.rglob("*.py"))]
        self._own = {name: _digest(path) for name, path in files}
        self._common = {
            "packages": {name: _version(name) for name in _PACKAGES},
            "python": platform.python_version(),
        }

    def hlo(self, kernel: Kernel) -> Path:
        """Returns the path of a kernel's HLO."""
        return self._folder / hlo_file(kernel.id)

    def notes(self, kernel: Kernel) -> Path:
        """Returns the path of a kernel's notes."""
        return self._folder / notes_file(kernel.id)

    def modules(self, kernel: Kernel) -> list[tuple[Library, Path]]:
        """Returns the modules that compute a kernel, with their libraries."""
        return modules(kernel, self.libraries)

    def inputs(self, kernel: Kernel) -> str | None:
        """Returns a digest of the inputs of the kernel's HLO.

        Returns None if it can't be computed: a source imports a module outside the library, or is broken, which the emit reports.
        """
        emitters = []
        languages = {kernel.language}
        try:
            for library, module in self.modules(kernel):
                files = dependencies(library, library.module(module))
                package = library.root.name if library.package else ""
                if any(_imports_others(file.read_bytes(), file.parent, package) for file in files):
                    return None
                languages |= languages_of(files)
                sources = [[*library.place(file), _digest(file)] for file in files]
                emitter = {"library": library.name, "module": library.module(module), "sources": sources}
                emitters.append(emitter | ({} if library.name == BUILTIN else {"data": _files_beside(module)}))
            prebuilt = [_digest(Path(word.partition("=")[2])) for word in _prebuilt_arguments(kernel, self.libraries)]
        except (KernelgenError, OSError):
            return None
        own: dict[str, Any] = {"emitters": emitters, "spec": kernel.spec.json, "targets": kernel.targets}
        own |= {"prebuilt": prebuilt}
        own |= {"kernelgen": {str(p): d for p, d in self._own.items() if language_of_file(p) in ("", *languages)}}
        return hashlib.sha256(canonical_json(self._common | own).encode()).hexdigest()

    def is_current(self, kernel: Kernel, inputs: str | None) -> bool:
        """Returns whether the HLO is intact and was made from these inputs."""
        if inputs is None:
            return False
        try:
            note = json.loads(self._note_file(kernel).read_bytes())
            return (
                note["inputs"] == inputs
                and note["hlo"] == _digest(self.hlo(kernel))
                and (not kernel.noted or self.notes(kernel).is_file())
            )
        # The note is untrusted input; a bad one costs at most one more emit.
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False

    def forget(self, kernel: Kernel) -> None:
        """Removes a kernel's HLO, so that a later file is certainly new.

        Raises:
            OSError: the folder can't be written.
        """
        # The note goes first: if the process is killed in between, no build takes the remaining HLO for current.
        self._note_file(kernel).unlink(missing_ok=True)
        self.hlo(kernel).unlink(missing_ok=True)

    def note(self, kernel: Kernel, inputs: str) -> None:
        """Records the inputs of the HLO that was just written.

        Args:
            kernel: the kernel of the HLO.
            inputs: the digest from before the emit (`inputs`).

        Raises:
            OSError: the folder can't be written.
        """
        note = {"hlo": _digest(self.hlo(kernel)), "inputs": inputs}
        fileio.write_bytes(self._note_file(kernel), canonical_json(note).encode())

    def _note_file(self, kernel: Kernel) -> Path:
        return self._folder / f"{kernel.id}.inputs"


def modules(kernel: Kernel, libraries: Mapping[str, Library]) -> list[tuple[Library, Path]]:
    """Returns the modules that a plan names for a kernel, with their libraries; `libraries` is by name."""
    return [(libraries[name], libraries[name].file(module)) for name, module in kernel.emitters]


def emit_arguments(kernel: Kernel, libraries: Mapping[str, Library], output: Path) -> list[str]:
    """Returns the arguments of the step that emits a kernel (`kernelgen.steps.worker`)."""
    return [
        "emit",
        f"--spec={kernel.spec.json}",
        *(word for library, file in modules(kernel, libraries) for word in _module_arguments(library, file)),
        f"--output={output}",
        *(f"--target={target}" for target in kernel.targets),
        *_prebuilt_arguments(kernel, libraries),
    ]


def _prebuilt_arguments(kernel: Kernel, libraries: Mapping[str, Library]) -> list[str]:
    if not kernel.prebuilt:
        return []
    return [f"--prebuilt={libraries[kernel.prebuilt].root.absolute() / native_file(kernel.id)}"]


def _module_arguments(library: Library, file: Path) -> list[str]:
    module = [f"--module={library.module(file)}"] if library.package else []
    return [f"--library={library.name}", f"--emitter={file.absolute()}", *module]


# Cached by text: hundreds of kernels share a few modules.
@lru_cache(maxsize=1024)
def _imports_others(source: bytes, folder: Path, package: str) -> bool:
    """Returns whether a module imports anything but `_KNOWN`, modules beside it, and modules of its own package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.ImportFrom):
            if package:
                continue  # `dependencies` follows its imports, and no other module can be imported this way
            # `from . import x` and `from .x import …`: not folders, nor files of parent packages.
            beside = [node.module] if node.module else [alias.name for alias in node.names]
            if node.level > 1 or any("." in name or (folder / name).is_dir() for name in beside):
                return True
            continue
        else:
            continue
        if any(name.partition(".")[0] not in (*_KNOWN, package) for name in names):
            return True
    return False


def _files_beside(module: Path) -> list[list[str | int]]:
    """Returns name, size and time of each file in a module's folder, except sources."""
    files = sorted(path for path in module.parent.iterdir() if path.suffix != ".py" and path.is_file())
    return [[path.name, (status := path.stat()).st_size, status.st_mtime_ns] for path in files]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the emit reports it
        return "none"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
