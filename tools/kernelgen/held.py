"""Which kernels a bundle holds: a pack, a tree, or a folder of some, as GGML_NEURON_KERNEL_DIR takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen import fileio, gguf_reader
from kernelgen.bundle import pack, pack_name, tree
from kernelgen.errors import KernelgenError
from kernelgen.graph_kernel import GraphSpec, Spec, spec_from_json
from kernelgen.kernel import KernelSpec


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one bundle holds.

    Attributes:
        path: of the pack, or of the tree's folder.
        target: that its kernels are compiled for.
        specs: its kernels.
        groups: its graph kernels.
    """

    path: Path
    target: str
    specs: tuple[KernelSpec, ...]
    groups: tuple[GraphSpec, ...] = ()


def is_bundle(path: Path) -> bool:
    """Returns whether `path` is a folder, a tree's index, or begins as a pack does."""
    if path.is_dir() or path.name == tree.INDEX:
        return True
    try:
        with fileio.open_input(path) as file:
            return file.read(4) == gguf_reader.MAGIC
    except (OSError, ValueError):  # ValueError: a null byte in the name
        return False


def read(path: Path) -> list[Bundle]:
    """Returns the bundle at `path`, or those in a folder; of a bundle that is there as pack and as tree the former.

    Raises:
        KernelgenError: there is none, or one is damaged.
    """
    try:
        if path.name == tree.INDEX and path.is_file():
            return [_tree(path.parent)]
        if not path.is_dir():
            return [_pack(path)]
        if (path / tree.INDEX).is_file():
            return [_tree(path)]
        packs = sorted(path.glob(pack_name("*")))
        trees = sorted(index.parent for index in path.glob(f"*/{tree.INDEX}"))
        there = {file.name for file in packs}
        found = [*map(_pack, packs), *(_tree(folder) for folder in trees if pack_name(folder.name) not in there)]
    except OSError as error:
        raise KernelgenError(f"can't read '{path}': {error.strerror or error}") from None
    if not found:
        raise KernelgenError(f"{path}: a folder without a bundle: no {pack_name('*')}, and no folder with {tree.INDEX}")
    return found


def _pack(path: Path) -> Bundle:
    made = pack.read(path)
    return _bundle(path, made.origin.target, _specs(path, made.specs))


def _tree(path: Path) -> Bundle:
    index = tree.read_index(path)
    return _bundle(path, str(index["target"]), _specs(path, [kernel["spec"] for kernel in index["kernels"]]))


def _bundle(path: Path, target: str, specs: Sequence[Spec]) -> Bundle:
    kernels = tuple(spec for spec in specs if isinstance(spec, KernelSpec))
    return Bundle(path, target, kernels, tuple(spec for spec in specs if isinstance(spec, GraphSpec)))


def _specs(path: Path, values: Sequence[str | dict[str, Any]]) -> list[Spec]:
    try:
        return [spec_from_json(json.loads(v) if isinstance(v, str) else v) for v in values]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise KernelgenError(f"{path}: damaged bundle: the spec of a kernel cannot be read: {error}") from None
