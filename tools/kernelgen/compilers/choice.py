"""The choice of a compiler: neuronx-cc where it is installed, otherwise the simulator."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelgen.compilers import simulate
from kernelgen.compilers.base import Compiler
from kernelgen.compilers.neuronx_cc import NAME, NeuronxCC
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import Diagnostic, KernelgenError, did_you_mean

CHOICES = ("auto", NAME, "simulator")

SDK_VARIABLE = "NEURON_SDK"
"""Environment variable with the path of the virtual environment that holds the Neuron SDK's Python packages."""

HOW_TO_INSTALL = (
    "install neuronx-cc from AWS's package index (see the Neuron SDK's installation guide) and have it on PATH, "
    f"or set {SDK_VARIABLE} to its virtual environment; or choose the simulator"
)


@dataclass(frozen=True, slots=True)
class Simulator:
    """The simulator as a `Compiler`.

    Attributes:
        note: a message to print once.
    """

    note: str = ""

    @property
    def name(self) -> str:
        return "simulator"

    @property
    def identity(self) -> str:
        return simulate.identity()

    def compile(
        self,
        hlo: bytes,
        config: CompileConfig,
        *,
        kernel: str,
        log_dir: Path,
        timeout: float | None = None,
        memory_mb: int | None = None,
        log: Path | None = None,
    ) -> bytes:
        """Returns a simulated NEFF.

        It runs in this process: `timeout` and `memory_mb` do not apply, and the error has all the information.
        """
        try:
            return simulate.simulate(hlo, config.flags())
        except KernelgenError as error:
            message = error.diagnostics[0].message
            raise KernelgenError(f"kernel {kernel} for {config.target}: {message}", exit_code=error.exit_code) from None


def resolve(choice: str = "auto", *, path: str | Path | None = None, env: Mapping[str, str] | None = None) -> Compiler:
    """Returns the selected compiler.

    Args:
        choice: `auto` selects neuronx-cc where it is installed and the simulator elsewhere; the compiler's `note` reports which.
        path: path of neuronx-cc, to skip the search; not for the simulator.
        env: environment with NEURON_SDK and PATH; this process's by default.

    Raises:
        KernelgenError: the choice is unknown, neuronx-cc is required but missing, or the program is not neuronx-cc.
    """
    if choice not in CHOICES:
        raise KernelgenError(f"unknown compiler '{choice}'{did_you_mean(choice.replace('-', '_'), CHOICES)}")
    if choice == "simulator":
        if path is not None:
            raise KernelgenError(f"the simulator is part of kernelgen: {path} cannot be used for it")
        return Simulator()
    executable = Path(path) if path is not None else find_sdk(env)
    if executable is not None:
        return NeuronxCC.open(executable)
    placeholder = _placeholder(Path(sys.prefix))
    if choice == NAME:
        message = "neuronx-cc is not installed: it is neither on PATH nor is NEURON_SDK set"
        raise KernelgenError(Diagnostic(f"{message}{placeholder}", hint=HOW_TO_INSTALL))
    return Simulator(
        note="neuronx-cc is not installed: kernels are compiled by the simulator, and no device can load the NEFFs"
        + placeholder
    )


def find_sdk(env: Mapping[str, str] | None = None) -> Path | None:
    """Returns neuronx-cc of the virtual environment that NEURON_SDK names, else the one on PATH, else None.

    Raises:
        KernelgenError: NEURON_SDK is set and has no neuronx-cc: a fallback would not be what the user meant.
    """
    env = os.environ if env is None else env
    sdk = env.get(SDK_VARIABLE)
    if sdk:
        executable = Path(sdk) / "bin" / NAME
        if not executable.is_file():
            raise KernelgenError(
                Diagnostic(
                    f"{SDK_VARIABLE} is {sdk}, which has no bin/{NAME}{_placeholder(Path(sdk))}", hint=HOW_TO_INSTALL
                )
            )
        return executable
    found = shutil.which(NAME, path=env.get("PATH", os.defpath))
    return Path(found) if found else None


def _placeholder(prefix: Path) -> str:
    """Returns a remark if a Python environment has the package neuronx-cc but not the program.

    The public Python index has an empty package of that name, so `pip install neuronx-cc` succeeds and installs nothing.
    """
    if any(prefix.glob("lib/python*/site-packages/neuronx_cc-*.dist-info")) and not (prefix / "bin" / NAME).exists():
        return f" (the package {NAME} in {prefix} is the public index's empty placeholder)"
    return ""
