"""Bundles in a folder, in the forms that are asked for: the option that asks, and the loop that writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.filenames import notes_file
from kernelgen.plan import Bundle, Plan

F = TypeVar("F", bound=Callable[..., Any])

FORMS = ("pack", "tree", "embed")
_DEFAULT = ("pack", "tree")


def option(function: F) -> F:
    """Adds `--form FORM…` as `forms: tuple[str, ...]`; pack and tree when none is given."""
    return click.option(
        "--form",
        "forms",
        multiple=True,
        type=click.Choice(FORMS),
        callback=lambda context, parameter, value: value or _DEFAULT,
        help="A form of bundle to write; pack and tree by default. May be given several times.",
    )(function)


def write(
    plan: Plan,
    bundles: Sequence[Bundle],
    folder: Path,
    forms: Sequence[str],
    hlos: Mapping[str, Path],
    neffs: Mapping[str, Path],
    *,
    compiler: str | None,
    jax_version: str,
) -> Iterator[Path]:
    """Writes bundles one after another, and yields each pack and each tree when it is there.

    Args:
        plan: has the bundles' kernels and settings.
        bundles: which of its bundles.
        folder: where to.
        forms: which of `FORMS`; an embedded bundle takes its data from a pack, which is written beside it.
        hlos: each kernel's HLO, by id.
        neffs: each NEFF, by `Neff.id`.
        compiler: the compiler's identity; None takes it from the NEFFs.
        jax_version: version of the jax that emitted the HLO.

    Raises:
        KernelgenError: at the end, with all that is wrong with the bundles that could not be written.
        OSError: an output cannot be written.
    """
    from kernelgen import bundle as writer

    specs = {k.id: k.spec for k in plan.kernels}
    configs = {c.key: c for c in plan.configs}
    mistakes: list[Diagnostic] = []
    for bundle in bundles:
        pack = folder / writer.pack_name(bundle.id) if {"pack", "embed"} & set(forms) else None
        tree = folder / bundle.id if "tree" in forms else None
        # A bundle knows a kernel by what it computes, a plan also by the language that it is written in.
        ids = {specs[kernel].id: kernel for kernel in bundle.kernels}
        all_neffs, own = bundle.neffs(), dict(bundle.special)
        neff_ids = {id: all_neffs[kernel] for id, kernel in ids.items()}
        found = {id: _notes(hlos.get(kernel), kernel) for id, kernel in ids.items()}
        notes = {id: file for id, file in found.items() if file is not None}
        try:
            writer.build(
                replace(bundle, kernels=tuple(sorted(ids)), special=()),
                {id: specs[kernel] for id, kernel in ids.items()},
                {id: hlos[kernel] for id, kernel in ids.items() if kernel in hlos},
                {id: neffs[neff] for id, neff in neff_ids.items() if neff in neffs},
                configs[bundle.config],
                compiler=compiler,
                own_configs={id: configs[own[kernel]] for id, kernel in ids.items() if kernel in own},
                jax_version=jax_version,
                notes=notes,
                tree_path=tree,
                pack_path=pack,
                embed_folder=folder if "embed" in forms else None,
            )
        except KernelgenError as error:
            mistakes += error.diagnostics
            continue
        yield from filter(None, (pack, tree))
    if mistakes:
        raise KernelgenError(mistakes)


def _notes(hlo: Path | None, kernel: str) -> Path | None:
    """Returns where what is noted about a kernel is, beside its HLO; None when nothing is."""
    file = None if hlo is None else hlo.with_name(notes_file(kernel))
    return file if file is not None and file.is_file() else None
