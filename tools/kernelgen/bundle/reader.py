"""Reads bundles: one value type for packs and trees, and all bundles of a folder.

Reading refuses an index of the wrong shape. `StoredBundle.mistakes` checks whether the index matches its kernels: that requires
specs that this version of kernelgen supports.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen.bundle import pack, tree
from kernelgen.bundle.contents import BundleOrigin, pack_name
from kernelgen.bundle.key import key
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.ggml import gguf_reader
from kernelgen.neff.memory import NeffMemory
from kernelgen.spec.kernel import KernelSpec, Spec
from kernelgen.targets import TARGETS


@dataclass(frozen=True, slots=True)
class StoredKernel:
    """A kernel in a bundle.

    Attributes:
        id: its id.
        spec: its spec as plain values.
        key: its key's words.
        hlo_sha256: digest of its HLO.
        neff_sha256: digest of its NEFF.
        neff_size: bytes.
        notes: its notes.
        flags: the compiler's flags, if they differ from the bundle's.
        files: its HLO and its NEFF, in a tree.
        memory: memory of its NEFF's program, if the bundle records it.
    """

    id: str
    spec: Mapping[str, Any]
    key: tuple[int, ...]
    hlo_sha256: str
    neff_sha256: str
    neff_size: int
    notes: Mapping[str, Any]
    flags: tuple[str, ...] | None = None
    files: tuple[str, str] | None = None
    memory: NeffMemory | None = None


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle whose index was read.

    Attributes:
        path: the pack, or the tree's folder.
        origin: its identity and the tools that made it.
        kernels: its kernels, in the order of their ids.
        pack: the pack that was read; None for a tree.
    """

    path: Path
    origin: BundleOrigin
    kernels: tuple[StoredKernel, ...]
    pack: pack.Pack | None = None

    @property
    def index(self) -> Path:
        """The file that holds the index."""
        return self.path / tree.INDEX if self.pack is None else self.path

    def specs(self) -> tuple[Spec, ...]:
        """Returns the kernels' specs, in their order.

        Raises:
            KernelgenError: this version of kernelgen does not support one of them.
        """
        return tuple(_spec(self, kernel) for kernel in self.kernels)

    def ops(self) -> tuple[KernelSpec, ...]:
        """Returns the specs of the kernels that compute one op of ggml; see `specs`."""
        return tuple(spec for spec in self.specs() if isinstance(spec, KernelSpec))

    def hlo(self, kernel: StoredKernel) -> bytes:
        """Returns a kernel's HLO.

        Raises:
            KernelgenError: the bundle is a pack, which holds no HLO, or the file is damaged.
            OSError: it can't be read.
        """
        if kernel.files is None:
            raise KernelgenError(f"{self.path}: a pack has no HLO")
        path = self.path / kernel.files[0]
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != kernel.hlo_sha256:
            raise KernelgenError(
                f"{path} is damaged: it is not the HLO that {self.index} names; build the bundle again"
            )
        return data

    def mistakes(self) -> list[Diagnostic]:
        """Returns the differences between the index and its kernels (ids, keys), and an unknown target or LNC.

        It recomputes all but the last from the specs, as the writer does, so it also finds every key that the C++ library refuses.
        """
        found: list[Diagnostic] = []
        target = TARGETS.get(self.origin.target)
        if target is None or self.origin.lnc not in target.lnc_choices:
            lnc = "" if target is None else f" of lnc {self.origin.lnc}"
            found.append(Diagnostic(f"{self.index}: no machine is a '{self.origin.target}'{lnc}"))
        specs = []
        first: dict[tuple[int, ...], str] = {}
        for kernel in self.kernels:
            where = f"{self.index}: kernel {kernel.id}"
            try:
                specs.append(spec := _spec(self, kernel))
                words = key(spec)
            except KernelgenError as error:
                found += error.diagnostics
                continue
            except _BAD_VALUES as error:
                found.append(Diagnostic(f"{where}: no key can be made of its spec: {error}"))
                continue
            if spec.id != kernel.id:
                found.append(Diagnostic(f"{where}: its spec belongs to {spec.id}"))
            elif words != kernel.key:
                both = enumerate(itertools.zip_longest(kernel.key, words))
                at, (word, right) = next((at, pair) for at, pair in both if pair[0] != pair[1])
                what = f"word {at} is {_hexadecimal(word)}; expected {_hexadecimal(right)}"
                found.append(Diagnostic(f"{where}: its key does not match its spec: {what}"))
            elif (other := first.setdefault(words, kernel.id)) != kernel.id:
                found.append(
                    Diagnostic(f"{where}: it and {other} have equal keys, so a lookup cannot distinguish them")
                )
        return found


def of_pack(path: Path) -> StoredBundle:
    """Returns the bundle in a pack.

    Raises:
        KernelgenError: the file is not a bundle, is damaged, or has another format.
        OSError: it cannot be read.
    """
    made = pack.read(path)

    def value(text: str, what: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise KernelgenError(f"{path}: damaged kernel pack: {what} cannot be read: {error}") from None
        if not isinstance(found, dict):
            raise KernelgenError(f"{path}: damaged kernel pack: {what} cannot be read: it is not an object")
        return found

    kernels = []
    for number, (id, which) in enumerate(zip(made.index.ids, made.kernel_neff, strict=True)):
        stored = made.neffs[which]
        notes = made.notes[number] if made.notes else ""
        kernels.append(
            StoredKernel(
                id,
                value(made.specs[number], f"the spec of {id}"),
                made.index.key_of(number),
                made.hlo_sha256[number],
                stored.sha256,
                stored.size,
                value(notes, f"the notes of {id}") if notes else {},
                made.special_flags.get(id),
                memory=stored.memory,
            )
        )
    return StoredBundle(path, made.origin, tuple(kernels), made)


def of_tree(path: Path) -> StoredBundle:
    """Returns the bundle in the folder of a tree.

    Raises:
        KernelgenError: the folder is not a bundle, is damaged, or has another format.
        OSError: it cannot be read.
    """
    index = tree.read_index(path)
    stored = sorted(index["kernels"], key=lambda kernel: kernel["id"].encode())
    keys = [tuple(int(k["key"][at : at + 16], 16) for at in range(0, len(k["key"]), 16)) for k in stored]
    kernels = [
        StoredKernel(
            kernel["id"],
            kernel["spec"],
            words,
            kernel["hlo_sha256"],
            kernel["neff_sha256"],
            kernel["neff_size"],
            kernel.get("notes", {}),
            tuple(kernel["flags"]) if "flags" in kernel else None,
            (kernel["hlo"], kernel["neff"]),
            NeffMemory(**{n: kernel["neff_memory"][n] for n in ("code", "rings", "scratchpad")})
            if "neff_memory" in kernel
            else None,
        )
        for kernel, words in zip(stored, keys, strict=True)
    ]
    return StoredBundle(path, tree.origin(index), tuple(kernels))


def is_bundle(path: Path) -> bool:
    """Returns whether `path` is a folder, a tree's index, or starts with a pack's magic."""
    if path.is_dir() or path.name == tree.INDEX:
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == gguf_reader.MAGIC
    except (OSError, ValueError):  # ValueError: a null byte in the name
        return False


def read(path: Path) -> list[StoredBundle]:
    """Returns the bundle at `path`, or all in a folder. For a bundle that is there as pack and as tree, it returns the pack.

    Raises:
        KernelgenError: there is no bundle, or one is damaged.
    """
    try:
        if path.name == tree.INDEX and path.is_file():
            return [of_tree(path.parent)]
        if not path.is_dir():
            return [of_pack(path)]
        if (path / tree.INDEX).is_file():
            return [of_tree(path)]
        packs = sorted(path.glob(pack_name("*")))
        trees = sorted(index.parent for index in path.glob(f"*/{tree.INDEX}"))
        # A build writes pack and tree beside each other: they are one bundle.
        there = {file.name for file in packs}
        found = [of_pack(file) for file in packs]
        found += [of_tree(folder) for folder in trees if pack_name(folder.name) not in there]
    except OSError as error:
        raise KernelgenError(f"can't read '{path}': {error.strerror or error}") from None
    if not found:
        raise KernelgenError(f"{path}: a folder without a bundle: no {pack_name('*')}, and no folder with {tree.INDEX}")
    return found


_BAD_VALUES = (ValueError, LookupError, TypeError, AttributeError, OverflowError)


def _spec(made: StoredBundle, kernel: StoredKernel) -> Spec:
    try:
        return Spec.from_json(kernel.spec)
    except _BAD_VALUES as error:
        raise KernelgenError(f"{made.index}: the spec of {kernel.id} cannot be read: {error}") from None


def _hexadecimal(word: int | None) -> str:
    return "no word" if word is None else f"{word:016x}"
