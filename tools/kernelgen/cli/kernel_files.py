"""The files that commands take kernels from: manifests and bundles, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernelgen.bundle import reader
from kernelgen.errors import KernelgenError
from kernelgen.ggml import model_files


def manifests_and_bundles(paths: Sequence[Path]) -> tuple[list[Path], list[reader.Stored]]:
    """Returns which paths are manifests, and the bundles that the other paths hold.

    Raises:
        KernelgenError: a path is a model's file, or a bundle is damaged.
    """
    manifests: list[Path] = []
    bundles: list[reader.Stored] = []
    for path in paths:
        mistake = model_files.recognize(path, "manifest", packs=True)
        if mistake is not None:
            raise KernelgenError(mistake)
        if reader.is_bundle(path):
            bundles += reader.read(path)
        else:
            manifests.append(path)
    return manifests, bundles
