"""`kernelgen model FILE…`: writes the manifest of the kernels that files list."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import click

from kernelgen.cli.model_manifest import NONE, ModelOptions, check_any, counted, refuse_others, write
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.model import groups, listed
from kernelgen.model.sources import Source

_OF_LISTS = ("paths", "output", "name", "targets", "catalog", "fuse", "weights")
"""Parameters that apply to listed kernels."""


def write_list(context: click.Context, options: ModelOptions, recognized: Sequence[Source]) -> None:
    """Writes the manifest of the kernels that sources list."""
    refuse_others(context, _OF_LISTS, f"is for models, and {recognized[0].path} is {recognized[0].kind.value}")
    cut = groups.cut_of(options.fuse or NONE)
    lists = [listed.read(source, options.catalog) for source in recognized]
    if cut is not None and not any(one.graphs for one in lists):
        names = ", ".join(str(source.path) for source in recognized)
        hint = "graphs are in what export-graphs writes, and in what the backend writes to GGML_NEURON_RECORD"
        raise KernelgenError(Diagnostic(f"--fuse {options.fuse}: there is no graph in {names}", hint=hint))
    merged = listed.merge(lists, options.catalog, cut)
    files = [source.path.name for source in recognized]
    check_any(merged, f"{', '.join(files)}: no kernel can be built for what is listed")
    words = ["kernelgen", "model", *files, *(("--fuse", options.fuse) if cut else ())]
    words += [word for layout in options.weights if layout != NONE for word in ("--weights", layout)]
    lines = [
        f"{source.path}: {source.kind.value}, {counted(len(one.items), 'op')}"
        for source, one in zip(recognized, lists, strict=True)
    ]
    write(
        options,
        merged,
        f"Kernels that {', '.join(files)} list{'s' * (len(files) == 1)}",
        ["Written by", f"  {shlex.join(words)}"],
        [*lines, *(note for one in lists for note in one.notes)],
        weights=options.layouts,
        targets=listed.targets(lists),
        lnc=max(one.lnc for one in lists),
    )
