"""Finds the place of an error in a kernel's file, and makes the error."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError, Location

_OWN = str(Path(__file__).parent)
_OTHERS = ("jax", "jaxlib", "numpy", "nki_interpreter", "contextlib", "functools")


def is_users(frame: FrameType) -> bool:
    """Returns whether a frame runs a kernel's code rather than that of NumPy, JAX, kernelgen or its interpreter of NKI."""
    name = frame.f_globals.get("__name__") or ""
    return not frame.f_code.co_filename.startswith(_OWN) and name.partition(".")[0] not in _OTHERS


def place() -> Location | None:
    """Returns the running line of the kernel's code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno, 1) if frame else None


def refused(message: str, hint: str | None = None) -> KernelgenError:
    """Returns the error for a violation in a kernel, at its current line."""
    return KernelgenError(Diagnostic(message, place(), hint), exit_code=EXIT_FAILED)
