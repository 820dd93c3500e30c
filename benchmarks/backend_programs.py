"""Finds the programs that benchmarks run: built by Bazel, or named by a variable. This module does not depend on kernelgen."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

# The root of the project's files in a Bazel program: links into the checkout and to built files.
ROOT = Path(__file__).absolute().parents[1]

KERNELGEN = (sys.executable, "-P", "-m", "kernelgen")


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment with more variables, so that `KERNELGEN` is found."""
    return os.environ | {"PYTHONPATH": str(ROOT / "tools")} | more


def built(path: str, variable: str) -> Path:
    """Returns the path of the file that Bazel built at `path`, or that a variable names.

    Raises:
        SystemExit: it does not exist.
    """
    found = Path(os.environ.get(variable, ROOT / path)).absolute()
    if not found.exists():
        raise SystemExit(
            f"{found} is not there; run this through Bazel (docs/reference/benchmarks.md), or name it in {variable}"
        )
    return found


@dataclass(frozen=True)
class Programs:
    """The programs that export llama.cpp's graphs.

    Attributes:
        exporter: the path of export-graphs.
        libraries: the folder with llama.cpp's libraries.
    """

    exporter: Path
    libraries: Path

    @staticmethod
    def find() -> Programs:
        """Returns the programs that Bazel built, or that NEURON_KERNELGEN_EXPORTER and LLAMA_CPP_PROGRAMS name.

        Raises:
            SystemExit: a program is missing.
        """
        return Programs(
            built("backend/exporter/exporter/export-graphs", "NEURON_KERNELGEN_EXPORTER"),
            built("tools/llama_cpp/llama_cpp", "LLAMA_CPP_PROGRAMS"),
        )

    def options(self) -> list[str]:
        """Returns kernelgen's options for these programs."""
        return [f"--exporter={self.exporter}", f"--llama-cpp={self.libraries}"]
