"""Names of files that one step writes and another reads. The rules for Bazel and CMake use the same names."""

from __future__ import annotations

from pathlib import Path

HLO = ".hlo.pb"
"""Suffix of a file with a serialized `HloModuleProto`."""

NEFF = ".neff"

STATE = ".kernelgen"
"""Folder for intermediate files in the output folder of `kernelgen build`."""


def hlo_file(kernel: str) -> str:
    """Returns the name of a kernel's HLO file, from the kernel's id."""
    return f"{kernel}{HLO}"


def notes_file(kernel: str) -> str:
    """Returns the name of an emit step's notes about a kernel, from the kernel's id."""
    return f"{kernel}.notes.json"


def entries_file(bundle: str) -> str:
    """Returns the name of the file with a bundle's entries (`kernelgen.plan.BundleEntries`), from the bundle's id."""
    return f"{bundle}.entries.json"


def native_file(kernel: str) -> str:
    """Returns the name of the output of NKI's compiler for a kernel, from the kernel's id."""
    return f"{kernel}.json"


def neff_file(kernel: str, config: str) -> str:
    """Returns the name of a kernel's NEFF for one compile, from the kernel's id and the settings' key."""
    return f"{kernel}.{config}{NEFF}"


def kernel_of(hlo: Path) -> str:
    """Returns the kernel's id in the name of its file; for any other file, its name without its suffix."""
    return hlo.name.removesuffix(".pb").removesuffix(".hlo")
