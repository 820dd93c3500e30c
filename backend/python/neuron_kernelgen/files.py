"""Finds the backend, export-graphs and llama-cpp-python's libraries. Importing this module loads no library."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import shutil
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BACKEND = HERE / "libggml-neuron.so"
EXPORTER = HERE / "export-graphs"
LLAMA_CPP_PYTHON = HERE / "llama-cpp-python.txt"
"""A file with the version of llama-cpp-python for whose llama.cpp the backend and export-graphs are built."""


def libraries() -> Path:
    """Returns the folder with llama-cpp-python's libraries of llama.cpp.

    Raises:
        ImportError: llama-cpp-python is not installed, or not in the version that the backend is built for.
    """
    wanted = LLAMA_CPP_PYTHON.read_text(encoding="utf-8").strip()
    mend = f"pip install llama-cpp-python=={wanted}"
    try:
        found = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"neuron-kernelgen-llama-cpp needs llama-cpp-python {wanted}: {mend}") from None
    if found != wanted:
        raise ImportError(
            f"neuron-kernelgen-llama-cpp is built for the llama.cpp of llama-cpp-python {wanted}; {found} is installed: {mend}"
        )
    package = importlib.util.find_spec("llama_cpp")
    if package is None or package.origin is None:
        raise ImportError(f"neuron-kernelgen-llama-cpp can't find the package llama_cpp: {mend}")
    return Path(package.origin).parent / "lib"


@functools.cache
def linked_libraries() -> Path:
    """Returns a folder, made for this process, in which `libllama.so` and `libllama.so.0` are one file; the same for each library.

    pip installs two copies. If a program links one name and a library links the other, the process loads both copies.

    Raises:
        ImportError: like `libraries`.
    """
    there = libraries()
    folder = Path(tempfile.mkdtemp(prefix="neuron-kernelgen-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for library in there.glob("lib*.so"):
        versions = [
            path for path in there.glob(f"{library.name}.*") if path.name.count(".") == library.name.count(".") + 1
        ]
        for name in {library.name, *(path.name for path in versions)}:
            (folder / name).symlink_to(versions[0] if versions else library)
    return folder


def _loaded(name: str) -> Path:
    """Returns the file of a library that this process has loaded.

    Raises:
        ImportError: the process has loaded no library of this name.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = Path(line.partition("/")[1] + line.partition("/")[2])
        if path.name.startswith(f"{name}.so"):
            return path
    raise ImportError(f"llama-cpp-python loads no {name}.so")


def load() -> None:
    """Loads the backend into llama-cpp-python's llama.cpp.

    Raises:
        ImportError: llama-cpp-python is missing, has another version, or can't load the backend.
    """
    libraries()
    importlib.import_module("llama_cpp")  # loads llama.cpp's libraries
    # The backend does not link llama.cpp's libraries: their functions must be in the process's global scope.
    ctypes.CDLL(str(_loaded("libggml-base")), mode=ctypes.RTLD_GLOBAL)
    ggml = ctypes.CDLL(str(_loaded("libggml")), mode=ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    ggml.ggml_backend_load.argtypes = [ctypes.c_char_p]
    if not ggml.ggml_backend_load(str(BACKEND).encode()):
        raise ImportError(f"llama.cpp in {libraries()} can't load {BACKEND}; what it prints above says why")
