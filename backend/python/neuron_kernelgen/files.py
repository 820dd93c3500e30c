"""Where the backend, export-graphs and llama-cpp-python's libraries are; importing this loads nothing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from pathlib import Path

HERE = Path(__file__).resolve().parent
BACKEND = HERE / "libggml-neuron.so"
EXPORTER = HERE / "export-graphs"
LLAMA_CPP_PYTHON = HERE / "llama-cpp-python.txt"
"""The version of llama-cpp-python whose llama.cpp both are built for."""


def libraries() -> Path:
    """Returns the folder with the libraries of llama.cpp that llama-cpp-python brings.

    Raises:
        ImportError: it is not installed, or in another version than the backend is built for.
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


def load() -> None:
    """Loads the backend into llama-cpp-python's llama.cpp.

    Raises:
        ImportError: llama-cpp-python is missing or another one, or it can't load the backend.
    """
    folder = libraries()
    import llama_cpp  # noqa: F401 - it loads llama.cpp's libraries

    ggml = ctypes.CDLL(str(folder / "libggml.so"))
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    ggml.ggml_backend_load.argtypes = [ctypes.c_char_p]
    if not ggml.ggml_backend_load(str(BACKEND).encode()):
        raise ImportError(f"llama.cpp in {folder} can't load {BACKEND}; what it prints above says why")
