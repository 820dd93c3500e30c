"""Builds a bundle from the files of kernels: reads and checks all of them, and writes the requested forms.

The three forms of docs/reference/bundle-format.md (a tree, a pack, an embedded form) are written from the same `Contents`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import kernelgen
from kernelgen.bundle import embed, pack, tree
from kernelgen.bundle.contents import BundleOrigin, Contents, StoredFile, file_name
from kernelgen.bundle.key import KernelIndex
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.neff import container as neff_format
from kernelgen.neff import description
from kernelgen.neff.memory import NeffMemory, needed
from kernelgen.plan import BundleEntries, Entry
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.filenames import kernel_of, notes_file


def build(
    planned: BundleEntries,
    hlos: Mapping[str, Path | None],
    neffs: Mapping[str, Path | None],
    *,
    compiler: str | None = None,
    jax_version: str = "unknown",
    tree_path: str | Path | None = None,
    pack_path: str | Path | None = None,
    embed_folder: str | Path | None = None,
    include: str = "neuron_kernels.h",
    incbin: str | None = None,
) -> Contents:
    """Writes the requested forms of a planned bundle; each file, and the tree as a whole, appears by rename.

    Reads and checks every file once, and finds identical NEFFs by their digest. Does not keep the files' bytes.

    Args:
        planned: the bundle.
        hlos: the HLO of each entry, by `Entry.kernel`, with the kernel's notes beside it; None for a missing one, here and below.
        neffs: the NEFF of each entry, by `Entry.kernel`.
        compiler: the compiler's identity; None takes it from the NEFFs.
        jax_version: version of the jax that emitted the HLO.
        tree_path: the folder to write the tree to, or None.
        pack_path: the file to write the pack to, or None.
        embed_folder: the folder for the embedded form's `.S`, `.c` and `.h`, or None; needs `pack_path`.
        include: the path by which the embedded form's header includes the backend's.
        incbin: the path by which the embedded form's assembly includes the pack; by default its file name.

    Returns:
        the written contents.

    Raises:
        KernelgenError: kernels' files are missing, damaged or do not match each other; it lists all such mistakes.
        OSError: an output cannot be written.
    """
    contents = _contents(planned, hlos, neffs, compiler, jax_version)
    if tree_path is not None:
        tree.write(tree_path, contents)
    if pack_path is not None:
        pack.write(pack_path, contents)
    if embed_folder is not None:
        if pack_path is None:
            raise ValueError("an embedded bundle takes its data from a pack: pack_path is needed")
        embed.write(embed_folder, pack.read(pack_path), include=include, incbin=incbin)
    return contents


@dataclass(frozen=True, slots=True)
class _Neff:
    number: int
    file: StoredFile
    simulated: bool
    compiler: str
    memory: NeffMemory
    hlo_sha256: str | None
    """None for a real NEFF, which does not record its HLO."""
    description: description.NeffDescription | None = None
    """The description in a real NEFF, to compare with the HLO instead."""


@dataclass(frozen=True, slots=True)
class _KernelFiles:
    hlo: StoredFile
    neff: _Neff
    notes: str


def _contents(
    planned: BundleEntries,
    hlos: Mapping[str, Path | None],
    neffs: Mapping[str, Path | None],
    compiler: str | None,
    jax_version: str,
) -> Contents:
    """Reads and checks all files of a bundle; see `build`."""
    config = planned.config
    file_name(planned.id)  # the id becomes part of file names
    mistakes: list[Diagnostic] = []
    distinct: dict[str, _Neff] = {}
    files: list[_KernelFiles] = []
    makers: dict[tuple[bool, str], str] = {}
    # A bundle identifies a kernel by its spec; a plan's id also has the language.
    entries = sorted(planned.entries, key=lambda entry: entry.spec.id.encode())
    for entry in entries:
        id, hlo, neff = entry.spec.id, hlos.get(entry.kernel), neffs.get(entry.kernel)
        if (entry.config.target, entry.config.lnc) != (config.target, config.lnc):
            raise KernelgenError(f"bundle {planned.id}: kernel {id} is compiled for another target or lnc")
        try:
            found = _read(entry, hlo, neff, distinct)
        except KernelgenError as error:
            mistakes += [Diagnostic(f"kernel {id}: {d.message}", d.location, d.hint) for d in error.diagnostics]
        except OSError as error:
            mistakes.append(Diagnostic(f"kernel {id}: {error.filename}: {error.strerror}"))
        else:
            files.append(found)
            makers.setdefault((found.neff.simulated, found.neff.compiler), id)
    if len(makers) > 1:
        said = "; ".join(f"{id} by {identity}" for (_, identity), id in sorted(makers.items()))
        mistakes.append(Diagnostic(f"bundle {planned.id}: its NEFFs were made by more than one compiler: {said}"))
    if mistakes:
        raise KernelgenError(mistakes)
    specs = tuple(entry.spec for entry in entries)
    index = KernelIndex.build(specs)  # refuses an empty bundle
    simulated, identity = next(iter(makers))
    return Contents(
        BundleOrigin(
            name=planned.name,
            target=config.target,
            lnc=config.lnc,
            simulated=simulated,
            compiler=compiler or identity,
            flags=tuple(config.flags()),
            version=kernelgen.__version__,
            jax_version=jax_version or "unknown",
        ),
        index,
        specs,
        tuple(one.hlo for one in files),
        tuple(neff.file for neff in distinct.values()),
        tuple(one.neff.number for one in files),
        notes=tuple(one.notes for one in files),
        neff_memory=tuple(neff.memory for neff in distinct.values()),
        special_flags=tuple(
            (n, tuple(entry.config.flags())) for n, entry in enumerate(entries) if entry.config != config
        ),
    )


def _read(entry: Entry, hlo_path: Path | None, neff_path: Path | None, distinct: dict[str, _Neff]) -> _KernelFiles:
    """Returns a kernel's files, after checking that they match; a NEFF with new bytes is added to `distinct`.

    Raises:
        KernelgenError: one is damaged, or they belong to different kernels.
        OSError: one can't be read.
    """
    if hlo_path is None or neff_path is None:
        absent = [what for what, path in (("HLO", hlo_path), ("NEFF", neff_path)) if path is None]
        raise KernelgenError(f"there is no {' and no '.join(absent)}")
    hlo = hlo_path.read_bytes()
    if not hlo:
        raise KernelgenError(f"{hlo_path}: empty")
    notes = ""
    if entry.noted:
        notes_path = hlo_path.with_name(notes_file(kernel_of(hlo_path)))
        try:
            value = json.loads(notes_path.read_bytes())
        except ValueError:
            raise KernelgenError(f"{notes_path}: not the notes of a kernel") from None
        notes = canonical_json(value) if value else ""
    data = neff_path.read_bytes()
    sha = hashlib.sha256(data).hexdigest()
    if sha not in distinct:
        distinct[sha] = _neff(entry.config, neff_path, data, sha, hlo, len(distinct))
    neff = distinct[sha]
    hlo_sha = hashlib.sha256(hlo).hexdigest()
    if neff.hlo_sha256 not in (None, hlo_sha):
        raise KernelgenError(f"{neff_path}: compiled from another HLO (SHA-256 {neff.hlo_sha256}, not {hlo_sha})")
    if neff.description is not None:
        tensors = neff_format.tensors_of(hlo, source=str(hlo_path))
        description.check(neff.description, tensors, entry.config.target, entry.config.lnc, source=str(neff_path))
    return _KernelFiles(StoredFile(hlo_path, hlo_sha, len(hlo)), neff, notes)


def _neff(config: CompileConfig, path: Path, data: bytes, sha: str, hlo: bytes, number: int) -> _Neff:
    """Returns a NEFF after checking it: everything in a simulated one, its settings too; a real one is read to its end.

    If the NEFF does not record its program's memory, the HLO that it was compiled from supplies it.
    """
    source = str(path)
    header = neff_format.read_header(data, source=source)
    found, compiler, hlo_sha = None, "", None
    if header.simulated:
        info = neff_format.read_simulated(data, source=source).info
        if info["flags"] != config.flags():
            message = f"{path}: compiled with {' '.join(info['flags'])}, not with {' '.join(config.flags())}"
            raise KernelgenError(message)
        compiler, hlo_sha = info["compiler"], info["hlo_sha256"]
    else:
        found = description.describe(data, source=source)
        compiler = found.identity
    memory = needed(data, hlo, config.target, config.lnc, config.model_type, simulated=header.simulated, source=source)
    return _Neff(number, StoredFile(path, sha, len(data)), header.simulated, compiler, memory, hlo_sha, found)
