"""`kernelgen model --mmproj`: writes the kernels of a projector of images or sound."""

from __future__ import annotations

from pathlib import Path

import click

from kernelgen.cli.model_manifest import (
    ALL_TARGETS,
    AUTO,
    FUSE,
    command_lines,
    count,
    counted,
    flash_attn_options,
    group_lines,
    name_of,
    projector_options,
    refuse_others,
    refused_lines,
    write,
)
from kernelgen.cli.units import binary_size
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import KernelgenError
from kernelgen.model import exporter, groups, writing
from kernelgen.model.projector import DerivedProjector, Projector, derive
from kernelgen.model.sizes import Settings

_OF_PROJECTORS = (
    "output",
    "name",
    "targets",
    "lnc",
    "flash_attn",
    "fuse",
    "mmproj",
    "images",
    "image_min_tokens",
    "image_max_tokens",
    "seconds",
    "program",
    "llama_cpp",
    "catalog",
)
"""Parameters that apply to a projector alone."""


def derive_projector(
    graph_exporter: exporter.Exporter, projector: Projector, settings: Settings, catalog: Catalog, fuse: str
) -> DerivedProjector:
    exported = graph_exporter.projector(projector, settings.flash_attn)
    cut = groups.cut_of(FUSE if fuse == AUTO else fuse)
    return derive(exported.model, exported.graphs(), catalog, cut)


def said_of_projector(projector: Projector, derived: DerivedProjector) -> list[str]:
    """Returns a description of the projector, and the number of its nodes without a kernel."""
    model = derived.model
    return [
        f"{projector.file}: {model.description}, {count(model.parameters)} parameters, {binary_size(model.size)} of weights, "
        f"{counted(model.layers, 'layer')}",
        *(f"  {call}" for call in derived.calls),
    ]


def write_projector(
    context: click.Context,
    graph_exporter: exporter.Exporter,
    projector: Projector,
    output: Path,
    name: str | None,
    targets: tuple[str, ...],
    lnc: str | None,
    settings: Settings,
    fuse: str,
    catalog: Catalog,
) -> None:
    """Writes the manifest of a projector alone."""
    refuse_others(context, _OF_PROJECTORS, "is for models, and no SOURCE is given beside --mmproj")
    derived = derive_projector(graph_exporter, projector, settings, catalog, fuse)
    if not any(entry.reason is None for entry in derived.derived.entries):
        raise KernelgenError(f"{projector.file}: no kernel can be built for {derived.model.description}")
    parts = ["kernelgen", "model", *projector_options(projector), *flash_attn_options(settings)]
    parts += ["--fuse", fuse] if fuse != FUSE else []
    parts += ["--lnc", lnc] if lnc else []
    named = derived.model.name or projector.file.name
    head = writing.ManifestHead(
        name_of(name, output),
        targets or ALL_TARGETS,
        f"{named}: {derived.model.description}, {count(derived.model.parameters)} parameters, as llama.cpp's mtmd runs it",
        command_lines(parts),
        lnc=int(lnc) if lnc else None,
    )
    kernels = write(output, head, derived.derived, catalog)
    lines = [*said_of_projector(projector, derived), counted(kernels, "kernel")]
    click.echo("\n".join([*lines, *group_lines(derived.derived), *refused_lines(derived.derived), str(output)]))
