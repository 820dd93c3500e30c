"""What the files are called that one step writes and another reads. The rules for Bazel and CMake use the same names."""

from __future__ import annotations

from pathlib import Path

HLO = ".hlo.pb"
"""Ends the name of a serialized `HloModuleProto`."""

NEFF = ".neff"

STATE = ".kernelgen"
"""The folder in the output folder of `kernelgen build` that holds what is between manifests and bundles."""


def hlo_file(kernel: str) -> str:
    """Returns the name of a kernel's HLO, given the kernel's id."""
    return f"{kernel}{HLO}"


def notes_file(kernel: str) -> str:
    """Returns the name of what an emit step notes about a kernel besides its HLO, given the kernel's id."""
    return f"{kernel}.notes.json"


def entries_file(bundle: str) -> str:
    """Returns the name of what a plan says of a bundle's kernels (`kernelgen.plan.BundleEntries`), given the bundle's id."""
    return f"{bundle}.entries.json"


def native_file(kernel: str) -> str:
    """Returns the name of what NKI's own compiler made of a kernel, given the kernel's id."""
    return f"{kernel}.json"


def neff_file(kernel: str, config: str) -> str:
    """Returns the name of a kernel's NEFF for one compile, given the kernel's id and the settings' key."""
    return f"{kernel}.{config}{NEFF}"


def keyed_neff_file(key: str) -> str:
    """Returns the name of a NEFF in the folder of `kernelgen build`, given the digest of all that it depends on."""
    return f"{key[:40]}{NEFF}"


def kernel_of(hlo: Path) -> str:
    """Returns the kernel's id, given a file that is named after it; any other file's name without its ending."""
    return hlo.name.removesuffix(".pb").removesuffix(".hlo")
