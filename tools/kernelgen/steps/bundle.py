"""The step `bundle`: the NEFFs of a manifest for one target as one pack or tree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from kernelgen.bundle.build import build
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError
from kernelgen.neff import provenance
from kernelgen.plan import BundleEntries, Entry
from kernelgen.spec.filenames import kernel_of
from kernelgen.spec.kernel import Spec
from kernelgen.steps.common import check_jax, write_depfile
from kernelgen.steps.flags import config_of
from kernelgen.steps.lint import refuse_unsupported_hlo
from kernelgen.steps.protocol import Arguments, maybe, one


def run(arguments: Arguments) -> None:
    """Writes a bundle: `--pack` or `--tree` (a path), the plan's `--entries` (the file of a `kernelgen.plan.BundleEntries`), and
    for each entry, in order, an `--hlo` and a `--neff`. A kernel's notes are beside its HLO. `--compiler` is the compiler's
    identity in the bundle; by default the identity in the NEFFs.

    A bundle without a plan is given by hand: `--name` is its name, each `--flag` one of neuronx-cc's arguments; for each kernel
    `--spec` is its spec and `--flags` a JSON list of its own arguments; `--noted` is the id of a kernel with notes.

    With `--lint=yes` a kernel that neuronx-cc is known to refuse for the target is an error, even if its NEFF exists; compile steps
    print the warnings.

    With `--origins=yes` each NEFF has its compile step's record beside it: a NEFF of an earlier HLO is refused. With `--counted`
    (a path that belongs to this step) the step also prints how many NEFFs were compiled since its last run, and how many came
    from a cache.
    """
    check_jax(arguments)
    hlos, neffs = ([Path(path) for path in arguments[what]] for what in ("hlo", "neff"))
    planned = _entries(arguments, hlos)
    if not len(planned.entries) == len(hlos) == len(neffs):
        raise KernelgenError(
            f"bundle {planned.id}: {len(planned.entries)} entries, {len(hlos)} HLO and {len(neffs)} NEFFs"
        )
    if maybe(arguments, "origins"):
        ids = [entry.spec.id for entry in planned.entries]
        files = [dict(zip(ids, paths, strict=True)) for paths in (map(provenance.beside, neffs), hlos, neffs)]
        known = provenance.check(*files)
    if maybe(arguments, "lint"):
        refuse_unsupported_hlo(hlos, [entry.config for entry in planned.entries])
    kernels = [entry.kernel for entry in planned.entries]
    build(
        planned,
        dict(zip(kernels, hlos, strict=True)),
        dict(zip(kernels, neffs, strict=True)),
        compiler=maybe(arguments, "compiler"),
        jax_version=version("jax"),
        pack_path=maybe(arguments, "pack"),
        tree_path=maybe(arguments, "tree"),
    )
    if maybe(arguments, "origins") and (path := maybe(arguments, "counted")):
        print(f"{planned.id}: {provenance.count(path, known)}")
    write_depfile(arguments, maybe(arguments, "pack") or f"{one(arguments, 'tree')}/index.json")


def _entries(arguments: Arguments, hlos: Sequence[Path]) -> BundleEntries:
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
            Spec.from_json(json.loads(spec)),
            CompileConfig.from_flags(json.loads(flags)),
            kernel in arguments["noted"],
        )
        for kernel, spec, flags in zip(kernels, arguments["spec"], arguments["flags"], strict=True)
    ]
    return BundleEntries(one(arguments, "name"), config_of(arguments), tuple(entries))
