"""The build step from one HLO file to one NEFF file, shared by all builds without Bazel."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kernelgen import fileio
from kernelgen.compilers.base import Compiler, refuse_unsupported
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError
from kernelgen.neff import container as neff_format
from kernelgen.neff import description
from kernelgen.spec.filenames import kernel_of

if TYPE_CHECKING:
    from kernelgen.cache import Cache


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a step.

    Attributes:
        source: the source of the NEFF: `compiled`, or a cache level (`local`, `shared`).
        sha256: digest of the NEFF, in hex.
        warnings: the lint's warnings about the HLO, one line each.
    """

    source: str
    sha256: str
    warnings: tuple[str, ...]


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
    log: str | Path | None = None,
) -> Compiled:
    """Compiles one HLO file to a NEFF file, which appears by rename; after a failure there is no NEFF file.

    Args:
        hlo: the file to compile.
        output: the NEFF to write.
        config: target and settings.
        compiler: the compiler.
        kernel: the kernel's name for errors; by default the HLO's file name without its suffixes.
        log_dir: folder for the log of a failure; by default the output's folder.
        timeout: time limit in seconds.
        memory_mb: MiB the compiler may use.
        cache: the cache to read first and to add a new NEFF to. `timeout` also limits, separately, the time spent waiting for
            another process that compiles the same NEFF.
        log: file for the compiler's output; not written for a NEFF from the cache.

    Raises:
        KernelgenError: `hlo` can't be read, is also the output, or is refused; or the compiler failed or gave a NEFF that does not
            match.
        OSError: the output cannot be written.
    """
    hlo, output = Path(hlo), Path(output)
    if output.exists() and hlo.exists() and output.samefile(hlo):
        raise KernelgenError(f"{output}: the output is the input")
    fileio.check_replaceable(output)
    # An old NEFF must not survive a failed compile and pass for its result.
    output.unlink(missing_ok=True)
    if log is not None:
        Path(log).parent.mkdir(parents=True, exist_ok=True)  # the output's own folder is created later
        Path(log).unlink(missing_ok=True)
    try:
        data = hlo.read_bytes()
    except OSError as error:
        raise KernelgenError(f"{hlo}: {error.strerror}") from None
    name = kernel or kernel_of(hlo)
    # Before the cache lookup: the cache may have a kernel that an earlier version of the lint accepted.
    warnings = refuse_unsupported(data, config, name)

    def compile_() -> bytes:
        made = compiler.compile(
            data,
            config,
            kernel=name,
            log_dir=Path(log_dir) if log_dir is not None else output.parent,
            timeout=timeout,
            memory_mb=memory_mb,
            log=Path(log) if log is not None else None,
        )
        if compiler.name != "simulator":  # whose NEFFs contain what was compiled
            _check(made, data, config, name, compiler)
        return made

    if cache is None:
        neff, source = compile_(), "compiled"
    else:
        from kernelgen.cache import NeffKey

        key = NeffKey.make(data, compiler.identity, config.flags())
        neff, source = cache.neff(key, name, compile_, timeout, timed=compiler.name == "neuronx-cc")
    fileio.write_bytes(output, neff)
    return Compiled(source, hashlib.sha256(neff).hexdigest(), tuple(warnings))


def _check(made: bytes, hlo: bytes, config: CompileConfig, kernel: str, compiler: Compiler) -> None:
    """Raises if a new NEFF is not for the target or lacks the HLO's tensors: it must not enter a cache."""
    try:
        expected = neff_format.tensors_of(hlo)
        description.check(description.describe(made), expected, config.target, config.lnc)
    except KernelgenError as error:
        what = [
            Diagnostic(
                f"kernel {kernel} for {config.target}: {compiler.name}'s NEFF is not used: {d.message.removeprefix('NEFF: ')}"
            )
            for d in error.diagnostics
        ]
        raise KernelgenError(what, exit_code=EXIT_FAILED) from None
