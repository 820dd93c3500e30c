"""Loads kernels from files: imports of NKI resolve to the interpreter while such a file is imported, and only then."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from nki_interpreter import modules as modules  # it registers what kernels' imports find
from nki_interpreter.errors import LoadError
from nki_interpreter.kernel import NkiKernel
from nki_interpreter.standing_in import PACKAGES as PACKAGES
from nki_interpreter.standing_in import absent as absent
from nki_interpreter.standing_in import interpreter as interpreter

_MOST_TEXT = 2000
"""The most characters of an exception's message that an error repeats."""


def load_file(path: Path) -> types.ModuleType:
    """Imports a file of kernels under a unique name. Afterwards removes the modules beside the file that it imported.

    Raises:
        LoadError: the file can't be imported; the error has place and reason.
    """
    name = f"_nki_interpreter_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"can't import {path}: it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with interpreter():
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: the file can contain any code
        raise _load_error(path, error) from error
    finally:
        sys.dont_write_bytecode = bytecode
        sys.path.remove(folder)
        for other in set(sys.modules) - before:
            file = getattr(sys.modules[other], "__file__", None)
            if file and Path(file).resolve().parent == Path(folder):
                del sys.modules[other]
    return module


def load_kernel(path: str | Path, function: str) -> Any:
    """Returns a kernel of a file, decorated or not.

    Raises:
        LoadError: the file can't be imported or has no such function.
    """
    path = Path(path)
    module = load_file(path)
    found = getattr(module, function, None)
    if not callable(found):
        raise LoadError(f"{path} has no function '{function}'")
    return found if isinstance(found, NkiKernel) else NkiKernel(found, older=is_older(path))


def is_older(path: Path) -> bool:
    """Returns whether a file imports `neuronxcc.nki`."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return "neuronxcc" in text or "torch_neuronx" in text


def _load_error(path: Path, error: BaseException) -> LoadError:
    line, trace = 1, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno:
        line = error.lineno
    return LoadError(f"can't import the kernels of {path.name}: {_described(error)}", str(path), line)


def _described(error: BaseException) -> str:
    """Returns the type of an exception and the start of its message."""
    name = type(error).__name__
    try:
        text = str(error).strip()
    except Exception:
        return f"{name}, whose message can't be printed"
    return f"{name}: {text[:_MOST_TEXT]}" if text else name
