"""Finds the programs that benchmarks run: built by Bazel, or named by a variable. Does not depend on kernelgen."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

# The project's files as a program of Bazel's sees them: links into the checkout and into what was built.
ROOT = Path(__file__).absolute().parents[1]

KERNELGEN = (sys.executable, "-P", "-m", "kernelgen")


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment, in which `KERNELGEN` is found, with more variables."""
    return os.environ | {"PYTHONPATH": str(ROOT / "tools")} | more


def built(path: str, variable: str) -> Path:
    """Returns the path of what Bazel built at `path`, or of what a variable names.

    Raises:
        SystemExit: it is not there.
    """
    found = Path(os.environ.get(variable, ROOT / path)).absolute()
    if not found.exists():
        raise SystemExit(
            f"{found} is not there; run this through Bazel (docs/reference/benchmarks.md), or name it in {variable}"
        )
    return found


@dataclass(frozen=True)
class Programs:
    """What asks llama.cpp.

    Attributes:
        exporter: the path of export-graphs.
        libraries: the folder with llama.cpp's libraries.
    """

    exporter: Path
    libraries: Path

    @staticmethod
    def find() -> Programs:
        """Returns what Bazel built, or NEURON_KERNELGEN_EXPORTER and LLAMA_CPP_PROGRAMS name.

        Raises:
            SystemExit: one is not there.
        """
        return Programs(
            built("backend/exporter/exporter/export-graphs", "NEURON_KERNELGEN_EXPORTER"),
            built("tools/llama_cpp/llama_cpp", "LLAMA_CPP_PROGRAMS"),
        )

    def options(self) -> list[str]:
        """Returns the options with which kernelgen takes these programs."""
        return [f"--exporter={self.exporter}", f"--llama-cpp={self.libraries}"]
