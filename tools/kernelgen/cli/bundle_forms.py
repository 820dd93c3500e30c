"""Bundles in a folder, in the requested forms: the option for the forms, and the loop that writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.plan import Bundle, Plan

F = TypeVar("F", bound=Callable[..., Any])

FORMS = ("pack", "tree", "embed")
_DEFAULT = ("pack", "tree")


def option(function: F) -> F:
    """Adds `--form FORM…` as `forms: tuple[str, ...]`; pack and tree by default."""
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
    """Writes bundles one after another, and yields each pack and each tree when it is written.

    Args:
        plan: the plan, with the bundles' kernels and settings.
        bundles: the bundles to write.
        folder: the output folder.
        forms: some of `FORMS`; an embedded bundle takes its data from a pack, which is written beside it.
        hlos: each kernel's HLO, by id.
        neffs: each NEFF, by `Neff.id`.
        compiler: the compiler's identity; None takes it from the NEFFs.
        jax_version: version of the jax that emitted the HLO.

    Raises:
        KernelgenError: at the end, with all problems of the bundles that could not be written.
        OSError: an output cannot be written.
    """
    from kernelgen.bundle.build import build
    from kernelgen.bundle.contents import pack_name

    mistakes: list[Diagnostic] = []
    for bundle in bundles:
        pack = folder / pack_name(bundle.id) if {"pack", "embed"} & set(forms) else None
        tree = folder / bundle.id if "tree" in forms else None
        planned = plan.entries(bundle)
        try:
            build(
                planned,
                hlos,
                {kernel: neffs.get(neff) for kernel, neff in bundle.neffs().items()},
                compiler=compiler,
                jax_version=jax_version,
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
