"""Errors of NKI kernels. Each has the error code from AWS's documentation, and the kernel's file and line."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path

_HERE = str(Path(__file__).parent)


class NkiError(Exception):
    """A kernel breaks a rule of NKI or a limit of the hardware.

    Args:
        code: AWS's name for the mistake ("err_num_partition_exceed_arch_limit"), or a name in the same style.
        message: what is wrong and how to mend it.
        place: the kernel's file and line; by default the current line.
    """

    def __init__(self, code: str, message: str, place: tuple[str, int] | None = None) -> None:
        self.code = code
        self.file, self.line = place or kernel_location()
        self.message = message
        where = f"{self.file}:{self.line}: " if self.file else ""
        super().__init__(f"{where}{code}: {message}")


class LoadError(Exception):
    """A file of kernels can't be imported, or has no such kernel.

    Args:
        message: what is wrong.
        file: the file, if known.
        line: the line in the file.
    """

    def __init__(self, message: str, file: str = "", line: int = 1) -> None:
        self.message, self.file, self.line = message, file, line
        super().__init__(f"{file}:{line}: {message}" if file else message)


class NkiIndexError(NkiError, IndexError):
    """An index is out of range."""


class NkiTypeError(NkiError, TypeError):
    """An argument has a type that the function does not take."""


class NkiValueError(NkiError, ValueError):
    """An argument has a value that the function does not take."""


@functools.cache
def is_own(file: str) -> bool:
    """Returns whether a file belongs to the interpreter or to Python."""
    return file.startswith((_HERE, "<frozen"))


_OWN: set[str] = set()
"""A cache of the interpreter's files, because each instruction walks some frames."""


def kernel_location() -> tuple[str, int]:
    """Returns the file and line of the innermost frame outside of the interpreter, or ("", 0) if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _OWN:
            if not is_own(name):
                return name, frame.f_lineno
            _OWN.add(name)
        frame = frame.f_back
    return "", 0
