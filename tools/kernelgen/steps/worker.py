"""The build steps as Bazel, CMake and `kernelgen build` call them (`kernelgen.steps.protocol`).

A step is `emit`, `emit-batch`, `lint`, `compile`, `bundle` or `embed`, followed by `--name=value` arguments. It reads and
writes only the files that it is given. With `--depfile` (a path) a step also writes, as a Makefile rule, which of kernelgen's own
sources it ran, for build tools that are not told so beforehand. With `--jax` (a version) it works with no other JAX than that.

A worker imports JAX once; an emitter whose source changes is imported anew (see `kernelgen.emitters.loading`), so an edit needs no
restart.

Bazel runs the compilers by programs of their own (`compilers.neuronx_cc_driver`, `compilers.simulate`), so that what changes here
compiles nothing again. This is the narrow interface between the rules and kernelgen; people use `kernelgen` (`kernelgen.cli`).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kernelgen.errors import EXIT_FAILED, EXIT_OK, Diagnostic, KernelgenError
from kernelgen.steps import protocol
from kernelgen.steps.protocol import Arguments, Steps, maybe, one

if TYPE_CHECKING:
    from kernelgen.cache import Cache
    from kernelgen.compilers.settings import CompileConfig
    from kernelgen.emitters.library import Library
    from kernelgen.plan import BundleEntries


def emit(arguments: Arguments) -> None:
    """Writes one kernel's HLO: `--spec` (canonical JSON), `--library` (name), `--emitter` (module file), `--output`.

    A graph kernel has a `--library` and an `--emitter` for each module that a plan names, in its order.
    `--target` is one of those that it is for, where its language asks (`Kernel.targets`). With `--notes` (a path) it also writes
    what is noted about the kernel, with `--reads` (a path) which data the emitter read. With `--undeclared=refuse` the emitter may
    read no other data than the files and folders that a `--data` names. `--timeout` is how many seconds it may take. `--native` is
    the record of what NKI's own compiler made of the kernel (`hlo.native_driver`), `--prebuilt` a file of `kernelgen prebuild`,
    which holds one.
    """
    from kernelgen import fileio
    from kernelgen.emitters.library import emitters_of
    from kernelgen.languages.nki import native
    from kernelgen.lowering.emission import emit as run_emitter
    from kernelgen.spec.canonical import canonical_json
    from kernelgen.spec.graph_kernel import spec_from_json

    check_jax(arguments)
    spec = spec_from_json(json.loads(one(arguments, "spec")))
    modules = _modules(arguments)
    # What an emitter imports is told by other means (`helpers`), and it may read its own source.
    declared = [*arguments["data"], *(str(path) for _, m in modules for path in (m.parent / "__init__.py", m))]
    record, prebuilt = maybe(arguments, "native"), maybe(arguments, "prebuilt")
    with native.recorded(Path(record)) if record else contextlib.nullcontext():
        made = run_emitter(
            emitters_of(spec, modules),
            spec,
            declared if maybe(arguments, "undeclared") else None,
            _timeout(arguments),
            tuple(arguments["target"]),
            Path(prebuilt) if prebuilt else None,
        )
    fileio.write_bytes(one(arguments, "output"), made.hlo)
    if path := maybe(arguments, "notes"):
        fileio.write_bytes(path, canonical_json(made.notes).encode())
    if path := maybe(arguments, "reads"):
        read = {"data": made.data, "unknown": [what for what, _ in made.unknown]}
        fileio.write_bytes(path, canonical_json(read).encode())


def emit_batch(arguments: Arguments) -> None:
    """Writes the HLO of a module's kernels: `--library`, `--emitter`, a `--spec` a kernel, `--folder` (where to) and `--stamp`.

    Graph kernels have several modules, as of `emit`. `--timeout` is how many seconds each may take, `--target` as of `emit`;
    `--prebuilt` is the folder of such files. A file that is there with the same content keeps its time, so that nothing is compiled
    for it; the stamp is written when all are up to date. A kernel that fails does not stop the others, and leaves no file.
    The data that the emitter reads is in the depfile, and an emitter that does what no build tool can follow is refused.
    """
    from kernelgen import fileio
    from kernelgen.emitters.dependencies import dependencies
    from kernelgen.emitters.library import emitters_of
    from kernelgen.languages import DEFAULT, built_id
    from kernelgen.lowering.emission import emit as run_emitter
    from kernelgen.lowering.emission import unfollowed
    from kernelgen.spec.canonical import canonical_json
    from kernelgen.spec.filenames import hlo_file, native_file, notes_file
    from kernelgen.spec.graph_kernel import spec_from_json
    from kernelgen.spec.source_kernel import own_target

    check_jax(arguments)
    modules, folder = _modules(arguments), Path(one(arguments, "folder"))
    kept = maybe(arguments, "prebuilt")
    mistakes: dict[Diagnostic, None] = {}
    data: set[Path] = set()
    code = EXIT_OK
    for text in arguments["spec"]:
        spec = spec_from_json(json.loads(text))
        output = notes = folder / hlo_file(spec.id)
        try:
            emitters = emitters_of(spec, modules)
            language = emitters[0][1].language  # a group's are in one
            id = built_id(spec.id, language, own_target(spec, arguments["target"]))
            output, notes = folder / hlo_file(id), folder / notes_file(id)
            made = run_emitter(
                emitters,
                spec,
                timeout=_timeout(arguments),
                targets=tuple(arguments["target"]),
                prebuilt=Path(kept) / native_file(id) if kept else None,
            )
            if made.unknown:
                raise KernelgenError(unfollowed(spec, made.unknown), exit_code=EXIT_FAILED)
            data |= {_there(Path(path)) for path in made.data}
            if language != DEFAULT:
                fileio.write_if_changed(notes, canonical_json(made.notes).encode())
            fileio.write_if_changed(output, made.hlo)
        except KernelgenError as error:
            for path in (output, notes):
                path.unlink(missing_ok=True)
            mistakes |= dict.fromkeys(error.diagnostics)
            code = max(code, error.exit_code, EXIT_FAILED)
    if mistakes:
        raise KernelgenError(mistakes, exit_code=code)
    sources = dict.fromkeys(file for library, module in modules for file in dependencies(library, module.stem))
    write_depfile(arguments, one(arguments, "stamp"), [*sources, *sorted(data)])
    fileio.write_bytes(one(arguments, "stamp"), b"")


def _modules(arguments: Arguments) -> list[tuple[Library, Path]]:
    """Returns the modules of `--emitter`, each with its `--library`."""
    from kernelgen.emitters.library import Library

    names, modules = arguments["library"], arguments["emitter"]
    if not modules or len(names) != len(modules):
        raise KernelgenError(f"expected as many libraries as emitters, not {len(names)} and {len(modules)}")
    return [(Library(name, Path(module).parent), Path(module)) for name, module in zip(names, modules, strict=True)]


def _timeout(arguments: Arguments) -> float | None:
    """Returns `--timeout`, or None for no limit."""
    return float(maybe(arguments, "timeout") or 0) or None


def _there(path: Path) -> Path:
    """Returns a path that is there: of one that is not, the folder whose time changes when it comes to be."""
    return next((p for p in (path, *path.parents) if p.exists()), Path("/"))


def lint(arguments: Arguments) -> None:
    """Refuses what neuronx-cc is known to refuse for a `--target`: an `--hlo` a kernel. Writes the empty file `--stamp`.

    Warnings are printed, and refuse nothing.

    Raises:
        KernelgenError: all errors of all kernels.
    """
    from kernelgen import fileio

    _warn(_refuse_unsupported(map(Path, arguments["hlo"]), one(arguments, "target")))
    fileio.write_bytes(one(arguments, "stamp"), b"")


def _refuse_unsupported(hlos: Iterable[Path], target: str) -> list[str]:
    """Returns the warnings of all kernels."""
    from kernelgen.compilers.base import refuse_unsupported
    from kernelgen.spec.filenames import kernel_of

    mistakes: dict[Diagnostic, None] = {}
    warnings: list[str] = []
    code = EXIT_OK
    for path in hlos:
        try:
            warnings += refuse_unsupported(path.read_bytes(), target, kernel_of(path))
        except KernelgenError as error:
            mistakes |= dict.fromkeys(error.diagnostics)
            code = max(code, error.exit_code)
    if mistakes:
        raise KernelgenError(mistakes, exit_code=code)
    return warnings


def _warn(texts: Iterable[str]) -> None:
    for text in dict.fromkeys(texts):
        print(f"warning: {text}")


def compile_(arguments: Arguments) -> None:
    """Compiles one HLO: `--compiler`, a `--flag` for each of neuronx-cc's arguments, `--kernel` (id), `--hlo`, `--output`.

    neuronx-cc also takes `--executable`, `--identity`, `--memory-mb` and `--timeout` (seconds). `--log-dir` is where the log of a
    failure is kept.

    `--cache` is a folder of NEFFs; `--shared-cache` (URL or folder), `--shared-cache-mode` and `--shared-cache-timeout` (seconds)
    the one that machines share; `--notices` (a folder) and `--build` (any word) keep their warnings from being printed by every
    step. What the NEFF was made of, its digest, and whether it was compiled now, is written to `--origin`
    (`kernelgen.neff.provenance`).
    """
    from kernelgen.compilers import choice
    from kernelgen.compilers.step import compile_file

    executable, memory = maybe(arguments, "executable"), maybe(arguments, "memory-mb")
    compiler = choice.resolve(one(arguments, "compiler"), path=executable)
    planned = maybe(arguments, "identity")
    if planned and compiler.identity != planned:
        # The NEFF would be stored under the name of a compiler that did not make it.
        raise KernelgenError(
            f"the build is for {planned}, and this machine has {compiler.identity} ({executable or sys.prefix})"
        )
    done = compile_file(
        Path(one(arguments, "hlo")),
        Path(one(arguments, "output")),
        _config(arguments),
        compiler,
        kernel=one(arguments, "kernel"),
        log_dir=maybe(arguments, "log-dir"),
        timeout=_timeout(arguments),
        memory_mb=int(memory) if memory else None,
        cache=_cache(arguments),
    )
    _warn(done.warnings)
    if origin := maybe(arguments, "origin"):
        from kernelgen.neff import provenance

        provenance.write(origin, one(arguments, "hlo"), done.source, done.sha256)


def _config(arguments: Arguments) -> CompileConfig:
    from kernelgen.compilers.settings import CompileConfig

    try:
        return CompileConfig.from_flags(arguments["flag"])
    except ValueError as error:
        raise KernelgenError(f"--flag: {error}") from None


def _cache(arguments: Arguments) -> Cache | None:
    words = [maybe(arguments, name) for name in ("cache", "shared-cache", "shared-cache-mode", "shared-cache-timeout")]
    if not words[0] and not words[1]:
        return None  # as in Bazel, which has caches of its own
    from kernelgen.cache import Cache, CacheSettings, Notices

    folder = maybe(arguments, "notices")
    notices = Notices(
        lambda text: print(f"warning: {text}"), Path(folder) if folder else None, maybe(arguments, "build") or ""
    )
    return Cache(CacheSettings.from_arguments(*words), notices)


def bundle(arguments: Arguments) -> None:
    """Writes a bundle: `--pack` or `--tree` (a path), the `--entries` that a plan has of it (the file of a
    `kernelgen.plan.BundleEntries`), and for each of them, in this order, an `--hlo` and a `--neff`. What is noted about a kernel is
    beside its HLO. `--compiler` is what the bundle says made it; the NEFFs tell when it is not given.

    A bundle that is kept by hand has no plan: `--name` is its name, a `--flag` one of the arguments that neuronx-cc was given; for
    each kernel `--spec` is what it computes and `--flags` a JSON list of its own arguments; `--noted` is the id of one about which
    something is noted.

    With `--lint=yes` kernels that neuronx-cc is known to refuse for the target are errors, also when their NEFFs are there; compile
    steps print the warnings.

    With `--origins=yes` there is beside each NEFF what its compile step wrote about it: one of an earlier HLO is refused. With
    `--counted` (a path, of this step's own) it then says how many NEFFs were compiled since it ran last, and how many came from a
    cache.
    """
    from importlib.metadata import version

    from kernelgen import bundle as bundles

    check_jax(arguments)
    hlos, neffs = ([Path(path) for path in arguments[what]] for what in ("hlo", "neff"))
    planned = _entries(arguments, hlos)
    if not len(planned.entries) == len(hlos) == len(neffs):
        raise KernelgenError(
            f"bundle {planned.id}: {len(planned.entries)} entries, {len(hlos)} HLO and {len(neffs)} NEFFs"
        )
    if maybe(arguments, "origins"):
        from kernelgen.neff import provenance

        ids = [entry.spec.id for entry in planned.entries]
        files = [dict(zip(ids, paths, strict=True)) for paths in (map(provenance.beside, neffs), hlos, neffs)]
        known = provenance.check(*files)
    if maybe(arguments, "lint"):
        _refuse_unsupported(hlos, planned.config.target)
    bundles.build_planned(
        planned,
        hlos,
        neffs,
        compiler=maybe(arguments, "compiler"),
        jax_version=version("jax"),
        pack_path=maybe(arguments, "pack"),
        tree_path=maybe(arguments, "tree"),
    )
    if maybe(arguments, "origins") and (path := maybe(arguments, "counted")):
        print(f"{planned.id}: {provenance.count(path, known)}")
    write_depfile(arguments, maybe(arguments, "pack") or f"{one(arguments, 'tree')}/index.json")


def _entries(arguments: Arguments, hlos: Sequence[Path]) -> BundleEntries:
    from kernelgen.compilers.settings import CompileConfig
    from kernelgen.plan import BundleEntries, Entry
    from kernelgen.spec.filenames import kernel_of
    from kernelgen.spec.graph_kernel import spec_from_json

    kernels = [kernel_of(path) for path in hlos]
    if path := maybe(arguments, "entries"):
        planned = BundleEntries.from_json(Path(path).read_text())
        for entry, kernel in zip(planned.entries, kernels, strict=False):
            if entry.kernel != kernel:
                raise KernelgenError(f"{path}: it has {entry.kernel} where the HLO is that of {kernel}")
        return planned
    entries = [
        Entry(
            kernel,
            spec_from_json(json.loads(spec)),
            CompileConfig.from_flags(json.loads(flags)),
            kernel in arguments["noted"],
        )
        for kernel, spec, flags in zip(kernels, arguments["spec"], arguments["flags"], strict=True)
    ]
    return BundleEntries(one(arguments, "name"), _config(arguments), tuple(entries))


def embed(arguments: Arguments) -> None:
    """Writes the sources that embed a bundle: `--pack`, and the folder `--output`.

    The assembly names the pack as it is given, or by `--incbin`.
    """
    from kernelgen.bundle import embed as embedding
    from kernelgen.bundle import pack

    path = one(arguments, "pack")
    paths = embedding.write(one(arguments, "output"), pack.read(path), incbin=maybe(arguments, "incbin") or path)
    write_depfile(arguments, str(paths[0]))


STEPS: Steps = {
    "emit": emit,
    "emit-batch": emit_batch,
    "lint": lint,
    "compile": compile_,
    "bundle": bundle,
    "embed": embed,
}


def write_depfile(arguments: Arguments, target: str, sources: Sequence[Path] = ()) -> None:
    """Writes the `--depfile`, if one is asked for: `target` depends on what of kernelgen was imported, and on `sources`."""
    path = maybe(arguments, "depfile")
    if path is None:
        return
    from kernelgen import fileio

    # Emitters of other kernels may have been imported too; `sources` says which count.
    names = [name for name in sys.modules if f"{name}.".startswith("kernelgen.")]
    own = [sys.modules[name] for name in names if not name.startswith("kernelgen.kernels")]
    paths = [Path(__file__), *(Path(m.__file__) for m in own if m.__file__), *sources]
    files = {str(p.resolve()) for p in paths}
    rule = " \\\n  ".join([f"{_makefile(target)}:", *map(_makefile, sorted(files))])
    fileio.write_bytes(path, f"{rule}\n".encode())


def _makefile(path: str) -> str:
    return path.replace("$", "$$").replace("#", "\\#").replace(" ", "\\ ")


def check_jax(arguments: Arguments) -> None:
    """Raises when JAX is another than the build was planned for (`--jax`).

    Raises:
        KernelgenError: it is.
    """
    from importlib.metadata import version

    planned = maybe(arguments, "jax")
    if planned and version("jax") != planned:
        raise KernelgenError(
            f"the build is for jax {planned}, and {sys.prefix} has jax {version('jax')}: configure the build again"
        )


def run(words: Sequence[str]) -> tuple[int, str]:
    """Runs one step and returns its exit status and what it has to say."""
    return protocol.run(STEPS, words)


def main(argv: Sequence[str]) -> int:
    return protocol.main(STEPS, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
