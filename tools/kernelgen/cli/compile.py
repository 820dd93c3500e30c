"""`kernelgen compile`: one HLO file to one NEFF file."""

from __future__ import annotations

from pathlib import Path

import click

from kernelgen.cache import COMPILED, OFF, Cache, CacheSettings
from kernelgen.cli import options
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError
from kernelgen.targets import TARGETS

_DEFAULTS = CompileConfig("")


@click.command(short_help="Compile HLO to NEFF.")
@click.argument("hlo", metavar="HLO", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The NEFF to write."
)
@click.option("--target", required=True, type=click.Choice(list(TARGETS)), help="The target to compile for.")
@options.compiler_option
@click.option(
    "--compiler-path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The path of neuronx-cc; by default kernelgen looks for it in NEURON_SDK and on PATH.",
)
@click.option("--optlevel", type=click.IntRange(1, 3), default=_DEFAULTS.optlevel, show_default=True)
@click.option(
    "--auto-cast",
    type=click.Choice(["none", "matmult", "all"]),
    default=_DEFAULTS.auto_cast,
    show_default=True,
)
@click.option(
    "--auto-cast-type",
    type=click.Choice(["bf16", "fp16", "tf32", "fp8_e4m3"]),
    default=_DEFAULTS.auto_cast_type,
    show_default=True,
)
@click.option(
    "--model-type",
    type=click.Choice(["generic", "transformer", "unet-inference"]),
    default=_DEFAULTS.model_type,
    show_default=True,
)
@click.option("--lnc", type=int, help="Physical cores per logical NeuronCore; the target's own default if not given.")
@click.option("--flag", "flags", multiple=True, help="A further flag for neuronx-cc. May be given several times.")
@options.cache_options
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Time limit.")
@click.option("--memory", "memory_mb", type=click.IntRange(min=1), metavar="MIB", help="Memory limit.")
def command(
    hlo: Path,
    output: Path,
    target: str,
    compiler: str,
    compiler_path: Path | None,
    optlevel: int,
    auto_cast: str,
    auto_cast_type: str,
    model_type: str,
    lnc: int | None,
    flags: tuple[str, ...],
    timeout: float | None,
    memory_mb: int | None,
    caches: CacheSettings,
) -> None:
    """Compile an HLO file (a serialized HloModuleProto) to a NEFF file.

    It is not compiled when a cache has it (kernelgen cache --help). What explains a failure is kept in a folder beside the output,
    <kernel>.<settings>.failed.
    """
    from kernelgen.compilers import choice
    from kernelgen.compilers.step import compile_file

    choices = TARGETS[target].lnc_choices
    if lnc is not None and lnc not in choices:
        raise KernelgenError(f"--lnc {lnc}: {target} takes {' or '.join(map(str, choices))}")
    config = CompileConfig.make(
        target,
        lnc=lnc,
        optlevel=optlevel,
        auto_cast=auto_cast,
        auto_cast_type=auto_cast_type,
        model_type=model_type,
        extra_flags=flags,
    )
    chosen = choice.resolve(compiler, path=compiler_path)
    if chosen.note:
        click.echo(f"note: {chosen.note}", err=True)

    def say(text: str) -> None:
        click.echo(f"warning: {text}", err=True)

    cache = Cache(caches, say) if caches != OFF else None
    done = compile_file(hlo, output, config, chosen, timeout=timeout, memory_mb=memory_mb, cache=cache)
    for text in done.warnings:
        say(text)
    if done.source != COMPILED:
        click.echo("from the cache", err=True)
