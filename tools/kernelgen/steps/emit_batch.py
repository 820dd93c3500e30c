"""The step `emit-batch`: the HLO of all kernels of a module, for build tools that run a step once per module."""

from __future__ import annotations

import json
from pathlib import Path

from kernelgen import fileio
from kernelgen.emitters.library import dependencies, emitters_of, language_of_file, languages_of
from kernelgen.errors import EXIT_FAILED, EXIT_OK, Diagnostic, KernelgenError
from kernelgen.languages import DEFAULT, built_id
from kernelgen.lowering.emission import emit as run_emitter
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.filenames import hlo_file, native_file, notes_file
from kernelgen.spec.kernel import Spec
from kernelgen.steps.common import check_jax, imported_elsewhere, write_depfile
from kernelgen.steps.emit import modules_of
from kernelgen.steps.protocol import Arguments, maybe, one


def run(arguments: Arguments) -> None:
    """Writes the HLO of a module's kernels: `--library`, `--emitter`, a `--spec` per kernel, `--folder` (output) and `--stamp`.

    Graph kernels have several modules, as in `emit`. `--target` is as in
    `emit`; `--prebuilt` is the folder of such files. An existing file with equal content keeps its time, so that nothing is
    compiled for it; the stamp is written when all are up to date. A failed kernel does not stop the others, and leaves no file.
    `--data` is a file that the emitters read; the depfile lists these files.
    """
    check_jax(arguments)
    modules, folder = modules_of(arguments), Path(one(arguments, "folder"))
    before = maybe(arguments, "prebuilt")
    data = [Path(file) for file in arguments["data"]]
    prebuilt: list[Path] = []
    mistakes: dict[Diagnostic, None] = {}
    languages: set[str] = set()
    code = EXIT_OK
    for text in arguments["spec"]:
        spec = Spec.from_json(json.loads(text))
        output = notes = folder / hlo_file(spec.id)
        try:
            emitters = emitters_of(spec, modules)
            language = emitters[0][1].language  # all emitters of a group have the same language
            languages.add(language)
            id = built_id(spec.id, language, spec.own_target(arguments["target"]))
            output, notes = folder / hlo_file(id), folder / notes_file(id)
            file = Path(before) / native_file(id) if before else None
            made = run_emitter(
                emitters,
                spec,
                data,
                targets=tuple(arguments["target"]),
                prebuilt=file,
            )
            prebuilt += [file] if file else []
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
    sources = dict.fromkeys(
        file for library, module in modules for file in dependencies(library, library.module(module))
    )
    languages |= languages_of(sources)
    known = ("", *languages)
    needed = [*sources, *imported_elsewhere(), *data, *prebuilt]
    write_depfile(arguments, one(arguments, "stamp"), needed, lambda file: language_of_file(file) in known)
    fileio.write_bytes(one(arguments, "stamp"), b"")
