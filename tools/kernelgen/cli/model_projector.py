"""`kernelgen model --mmproj`: writes the kernels of a projector of images or sound."""

from __future__ import annotations

from dataclasses import replace

import click

from kernelgen.cli.model_manifest import (
    AUTO,
    FUSE,
    ModelOptions,
    check_any,
    command_lines,
    count,
    counted,
    flash_attn_option,
    projector_options,
    refuse_others,
    write,
)
from kernelgen.cli.units import binary_size
from kernelgen.model import exporter, groups
from kernelgen.model.projector import DerivedProjector, Projector, derive

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


def derive_projector(options: ModelOptions, projector: Projector) -> DerivedProjector:
    program = exporter.find(options.program, options.llama_cpp)
    exported = program.projector(projector, options.settings.flash_attn)
    cut = groups.cut_of(FUSE if options.fuse == AUTO else options.fuse)
    return derive(exported.model, exported.graphs(), options.catalog, cut)


def said_of_projector(projector: Projector, derived: DerivedProjector) -> list[str]:
    """Returns a description of the projector, and the number of its nodes without a kernel."""
    model = derived.model
    return [
        f"{projector.file}: {model.description}, {count(model.parameters)} parameters, {binary_size(model.size)} of weights, "
        f"{counted(model.layers, 'layer')}",
        *(f"  {call}" for call in derived.calls),
    ]


def write_projector(context: click.Context, options: ModelOptions, projector: Projector) -> None:
    """Writes the manifest of a projector alone."""
    refuse_others(context, _OF_PROJECTORS, "is for models, and no SOURCE is given beside --mmproj")
    options = replace(options, fuse=options.fuse or FUSE)
    vision = derive_projector(options, projector)
    model = vision.model
    check_any(vision.derived, f"{projector.file}: no kernel can be built for {model.description}")
    comment = command_lines(
        [
            *projector_options(projector),
            flash_attn_option(options.settings),
            ("--fuse", options.fuse != FUSE and options.fuse),
            ("--lnc", options.lnc),
        ]
    )
    named = model.name or projector.file.name
    description = f"{named}: {model.description}, {count(model.parameters)} parameters, as llama.cpp's mtmd runs it"
    write(options, vision.derived, description, comment, said_of_projector(projector, vision))
