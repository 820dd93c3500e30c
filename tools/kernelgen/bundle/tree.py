"""The tree: a bundle as a folder, for people and for other programs.

The layout is in docs/reference/bundle-format.md.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from kernelgen import fileio
from kernelgen.bundle.contents import FORMAT, BundleOrigin, Contents, file_name, is_kernel_id, is_sha256
from kernelgen.errors import KernelgenError
from kernelgen.neff.memory import MAX, NeffMemory
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.filenames import NEFF, hlo_file

INDEX = "index.json"


def hlo_path(kernel: str) -> str:
    """Returns the path of a kernel's HLO inside a tree.

    Raises:
        KernelgenError: the id is not a file name.
    """
    return f"generic/hlo/{hlo_file(file_name(kernel))}"


def neff_path(kernel: str, target: str) -> str:
    """Returns the path of a kernel's NEFF inside a tree.

    Raises:
        KernelgenError: the id or the target is not a file name.
    """
    return f"{file_name(target)}/neff/{file_name(kernel)}{NEFF}"


def write(path: str | Path, contents: Contents) -> None:
    """Writes a tree and replaces the folder `path` as a whole.

    Raises:
        KernelgenError: an id cannot be a file name.
        OSError: a file cannot be read or written.
    """
    origin = contents.origin
    lines = []
    special = dict(contents.special_flags)
    memory = contents.neff_memory
    notes = contents.notes or [""] * len(contents.specs)
    with fileio.replacing_folder(path) as folder:
        (folder / "generic/hlo").mkdir(parents=True)
        (folder / file_name(origin.target) / "neff").mkdir(parents=True)
        first: dict[int, Path] = {}
        for number, kernel in enumerate(contents.index.ids):
            hlo, neff = hlo_path(kernel), neff_path(kernel, origin.target)
            shutil.copyfile(contents.hlos[number].path, folder / hlo)
            which = contents.kernel_neff[number]
            source = contents.neffs[which]
            if not (which in first and _link(first[which], folder / neff)):
                shutil.copyfile(source.path, folder / neff)
                first[which] = folder / neff
            lines.append(
                canonical_json(
                    {
                        "id": kernel,
                        "spec": json.loads(contents.specs[number].json),
                        "key": "".join(f"{word:016x}" for word in contents.index.key_of(number)),
                        "hlo": hlo,
                        "hlo_sha256": contents.hlos[number].sha256,
                        "neff": neff,
                        "neff_sha256": source.sha256,
                        "neff_size": source.size,
                        **({"neff_memory": memory[which].to_json()} if memory else {}),
                        **({"notes": json.loads(notes[number])} if notes[number] else {}),
                    }
                    | ({"flags": special[number]} if number in special else {})
                )
            )
        head = canonical_json(
            {
                "format": FORMAT,
                "name": origin.name,
                "target": origin.target,
                "lnc": origin.lnc,
                "simulated": origin.simulated,
                "compiler": origin.compiler,
                "flags": origin.flags,
                "version": origin.version,
                "jax_version": origin.jax_version,
            }
        )
        text = head[:-1] + ',\n"kernels":[\n' + ",\n".join(lines) + "\n]}\n"
        (folder / INDEX).write_text(text, encoding="utf-8", newline="\n")


def read_index(path: str | Path) -> dict[str, Any]:
    """Returns a tree's index.json, after checking its shape and its paths.

    Args:
        path: the tree's folder.

    Raises:
        KernelgenError: there is no index, it is damaged, has another format, or names a path outside the tree.
    """
    file = Path(path) / INDEX
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise KernelgenError(f"{path}: not a bundle tree: it has no {INDEX}") from None
    except ValueError as error:
        raise KernelgenError(f"{file}: not JSON of a bundle: {error}") from None
    if not isinstance(value, dict) or "format" not in value:
        raise KernelgenError(f"{file}: not the index of a bundle")
    if type(value["format"]) is not int or value["format"] != FORMAT:
        raise KernelgenError(f"{file}: a bundle of format {value['format']!r}; this kernelgen reads format {FORMAT}")
    expected = {"name": str, "target": str, "lnc": int, "simulated": bool, "compiler": str, "flags": list,
                "version": str, "jax_version": str, "kernels": list}  # fmt: skip
    _fields(file, value, expected, "")
    if not all(isinstance(flag, str) for flag in value["flags"]):
        raise KernelgenError(f"{file}: flags has an item that is not a string")
    if problem := origin(value).problem():
        raise KernelgenError(f"{file}: {problem}")
    if not value["kernels"]:
        raise KernelgenError(f"{file}: 'kernels' is empty; a tree holds at least one kernel")
    ids: set[str] = set()
    for number, kernel in enumerate(value["kernels"]):
        where = f"kernels[{number}]"
        if not isinstance(kernel, dict):
            raise KernelgenError(f"{file}: {where} is not an object")
        _fields(file, kernel, {"id": str, "spec": dict, "key": str, "hlo": str, "hlo_sha256": str, "neff": str,
                               "neff_sha256": str, "neff_size": int}, where + ".")  # fmt: skip
        id = kernel["id"]
        if not is_kernel_id(id):
            raise KernelgenError(f"{file}: {where}: {id!r} is not a kernel id")
        if id in ids:
            raise KernelgenError(f"{file}: {where}: its id '{id}' is a duplicate")
        ids.add(id)
        if len(kernel["key"]) % 16 or not set(kernel["key"]) <= set("0123456789abcdef"):
            raise KernelgenError(f"{file}: kernel {id}: its key is not a sequence of words of 16 hexadecimal digits")
        for name in ("hlo_sha256", "neff_sha256"):
            if not is_sha256(kernel[name]):
                raise KernelgenError(f"{file}: kernel {id}: '{name}' is not 64 hexadecimal digits")
        for name in ("hlo", "neff"):
            inside = PurePosixPath(kernel[name])
            if inside.is_absolute() or ".." in inside.parts:
                raise KernelgenError(f"{file}: {where}.{name} is outside the tree: {kernel[name]!r}")
        if not isinstance(kernel.get("notes", {}), dict):
            raise KernelgenError(f"{file}: {where}.notes is not of type dict")
        if "neff_memory" in kernel and not _is_memory(kernel["neff_memory"]):
            raise KernelgenError(f"{file}: {where}.neff_memory does not have code, rings and scratchpad in bytes")
        flags = kernel.get("flags", [])
        if not isinstance(flags, list) or not all(isinstance(flag, str) for flag in flags):
            raise KernelgenError(f"{file}: {where}.flags is not a list of strings")
    said: dict[str, Any] = {}
    for kernel in value["kernels"]:
        memory = kernel.get("neff_memory")
        if (memory is None) != (value["kernels"][0].get("neff_memory") is None):
            raise KernelgenError(f"{file}: some kernels have 'neff_memory', and some don't")
        if said.setdefault(kernel["neff_sha256"], memory) != memory:
            raise KernelgenError(
                f"{file}: kernel {kernel['id']}: 'neff_memory' differs from that of other kernels with this 'neff_sha256'"
            )
    return value


def origin(index: dict[str, Any]) -> BundleOrigin:
    """Returns the bundle's identity from a tree's index."""
    names = ("name", "target", "lnc", "simulated", "compiler", "version", "jax_version")
    return BundleOrigin(**{name: index[name] for name in names}, flags=tuple(index["flags"]))


def leads_out(path: Path, file: str) -> bool:
    """Returns whether a file of a tree is a link to a place outside it.

    The index's real folder is the tree: in a folder of links to a tree's files, as sandboxes make them, all links lead there.
    """
    return (path / INDEX).resolve().parent not in (path / file).resolve().parents


def _fields(file: Path, value: dict[str, Any], expected: dict[str, type], where: str) -> None:
    for name, kind in expected.items():
        if not isinstance(value.get(name), kind) or (kind is int and isinstance(value[name], bool)):
            raise KernelgenError(f"{file}: {where}{name} is missing or not of type {kind.__name__}")


def _is_memory(value: Any) -> bool:
    names = [field.name for field in dataclasses.fields(NeffMemory)]
    return isinstance(value, dict) and all(type(value.get(n)) is int and 0 <= value[n] <= MAX for n in names)


def _link(source: Path, destination: Path) -> bool:
    try:
        os.link(source, destination)
    except OSError:  # the file system supports no hard links, or no more for this file
        return False
    return True
