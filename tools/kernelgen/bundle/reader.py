"""Which kernels a bundle holds: a pack, a tree, or a folder of some, as GGML_NEURON_KERNEL_DIR takes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelgen import fileio
from kernelgen.bundle import pack_name, stored, tree
from kernelgen.errors import KernelgenError
from kernelgen.ggml import gguf_reader
from kernelgen.spec.graph_kernel import GraphSpec
from kernelgen.spec.op_kernel import KernelSpec


@dataclass(frozen=True, slots=True)
class BundleContents:
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


def read(path: Path) -> list[BundleContents]:
    """Returns the bundle at `path`, or those in a folder; of a bundle that is there as pack and as tree the former.

    Raises:
        KernelgenError: there is none, or one is damaged.
    """
    try:
        if path.name == tree.INDEX and path.is_file():
            return [_bundle(stored.of_tree(path.parent))]
        if not path.is_dir():
            return [_bundle(stored.of_pack(path))]
        if (path / tree.INDEX).is_file():
            return [_bundle(stored.of_tree(path))]
        packs = sorted(path.glob(pack_name("*")))
        trees = sorted(index.parent for index in path.glob(f"*/{tree.INDEX}"))
        there = {file.name for file in packs}
        found = [_bundle(stored.of_pack(file)) for file in packs]
        found += [_bundle(stored.of_tree(folder)) for folder in trees if pack_name(folder.name) not in there]
    except OSError as error:
        raise KernelgenError(f"can't read '{path}': {error.strerror or error}") from None
    if not found:
        raise KernelgenError(f"{path}: a folder without a bundle: no {pack_name('*')}, and no folder with {tree.INDEX}")
    return found


def _bundle(made: stored.Stored) -> BundleContents:
    specs = made.specs()
    kernels = tuple(spec for spec in specs if isinstance(spec, KernelSpec))
    groups = tuple(spec for spec in specs if isinstance(spec, GraphSpec))
    return BundleContents(made.path, made.origin.target, kernels, groups)
