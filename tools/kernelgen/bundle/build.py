"""Builds a bundle from the files of kernels: reads and checks all of them, and writes the requested forms.

The three forms of docs/reference/bundle-format.md (a tree, a pack, an embedded form) are written from the same `Contents`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernelgen
from kernelgen import fileio
from kernelgen.bundle import embed, pack, tree
from kernelgen.bundle.contents import SPEC_DEPTH, BundleOrigin, Contents, StoredFile, file_name
from kernelgen.bundle.index import KernelIndex
from kernelgen.bundle.json_text import read_json
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.neff import container as neff_format
from kernelgen.neff import description
from kernelgen.neff.memory import NeffMemory, needed
from kernelgen.plan import Bundle, BundleEntries
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.filenames import kernel_of, notes_file
from kernelgen.spec.kernel import Spec


def build_planned(
    planned: BundleEntries, hlos: Sequence[Path | None], neffs: Sequence[Path | None], **options: Any
) -> Contents:
    """Writes the requested forms of a planned bundle from the built files of its entries.

    Args:
        planned: the bundle.
        hlos: the HLO of each entry, with the kernel's notes beside it. None for a missing one.
        neffs: the NEFF of each entry, or None.
        **options: see `build`: `compiler`, `jax_version`, and the outputs.

    Raises:
        KernelgenError: see `build`.
    """
    files = list(zip(planned.entries, hlos, neffs, strict=True))
    # A bundle identifies a kernel by its spec; a plan's id also has the language.
    return build(
        Bundle(planned.name, planned.config.target, planned.config.key, tuple(e.spec.id for e in planned.entries)),
        {entry.spec.id: entry.spec for entry in planned.entries},
        {entry.spec.id: hlo for entry, hlo, _ in files if hlo},
        {entry.spec.id: neff for entry, _, neff in files if neff},
        planned.config,
        own_configs={entry.spec.id: entry.config for entry in planned.entries},
        notes={e.spec.id: hlo.with_name(notes_file(kernel_of(hlo))) for e, hlo, _ in files if hlo and e.noted},
        **options,
    )


def build(
    bundle: Bundle,
    specs: Mapping[str, Spec],
    hlos: Mapping[str, Path],
    neffs: Mapping[str, Path],
    config: CompileConfig,
    *,
    own_configs: Mapping[str, CompileConfig] | None = None,
    compiler: str | None = None,
    jax_version: str = "unknown",
    notes: Mapping[str, Path] | None = None,
    tree_path: str | Path | None = None,
    pack_path: str | Path | None = None,
    embed_folder: str | Path | None = None,
    include: str = "neuron_kernels.h",
    incbin: str | None = None,
) -> Contents:
    """Writes the requested forms of a bundle; each file, and the tree as a whole, appears by rename.

    Args:
        bundle: the kernels and the target.
        specs: each kernel's spec, by id; more than the bundle's are allowed, here and below.
        hlos: each kernel's HLO, by id.
        neffs: each kernel's NEFF, by id.
        config: the settings the NEFFs were compiled with.
        own_configs: the settings of kernels that have their own, by id.
        compiler: the compiler's identity; None takes it from the NEFFs.
        jax_version: version of the jax that emitted the HLO.
        notes: notes that the emit step wrote about kernels, by id; some kernels have none.
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
    contents = gather(
        bundle,
        specs,
        hlos,
        neffs,
        config,
        own_configs=own_configs,
        compiler=compiler,
        jax_version=jax_version,
        notes=notes,
    )
    if tree_path is not None:
        tree.write(tree_path, contents)
    if pack_path is not None:
        pack.write(pack_path, contents)
    if embed_folder is not None:
        if pack_path is None:
            raise ValueError("an embedded bundle takes its data from a pack: pack_path is needed")
        embed.write(embed_folder, pack.read(pack_path), include=include, incbin=incbin)
    return contents


def gather(
    bundle: Bundle,
    specs: Mapping[str, Spec],
    hlos: Mapping[str, Path],
    neffs: Mapping[str, Path],
    config: CompileConfig,
    *,
    own_configs: Mapping[str, CompileConfig] | None = None,
    compiler: str | None = None,
    jax_version: str = "unknown",
    notes: Mapping[str, Path] | None = None,
) -> Contents:
    """Returns the contents of a bundle, after reading and checking every file once; see `build` for the arguments.

    Finds identical NEFFs by their digest. Does not keep the files' bytes.

    Raises:
        KernelgenError: kernels' files are missing, damaged or do not match each other; it lists all such mistakes.
    """
    own = own_configs or {}
    # The id becomes part of file names.
    file_name(bundle.id)
    _check_settings(bundle, config, own.values())
    kernels = sorted(set(bundle.kernels), key=str.encode)
    mistakes: list[Diagnostic] = []
    distinct: dict[str, _Neff] = {}
    found: dict[str, _KernelFiles] = {}
    for kernel in kernels:
        if mistake := _not_given(kernel, specs, hlos, neffs):
            mistakes.append(Diagnostic(f"bundle {bundle.id}: {mistake}"))
            continue
        try:
            _check_spec(specs[kernel])
            note = (notes or {}).get(kernel)
            found[kernel] = _kernel_files(hlos[kernel], neffs[kernel], note, distinct, own.get(kernel, config))
        except KernelgenError as error:
            mistakes += [Diagnostic(f"kernel {kernel}: {d.message}", d.location, d.hint) for d in error.diagnostics]
        except OSError as error:
            mistakes.append(Diagnostic(f"kernel {kernel}: {error.filename}: {error.strerror}"))
    makers = _makers(found)
    if len(makers) > 1:
        said = "; ".join(f"{kernel} by {identity}" for (_, identity), kernel in sorted(makers.items()))
        mistakes.append(Diagnostic(f"bundle {bundle.id}: its NEFFs were made by more than one compiler: {said}"))
    if mistakes:
        raise KernelgenError(mistakes)
    chosen = [specs[kernel] for kernel in kernels]
    index = KernelIndex.build(chosen)  # refuses an empty bundle
    simulated, identity = next(iter(makers))
    return Contents(
        BundleOrigin(
            name=bundle.name,
            target=bundle.target,
            lnc=config.lnc,
            simulated=simulated,
            compiler=compiler or identity,
            flags=tuple(config.flags()),
            version=kernelgen.__version__,
            jax_version=jax_version or "unknown",
        ),
        index,
        tuple(chosen),
        tuple(files.hlo for files in found.values()),
        tuple(neff.file for neff in distinct.values()),
        tuple(files.neff.number for files in found.values()),
        notes=tuple(files.notes for files in found.values()),
        neff_memory=tuple(neff.memory for neff in distinct.values()),
        special_flags=tuple(
            (n, tuple(own[kernel].flags())) for n, kernel in enumerate(kernels) if own.get(kernel, config) != config
        ),
    )


def _not_given(kernel: str, specs: Mapping[str, Spec], hlos: Mapping[str, Path], neffs: Mapping[str, Path]) -> str:
    """Returns a description of a kernel's missing or mismatched inputs; empty if all are present."""
    missing = [what for what, given in (("spec", specs), ("HLO", hlos), ("NEFF", neffs)) if kernel not in given]
    if missing:
        return f"kernel {kernel} has no {' and no '.join(missing)}"
    return "" if specs[kernel].id == kernel else f"the spec given for {kernel} belongs to {specs[kernel].id}"


def _makers(found: Mapping[str, _KernelFiles]) -> dict[tuple[bool, str], str]:
    """Returns one kernel of each compiler, by (is it the simulator, compiler identity)."""
    made_by: dict[tuple[bool, str], str] = {}
    for kernel, files in found.items():
        made_by.setdefault((files.neff.simulated, files.neff.made_by), kernel)
    return made_by


def _check_settings(bundle: Bundle, config: CompileConfig, own: Iterable[CompileConfig]) -> None:
    for one in (config, *own):
        if one.target != bundle.target:
            raise KernelgenError(f"bundle {bundle.id} is for {bundle.target}, its compile settings for {one.target}")
        if one.lnc != config.lnc:
            raise KernelgenError(f"bundle {bundle.id} is for lnc {config.lnc}, settings of a kernel for {one.lnc}")


@dataclass(frozen=True, slots=True)
class _Neff:
    number: int
    file: StoredFile
    simulated: bool
    made_by: str
    memory: NeffMemory
    hlo_sha256: str | None
    """None for a real NEFF, which does not record its HLO."""
    said: description.NeffDescription | None = None
    """The description in a real NEFF, to compare with the HLO instead."""


@dataclass(frozen=True, slots=True)
class _KernelFiles:
    hlo: StoredFile
    neff: _Neff
    notes: str


def _kernel_files(
    hlo_path: Path, neff_path: Path, notes: Path | None, known: dict[str, _Neff], config: CompileConfig
) -> _KernelFiles:
    """Returns a kernel's files, after checking that they match; `known` and `config` as in `_neff`.

    Raises:
        KernelgenError: one is damaged, or they belong to different kernels.
        OSError: one can't be read.
    """
    hlo = _stored(Path(hlo_path))
    noted = _notes(notes)
    neff = _neff(Path(neff_path), Path(hlo_path), known, config)
    if neff.hlo_sha256 not in (None, hlo.sha256):
        raise KernelgenError(f"{neff_path}: compiled from another HLO (SHA-256 {neff.hlo_sha256}, not {hlo.sha256})")
    if neff.said is not None:
        tensors = neff_format.tensors_of(fileio.read_input(hlo_path), source=str(hlo_path))
        description.check(neff.said, tensors, config.target, config.lnc, source=str(neff_path))
    return _KernelFiles(hlo, neff, noted)


def _neff(path: Path, hlo_path: Path, known: dict[str, _Neff], config: CompileConfig) -> _Neff:
    """Returns the NEFF in `path`: the one of `known` with equal bytes, else a new one, which is added to `known`.

    Checks everything in a simulated NEFF, its settings too. Reads a real one to its end. If the NEFF does not record its program's
    memory, `hlo_path`, the HLO that it was compiled from, supplies it.
    """
    data = fileio.read_input(path)
    sha = hashlib.sha256(data).hexdigest()
    if sha in known:
        return known[sha]
    file = StoredFile(path, sha, len(data))
    header = neff_format.read_header(data, source=str(path))

    def memory() -> NeffMemory:
        of = (config.target, config.lnc, config.model_type)
        return needed(data, fileio.read_input(hlo_path), *of, simulated=header.simulated, source=str(path))

    if not header.simulated:
        said = description.describe(data, source=str(path))
        made = _Neff(len(known), file, False, said.identity, memory(), None, said)
    else:
        info = neff_format.read_simulated(data, source=str(path)).info
        if info["flags"] != config.flags():
            raise KernelgenError(
                f"{path}: compiled with {' '.join(info['flags'])}, not with {' '.join(config.flags())}"
            )
        made = _Neff(len(known), file, True, info["compiler"], memory(), info["hlo_sha256"])
    return known.setdefault(sha, made)


def _check_spec(spec: Spec) -> None:
    """Raises KernelgenError for a spec that no index can hold."""
    try:
        read_json(spec.json, SPEC_DEPTH)
    except ValueError as error:
        raise KernelgenError(f"its spec: {error}") from None


def _notes(path: Path | None) -> str:
    """Returns a kernel's notes as canonical JSON; empty if there are none."""
    if path is None:
        return ""
    try:
        found = read_json(fileio.read_input(path), SPEC_DEPTH)
    except ValueError:
        raise KernelgenError(f"{path}: not the notes of a kernel") from None
    return canonical_json(found) if found else ""


def _stored(path: Path) -> StoredFile:
    data = fileio.read_input(path)
    if not data:
        raise KernelgenError(f"{path}: empty")
    return StoredFile(path, hashlib.sha256(data).hexdigest(), len(data))
