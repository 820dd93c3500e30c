"""Where in a kernel's file something goes wrong, and the error that says so."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError, Location

_OWN = str(Path(__file__).parent)
_OTHERS = ("jax", "jaxlib", "numpy", "contextlib", "functools")


def is_users(frame: FrameType) -> bool:
    """Returns whether a frame runs a kernel's code, and not NumPy's, JAX's or kernelgen's."""
    name = frame.f_globals.get("__name__") or ""
    return not frame.f_code.co_filename.startswith(_OWN) and name.partition(".")[0] not in _OTHERS


def place() -> Location | None:
    """Returns the line of the kernel's code that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno, 1) if frame else None


def refused(message: str, hint: str | None = None) -> KernelgenError:
    """Returns the error of what a kernel may not do, at the line where it does."""
    return KernelgenError(Diagnostic(message, place(), hint), exit_code=EXIT_FAILED)
