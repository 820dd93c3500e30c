"""Compilers of HLO to NEFF: one module each, one protocol between (`base.Compiler`), and the choice among them.

`compile_file` is the build step that Bazel's action and the command line share.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kernelgen import fileio
from kernelgen.compilers.base import Compiler
from kernelgen.compilers.neuronx_cc import NAME, NeuronxCC
from kernelgen.compilers.simulator import Simulator
from kernelgen.errors import Diagnostic, KernelgenError, did_you_mean
from kernelgen.plan import CompileConfig

if TYPE_CHECKING:
    from kernelgen.cache import Cache

__all__ = ["CHOICES", "Compiler", "NeuronxCC", "Simulator", "compile_file", "find_sdk", "resolve"]

CHOICES = ("auto", NAME, "simulator")

SDK_VARIABLE = "NEURON_SDK"
"""Names the virtual environment that the Neuron SDK's Python packages are installed in."""

HOW_TO_INSTALL = (
    "install neuronx-cc from AWS's package index (see the Neuron SDK's installation guide) and have it on PATH, "
    f"or set {SDK_VARIABLE} to its virtual environment; or choose the simulator"
)


def resolve(choice: str = "auto", *, path: str | Path | None = None, env: Mapping[str, str] | None = None) -> Compiler:
    """Returns the compiler of choice.

    Args:
        choice: `auto` takes neuronx-cc where it is installed and the simulator elsewhere; the compiler's `note` says so.
        path: neuronx-cc itself, when it is not to be searched for; not for the simulator.
        env: where NEURON_SDK and PATH are looked up; this process's environment by default.

    Raises:
        KernelgenError: there is no such choice, neuronx-cc is asked for and not there, or what is there is not neuronx-cc.
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
        note="neuronx-cc is not installed: kernels are compiled by the simulator, and the NEFFs load on no device"
        + placeholder
    )


def find_sdk(env: Mapping[str, str] | None = None) -> Path | None:
    """Returns the neuronx-cc of the virtual environment that NEURON_SDK names, else the one on PATH, else None.

    Raises:
        KernelgenError: NEURON_SDK is set and no neuronx-cc is there: who sets it does not mean another one, or none.
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


def compile_file(
    hlo: str | Path,
    output: str | Path,
    config: CompileConfig,
    compiler: Compiler,
    *,
    kernel: str | None = None,
    log_dir: str | Path | None = None,
    timeout: float | None = None,
    memory_mb: int | None = None,
    cache: Cache | None = None,
) -> str:
    """Compiles one HLO file to a NEFF file, which appears by rename; on failure there is none.

    Returns where the NEFF came from: `compiled`, or a level of the cache (`local`, `shared`).

    Args:
        hlo: the file to compile.
        output: the NEFF to write.
        config: target and settings.
        compiler: what to compile with.
        kernel: the kernel's name for errors; by default the HLO's file name without its endings.
        log_dir: where the log of a failure is kept; by default beside the output.
        timeout: seconds.
        memory_mb: MiB the compiler may use.
        cache: what it has is not compiled, and what it lacks is added. Time spent waiting for another process that compiles the
            same is limited by `timeout` too, and counts apart.

    Raises:
        KernelgenError: `hlo` cannot be read, is the output too, or is refused; or the compiler failed.
        OSError: the output cannot be written.
    """
    hlo, output = Path(hlo), Path(output)
    if output.exists() and hlo.exists() and output.samefile(hlo):
        raise KernelgenError(f"{output}: the output is the input")
    # An old NEFF must not outlive a failed compile and be taken for its result.
    output.unlink(missing_ok=True)
    try:
        data = hlo.read_bytes()
    except OSError as error:
        raise KernelgenError(f"{hlo}: {error.strerror}") from None
    name = kernel or hlo.name.removesuffix(".pb").removesuffix(".hlo")

    def compile_() -> bytes:
        return compiler.compile(
            data,
            config,
            kernel=name,
            log_dir=Path(log_dir) if log_dir is not None else output.parent,
            timeout=timeout,
            memory_mb=memory_mb,
        )

    if cache is None:
        fileio.write_bytes(output, compile_())
        return "compiled"
    from kernelgen.cache import Key

    neff, source = cache.neff(Key.make(data, compiler.identity, config), name, compile_, timeout)
    fileio.write_bytes(output, neff)
    return source


def _placeholder(prefix: Path) -> str:
    """Returns a remark when a Python environment has the package neuronx-cc but not the program.

    The public Python index has an empty package of that name, so `pip install neuronx-cc` succeeds and installs nothing.
    """
    if any(prefix.glob("lib/python*/site-packages/neuronx_cc-*.dist-info")) and not (prefix / "bin" / NAME).exists():
        return f" (the package {NAME} in {prefix} is the public index's empty placeholder)"
    return ""
