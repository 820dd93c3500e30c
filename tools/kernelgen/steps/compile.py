"""The step `compile`: one HLO to one NEFF."""

from __future__ import annotations

import sys
from pathlib import Path

from kernelgen.cache import Cache, CacheSettings
from kernelgen.compilers import choice
from kernelgen.compilers.settings import CompileConfig
from kernelgen.compilers.step import compile_file
from kernelgen.errors import KernelgenError
from kernelgen.neff import provenance
from kernelgen.steps.common import warn
from kernelgen.steps.protocol import Arguments, maybe, one


def run(arguments: Arguments) -> None:
    """Compiles one HLO: `--compiler`, a `--flag` for each of neuronx-cc's arguments, `--kernel` (id), `--hlo`, `--output`.

    neuronx-cc also takes `--executable`, `--identity`, `--memory-mb` and `--timeout` (seconds). `--log-dir` is the folder for the
    log of a failure, and `--log` the file for the log of a successful compile.

    `--cache` is a folder of NEFFs. `--shared-cache` (URL or folder), `--shared-cache-mode` and `--shared-cache-timeout` (seconds)
    configure the shared cache. `--shared-cache-failure` is a file in which the steps of a build record that it failed.
    `--origin` receives the NEFF's inputs, its digest, and whether it was compiled now (`kernelgen.neff.provenance`).
    """
    try:
        config = CompileConfig.from_flags(arguments["flag"])
    except ValueError as error:
        raise KernelgenError(f"--flag: {error}") from None
    executable, memory = maybe(arguments, "executable"), maybe(arguments, "memory-mb")
    compiler = choice.resolve(one(arguments, "compiler"), path=executable)
    planned = maybe(arguments, "identity")
    if planned and compiler.identity != planned:
        # Otherwise the NEFF would be stored under the name of another compiler.
        raise KernelgenError(
            f"the build is for {planned}, and this machine has {compiler.identity} ({executable or sys.prefix})"
        )
    done = compile_file(
        Path(one(arguments, "hlo")),
        Path(one(arguments, "output")),
        config,
        compiler,
        kernel=one(arguments, "kernel"),
        log_dir=maybe(arguments, "log-dir"),
        log=maybe(arguments, "log"),
        timeout=float(maybe(arguments, "timeout") or 0) or None,
        memory_mb=int(memory) if memory else None,
        cache=_cache(arguments),
    )
    warn(done.warnings)
    if origin := maybe(arguments, "origin"):
        provenance.write(origin, one(arguments, "hlo"), done.source, done.sha256)


def _cache(arguments: Arguments) -> Cache | None:
    words = [maybe(arguments, name) for name in ("cache", "shared-cache", "shared-cache-mode", "shared-cache-timeout")]
    if not words[0] and not words[1]:
        return None  # as in Bazel, which has its own caches
    failure = maybe(arguments, "shared-cache-failure")
    return Cache(
        CacheSettings.from_arguments(*words), lambda text: print(f"warning: {text}"), Path(failure) if failure else None
    )
