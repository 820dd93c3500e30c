"""The step `emit`: one kernel's HLO."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from kernelgen import fileio
from kernelgen.emitters.library import Library, emitters_of
from kernelgen.errors import KernelgenError
from kernelgen.languages.nki import native
from kernelgen.lowering.emission import emit as run_emitter
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.kernel import Spec
from kernelgen.steps.common import check_jax
from kernelgen.steps.protocol import Arguments, maybe, one


def run(arguments: Arguments) -> None:
    """Writes one kernel's HLO: `--spec` (canonical JSON), `--library` (name), `--emitter` (module file), `--output`.

    A graph kernel has a `--library` and an `--emitter` for each module that a plan names, in order. A kernel in a package has
    `--module`, the emitter's name in it: for `core.norm` the package is the folder that contains core/norm.py.
    `--target` is one of its targets, if its language depends on the target (`Kernel.targets`). `--notes` (a path) receives the
    notes about the kernel. `--data` is a file that the emitter reads. `--native` is the
    record of the output of NKI's compiler for the kernel (`compilers.nki_driver`); `--prebuilt` is a file of `kernelgen prebuild`
    that contains it.
    """
    check_jax(arguments)
    spec = Spec.from_json(json.loads(one(arguments, "spec")))
    modules = modules_of(arguments)
    record, prebuilt = maybe(arguments, "native"), maybe(arguments, "prebuilt")
    with native.recorded(Path(record)) if record else contextlib.nullcontext():
        made = run_emitter(
            emitters_of(spec, modules),
            spec,
            [Path(file) for file in arguments["data"]],
            tuple(arguments["target"]),
            Path(prebuilt) if prebuilt else None,
        )
    fileio.write_bytes(one(arguments, "output"), made.hlo)
    if path := maybe(arguments, "notes"):
        fileio.write_bytes(path, canonical_json(made.notes).encode())


def modules_of(arguments: Arguments) -> list[tuple[Library, Path]]:
    """Returns the modules of `--emitter`, each with its `--library`."""
    names, modules = arguments["library"], arguments["emitter"]
    if not modules or len(names) != len(modules):
        raise KernelgenError(f"expected as many libraries as emitters, not {len(names)} and {len(modules)}")
    if name := maybe(arguments, "module"):
        file = Path(one(arguments, "emitter"))
        return [(Library(names[0], file.parents[name.count(".")], package=True), file)]
    return [(Library(name, Path(module).parent), Path(module)) for name, module in zip(names, modules, strict=True)]
