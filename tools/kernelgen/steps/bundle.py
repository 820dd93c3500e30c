"""The step `bundle`: the NEFFs of a manifest for one target as one pack or tree."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from kernelgen.bundle.build import build
from kernelgen.errors import KernelgenError
from kernelgen.neff import provenance
from kernelgen.plan import BundleEntries
from kernelgen.spec.filenames import kernel_of
from kernelgen.steps.common import check_jax, write_depfile
from kernelgen.steps.lint import refuse_unsupported_hlo
from kernelgen.steps.protocol import Arguments, maybe, one


def run(arguments: Arguments) -> None:
    """Writes a bundle: `--pack` or `--tree` (a path), the plan's `--entries` (the file of a `kernelgen.plan.BundleEntries`), and
    for each entry, in order, an `--hlo` and a `--neff`. A kernel's notes are beside its HLO. `--compiler` is the compiler's
    identity in the bundle; by default the identity in the NEFFs.

    With `--lint=yes` a kernel that neuronx-cc is known to refuse for the target is an error, even if its NEFF exists; compile steps
    print the warnings.

    With `--origins=yes` each NEFF has its compile step's record beside it: a NEFF of an earlier HLO is refused. With `--counted`
    (a path that belongs to this step) the step also prints how many NEFFs were compiled since its last run, and how many came
    from a cache.
    """
    check_jax(arguments)
    hlos, neffs = ([Path(path) for path in arguments[what]] for what in ("hlo", "neff"))
    file = one(arguments, "entries")
    planned = BundleEntries.from_json(Path(file).read_text())
    if not len(planned.entries) == len(hlos) == len(neffs):
        raise KernelgenError(
            f"bundle {planned.id}: {len(planned.entries)} entries, {len(hlos)} HLO and {len(neffs)} NEFFs"
        )
    for entry, hlo in zip(planned.entries, hlos, strict=True):
        if entry.kernel != kernel_of(hlo):
            raise KernelgenError(f"{file}: it has {entry.kernel} where the HLO is that of {kernel_of(hlo)}")
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
        compiled, cached, there = provenance.count(path, known)
        print(f"{planned.id}: {len(known)} kernels: {compiled} compiled, {cached} from the cache, {there} up to date")
    write_depfile(arguments, maybe(arguments, "pack") or f"{one(arguments, 'tree')}/index.json")
