"""`kernelgen model FILE…`: writes the manifest of the kernels that files list."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from kernelgen.cli.model_manifest import (
    ALL_TARGETS,
    NONE,
    counted,
    group_lines,
    layouts_of,
    name_of,
    refuse_others,
    refused_lines,
    weight_options,
    write,
)
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.model import groups, listed, writing
from kernelgen.model.sources import Source

_OF_LISTS = ("paths", "output", "name", "targets", "catalog", "fuse", "weights")
"""Parameters that apply to listed kernels."""


def write_list(
    context: click.Context,
    found: Sequence[Source],
    output: Path,
    name: str | None,
    targets: tuple[str, ...],
    catalog: Catalog,
    fuse: str,
    weights: tuple[str, ...],
) -> None:
    """Writes the manifest of the kernels that sources list."""
    refuse_others(context, _OF_LISTS, f"is for models, and {found[0].path} is {found[0].kind.value}")
    chosen = name_of(name, output)
    cut = groups.cut_of(fuse)
    lists = [listed.read(source, catalog, cut is not None) for source in found]
    if cut is not None and not any(one.graphs for one in lists):
        names = ", ".join(str(source.path) for source in found)
        hint = "graphs are in what export-graphs writes, and in what the backend writes to GGML_NEURON_RECORD_GRAPHS"
        raise KernelgenError(Diagnostic(f"--fuse {fuse}: there is no graph in {names}", hint=hint))
    merged = listed.merge(lists, catalog, cut)
    files = [source.path.name for source in found]
    if not any(entry.reason is None for entry in merged.entries):
        raise KernelgenError(f"{', '.join(files)}: no kernel can be built for what is listed")
    made = ["--fuse", fuse] if cut else []
    head = writing.ManifestHead(
        chosen,
        targets or listed.targets(lists) or ALL_TARGETS,
        f"Kernels that {', '.join(files)} list{'s' * (len(files) == 1)}",
        ["Written by", f"  {shlex.join(['kernelgen', 'model', *files, *made, *weight_options(weights, NONE)])}"],
        layouts_of(weights),
    )
    kernels = write(output, head, merged, catalog)
    lines = [
        f"{source.path}: {source.kind.value}, {counted(len(one.items), 'op')}"
        for source, one in zip(found, lists, strict=True)
    ]
    lines += [note for one in lists for note in one.notes]
    click.echo(
        "\n".join([*lines, counted(kernels, "kernel"), *group_lines(merged), *refused_lines(merged), str(output)])
    )
