"""The step `emit`: one kernel's HLO."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernelgen import fileio
from kernelgen.emitters.library import BUILTIN, Library, dependencies, emitters_of, language_of_file, languages_of
from kernelgen.errors import KernelgenError
from kernelgen.languages.nki import native
from kernelgen.lowering.emission import emit as run_emitter
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.kernel import Spec
from kernelgen.steps.common import check_jax, imported_elsewhere, write_depfile
from kernelgen.steps.protocol import Arguments, maybe, one


def run(arguments: Arguments) -> None:
    """Writes one kernel's HLO: `--spec` (canonical JSON), `--library` (name), `--emitter` (module file), `--output`.

    A graph kernel has a `--library` and an `--emitter` for each module that a plan names, in order. A kernel in a package has
    `--module`, the emitter's name in it: for `core.norm` the package is the folder that contains core/norm.py.
    `--target` is one of its targets, if its language depends on the target (`Kernel.targets`). `--notes` (a path) receives the
    notes about the kernel. `--data` is a file that the emitter reads, beside the files in its folder. `--native` is the
    record of the output of NKI's compiler for the kernel (`compilers.nki_driver`); `--prebuilt` is a file of `kernelgen prebuild`
    that contains it.

    An output with equal content keeps its time, so that ninja and make compile nothing for it. make needs a file that is always
    written, too: `--stamp`.
    """
    check_jax(arguments)
    spec = Spec.from_json(json.loads(one(arguments, "spec")))
    modules = modules_of(arguments)
    emitters = emitters_of(spec, modules)
    data = [*map(Path, arguments["data"]), *_files_beside(modules)]
    record, prebuilt = maybe(arguments, "native"), maybe(arguments, "prebuilt")
    before = Path(prebuilt) if prebuilt else None
    with native.recorded(Path(record)) if record else contextlib.nullcontext():
        made = run_emitter(emitters, spec, data, tuple(arguments["target"]), before)
    output, stamp = one(arguments, "output"), maybe(arguments, "stamp")
    fileio.write_if_changed(output, made.hlo)
    if path := maybe(arguments, "notes"):
        fileio.write_if_changed(path, canonical_json(made.notes).encode())
    if maybe(arguments, "depfile"):
        sources = dict.fromkeys(
            file for library, module in modules for file in dependencies(library, library.module(module))
        )
        known = ("", emitters[0][1].language, *languages_of(sources))  # all emitters of a group have the same language
        needed = [*sources, *imported_elsewhere(), *data, *([before] if before else [])]
        write_depfile(arguments, stamp or output, needed, lambda file: language_of_file(file) in known)
    if stamp:
        fileio.write_bytes(stamp, b"")


def modules_of(arguments: Arguments) -> list[tuple[Library, Path]]:
    """Returns the modules of `--emitter`, each with its `--library`."""
    names, modules = arguments["library"], arguments["emitter"]
    if not modules or len(names) != len(modules):
        raise KernelgenError(f"expected as many libraries as emitters, not {len(names)} and {len(modules)}")
    if name := maybe(arguments, "module"):
        file = Path(one(arguments, "emitter"))
        return [(Library(names[0], file.parents[name.count(".")], package=True), file)]
    return [(Library(name, Path(module).parent), Path(module)) for name, module in zip(names, modules, strict=True)]


def _files_beside(modules: Sequence[tuple[Library, Path]]) -> Iterator[Path]:
    """Yields the files beside users' modules, except sources: an emitter may read them."""
    for folder in sorted({module.parent for library, module in modules if library.name != BUILTIN}):
        yield from sorted(path for path in folder.iterdir() if path.suffix != ".py" and path.is_file())
