"""Kernel files of commands: manifests and bundles in any order, and their target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from kernelgen import manifest
from kernelgen.bundle import reader
from kernelgen.cli import options
from kernelgen.dispatch import chips
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import KernelgenError
from kernelgen.forecast.kernels import Kernels
from kernelgen.ggml import model_files
from kernelgen.spec.kernel import SourceSpec
from kernelgen.targets import TARGETS


def manifests_and_bundles(paths: Sequence[Path]) -> tuple[list[Path], list[reader.StoredBundle]]:
    """Returns the paths that are manifests, and the bundles in the other paths.

    Raises:
        KernelgenError: a path is a model's file, or a bundle is damaged.
    """
    manifests: list[Path] = []
    bundles: list[reader.StoredBundle] = []
    for path in paths:
        mistake = model_files.recognize(path, "manifest", packs=True)
        if mistake is not None:
            raise KernelgenError(mistake)
        if reader.is_bundle(path):
            bundles += reader.read(path)
        else:
            manifests.append(path)
    return manifests, bundles


def of_one_target(paths: Sequence[Path], target: str | None, catalog: Catalog) -> tuple[Kernels, str]:
    """Returns the kernels of manifests and bundles, and the target: by default the bundles' target, or trn1.

    Raises:
        KernelgenError: a path is neither a manifest nor a bundle, or bundles are for another target.
    """
    manifests, bundles = manifests_and_bundles(paths)
    bundles = [bundle for bundle in bundles if target in (None, bundle.origin.target)]
    targets = [bundle.origin.target for bundle in bundles]
    specs = [spec for bundle in bundles for spec in bundle.specs()]
    if len(set(targets)) > 1:
        raise KernelgenError(f"the bundles are for {', '.join(dict.fromkeys(targets))}: choose one with --target")
    requests = options.only_targets(manifest.load(manifests, catalog), [target] if target else [])
    chosen = target or (targets[0] if targets else "trn1")
    wanted = [kernel for request in requests for kernel in request.kernels_for(chosen)]
    specs += [kernel.spec for kernel in wanted]
    read_hlo = {
        kernel.id: partial(bundle.hlo, kernel) for bundle in bundles for kernel in bundle.kernels if kernel.files
    }
    by_source = {kernel.id: kernel for kernel in wanted if isinstance(kernel.spec, SourceSpec)}
    kernels = Kernels(specs, catalog, read_hlo, by_source)
    if not kernels.by_graph:
        raise KernelgenError(f"no kernel for {target or 'any target'}")
    return kernels, chosen


def chip_of(target: str, lnc: str | None) -> chips.Chip:
    """Returns the figures of a target.

    Args:
        target: its name.
        lnc: physical cores of a logical core; None for the target's default.

    Raises:
        KernelgenError: the target does not support the LNC.
    """
    try:
        return chips.of(target, int(lnc) if lnc else None)
    except KeyError:
        choices = " or ".join(map(str, TARGETS[target].lnc_choices))
        raise KernelgenError(f"--lnc {lnc}: {target} has {choices}") from None


def print_refusals(kernels: Kernels) -> None:
    """Prints the kernels that the forecast omits, with the reasons."""
    for reason in kernels.refusals.values():
        click.echo(f"warning: the forecast leaves out a kernel whose HLO can't be emitted: {reason}", err=True)
