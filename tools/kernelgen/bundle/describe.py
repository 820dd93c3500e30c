"""Identifies a built file by its content: a bundle as tree or pack, a NEFF, an HLO, or repacked weights.

`describe` returns plain values, which `kernelgen inspect --format json` prints; `text` formats them for people.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kernelgen.bundle import tree
from kernelgen.bundle.contents import BundleOrigin
from kernelgen.bundle.pack import Pack
from kernelgen.bundle.reader import StoredBundle, of_pack, of_tree
from kernelgen.dispatch import modelled_cost
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.ggml import gguf_reader, model_files
from kernelgen.hlo.describe import describe as describe_hlo
from kernelgen.model import repacked_file
from kernelgen.neff import container, description
from kernelgen.neff.container import HEADER_SIZE
from kernelgen.neff.identity import flag
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.filenames import NEFF, kernel_of, notes_file
from kernelgen.spec.kernel import SourceSpec


def describe(path: str | Path, *, check: bool = False, cost: bool = False) -> dict[str, Any]:
    """Returns a description of a file or folder; `kind` is `tree`, `pack`, `neff`, `hlo` or `repacked`.

    Args:
        path: the file, or the folder of a tree.
        check: also read all of a bundle, compare digests, and recompute the index from the specs; otherwise only the index is read.
        cost: also return the kernels' costs by the model of their language: `cost` of an HLO file or of each kernel of a bundle,
            and a bundle's `total_cost`.

    Raises:
        KernelgenError: the file is of no such kind, is damaged, or has no recorded cost.
    """
    path = Path(path)
    if cost:
        return _with_cost(path, describe(path, check=check))
    model = model_files.recognize(path, "bundle, NEFF or HLO file", packs=True)
    if model is not None:
        raise KernelgenError(model)
    try:
        if path.is_dir():
            return _bundle(of_tree(path), check)
        if path.name == tree.INDEX:
            return _bundle(of_tree(path.parent), check)
        with path.open("rb") as file:
            head = file.read(16)
        # The kind follows from the content; for a file too short or damaged, from the name, so that the error fits.
        if head[:4] == gguf_reader.MAGIC and model_files.is_repacked(path):
            return repacked_file.describe(path, check=check)
        if head[:4] == gguf_reader.MAGIC or path.name.endswith(".gguf"):
            return _bundle(of_pack(path), check)
        if _looks_like_neff(head) or path.suffix == NEFF:
            return _neff(path.read_bytes(), str(path))
        notes = {name: value for name, value in _notes(path).get("notes", {}).items() if name != "costs"}
        return _hlo(path.read_bytes(), str(path)) | ({"notes": notes} if notes else {})
    except OSError as error:
        raise KernelgenError(f"{path}: {error.strerror or error}") from None


def _with_cost(path: Path, made: dict[str, Any]) -> dict[str, Any]:
    """Returns a description with the recorded costs.

    Raises:
        KernelgenError: no cost is recorded.
    """
    if made["kind"] in ("tree", "pack"):
        try:
            found = modelled_cost.of_bundle(made)
        except (LookupError, ValueError, TypeError, AttributeError):
            raise KernelgenError(f"{path}: damaged: the recorded cost of a kernel cannot be read") from None
        if "total_cost" not in found:
            raise KernelgenError(f"{path}: none of its kernels has a recorded cost; only kernels in NKI have one")
        return found
    noted = _notes(path).get("notes", {}).get("costs") if made["kind"] == "hlo" else None
    if not noted:
        raise KernelgenError(
            f"{path}: no cost is recorded; `kernelgen emit` records that of kernels in NKI beside their HLO"
        )
    return made | {"cost": [modelled_cost.of_noted(each) for each in noted]}


def _notes(hlo: Path) -> dict[str, Any]:
    """Returns the emit step's notes beside an HLO file, as `notes`; empty if there are none."""
    file = hlo.with_name(notes_file(kernel_of(hlo)))
    try:
        notes = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise KernelgenError(f"{file}: not the notes of a kernel: {error}") from None
    return {"notes": notes} if notes else {}


def _notes_text(notes: Mapping[str, Any]) -> list[str]:
    """Returns notes as lines: a line for each entry of a list, else one for each value; only `--cost` shows the costs."""
    lines = []
    for name, value in notes.items():
        if name == "costs":
            continue
        for entry in value if isinstance(value, list) else [value]:
            shown = entry if isinstance(entry, str) else canonical_json(entry)
            lines.append(f"  {name.removesuffix('s') if isinstance(value, list) else name:{_WIDTH}} {shown}")
    return lines


def text(what: dict[str, Any]) -> str:
    """Formats a result of `describe` as lines for people."""
    lines = [f"{what['path']}: {_TITLES[what['kind']]}"]
    for name, value in what.items():
        if name in ("path", "kind", "tensors", "kernels", "weights", "members", "notes", "cost", "total_cost"):
            continue
        if isinstance(value, list):
            value = (", " if name == "features" else " ").join(map(str, value))
        elif isinstance(value, dict):
            value = ", ".join(f"{count} {key}" for key, count in value.items())
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        lines.append(f"  {name.replace('_', ' '):{_WIDTH}} {'none' if value == '' else value}")
    for tensor in what.get("tensors", ()):
        dims = ",".join(map(str, tensor["shape"]))
        shared = f", in the memory of {tensor['alias']}" if tensor["alias"] else ""
        label = {"in": "input", "out": "output"}[tensor["usage"]]
        lines.append(f"  {label:{_WIDTH}} {tensor['name']}: {tensor['dtype']}[{dims}], {tensor['size']} bytes{shared}")
    lines += [f"  {'weight':{_WIDTH}} {repacked_file.line(weight)}" for weight in what.get("weights", ())]
    lines += _notes_text(what.get("notes", {}))
    lines += [line for made in what.get("cost", ()) for line in modelled_cost.lines(made)]
    if "total_cost" in what:
        lines += modelled_cost.lines(what["total_cost"])
    for name, size in what.get("members", {}).items():
        lines.append(f"  {'member':{_WIDTH}} {name}, {size} bytes")
    for kernel in what.get("kernels", ()):
        lines.append(f"  {kernel['id']}  {kernel['neff_size']} bytes{_sharing(kernel)}")
        lines.append(f"      {_spec_text(kernel['spec'])}")
        if memory := kernel.get("neff_memory"):
            figures = ", ".join(f"{size} bytes of {name}" for name, size in memory.items())
            lines.append(f"      its program takes {figures}")
        if "flags" in kernel:
            lines.append(f"      compiled with {' '.join(kernel['flags'])}")
        lines += [f"    {line}" for line in _notes_text(kernel.get("notes") or {})]
        lines += [f"    {line}" for made in kernel.get("cost", ()) for line in modelled_cost.lines(made)]
    return "\n".join(lines)


_WIDTH = modelled_cost.WIDTH
_TITLES = {
    "tree": "bundle of kernels, a tree",
    "pack": "bundle of kernels, a GGUF pack",
    "neff": "NEFF",
    "hlo": "HLO module",
    "repacked": "weights of a model, repacked",
}


def _sharing(kernel: dict[str, Any]) -> str:
    return f", the same as {kernel['same_as']}" if kernel["same_as"] else ""


def _spec_text(spec: Mapping[str, Any]) -> str:
    if "source" in spec:
        return _source_text(spec)
    if "graph" in spec:
        return f"\n{' ' * 6}".join(f"n{i} = {_node_text(node)}" for i, node in enumerate(spec["graph"]))
    inputs = ", ".join("-" if t is None else t for t in spec["inputs"])
    params = "".join(f" {name}={value}" for name, value in spec["params"].items())
    alias = "" if spec["alias"] is None else f" in the memory of input {spec['alias']}"
    return f"{spec['op']}({inputs}) -> {spec['output']}{alias}{params}"


def _source_text(spec: Mapping[str, Any]) -> str:
    made = SourceSpec.from_json(spec)
    memory = dict(made.alias)
    inputs = ", ".join(f"{n}={a}" if n else str(a) for n, a in zip_longest(made.arguments, made.inputs))
    more = [f"{name}={canonical_json(value)}" for name, value in made.params]
    more += [f"grid={list(made.grid)}"] if made.grid else []
    more += [f"{name}={value}" for name, value in made.env]
    more += [made.lowering] if made.lowering != "interpreted" else []
    shared = [f" in the memory of input {memory[k]}" if k in memory else "" for k in range(len(made.outputs))]
    outputs = ", ".join(f"{a}{where}" for a, where in zip(made.outputs, shared, strict=True))
    return " ".join([f"{made.source}({inputs}) -> {outputs}", *more])


def _node_text(node: dict[str, Any]) -> str:
    inputs = ", ".join("-" if t is None else t for t in node["inputs"])
    params = "".join(f" {name}={value}" for name, value in node["params"].items())
    return f"{node['op']}({inputs}) -> {node['output']}{', a result' if node['escapes'] else ''}{params}"


def _looks_like_neff(head: bytes) -> bool:
    version, size = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:16], "little")
    return version in (container.PLAIN, container.GZIP) and size == HEADER_SIZE


def _origin(origin: BundleOrigin) -> dict[str, Any]:
    return {
        "manifest": origin.name,
        "target": origin.target,
        "lnc": origin.lnc,
        "simulated": origin.simulated,
        "compiler": origin.compiler,
        "flags": list(origin.flags),
        "kernelgen": origin.version,
        "jax": origin.jax_version,
    }


def _sizes(size: int, neff_sizes: Iterable[int], kernels: int) -> dict[str, Any]:
    sizes = list(neff_sizes)
    return {"size": size, "kernel_count": kernels, "neff_count": len(sizes), "neff_bytes": sum(sizes)}


def _bundle(made: StoredBundle, check: bool) -> dict[str, Any]:
    mistakes = made.mistakes() if check else []
    neffs = {kernel.neff_sha256: kernel.neff_size for kernel in made.kernels}
    if made.pack is None:
        size, wrong = _tree_files(made, check)
        size += sum(neffs.values())
    else:
        size, wrong = made.pack.size, _packed_neffs(made.pack, check)
        neffs = {stored.sha256: stored.size for stored in made.pack.neffs}
    mistakes += wrong
    kernels = []
    first: dict[str, str] = {}
    for kernel in made.kernels:
        try:
            _spec_text(kernel.spec)
            _notes_text(kernel.notes)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise KernelgenError(f"{made.index}: the spec of {kernel.id} cannot be read") from None
        kernels.append(
            {
                "id": kernel.id,
                "spec": kernel.spec,
                "hlo_sha256": kernel.hlo_sha256,
                "neff_sha256": kernel.neff_sha256,
                "neff_size": kernel.neff_size,
                "same_as": first.get(kernel.neff_sha256),
                **({"neff_memory": kernel.memory.to_json()} if kernel.memory else {}),
                **({"notes": kernel.notes} if kernel.notes else {}),
                **({} if kernel.flags is None else {"flags": list(kernel.flags)}),
            }
        )
        first.setdefault(kernel.neff_sha256, kernel.id)
    if mistakes:
        raise KernelgenError(mistakes)
    return {
        "path": str(made.path),
        "kind": "tree" if made.pack is None else "pack",
        **_origin(made.origin),
        **_sizes(size, neffs.values(), len(kernels)),
        "kernels": kernels,
    }


def _packed_neffs(made: Pack, check: bool) -> list[Diagnostic]:
    mistakes = []
    for number, stored in enumerate(made.neffs):
        source = f"{made.path}: NEFF {stored.sha256[:12]}"
        data = made.read_neff(number, None if check else HEADER_SIZE)
        mistakes += _judge(data, stored.size, stored.sha256, made.origin, source, check)
    return mistakes


def _tree_files(made: StoredBundle, check: bool) -> tuple[int, list[Diagnostic]]:
    """Returns the bytes of the index and of the HLO, and the problems of the files."""
    mistakes: list[Diagnostic] = []
    size = made.index.stat().st_size
    for kernel in made.kernels:
        assert kernel.files is not None  # only a tree calls this
        hlo, file = (made.path / name for name in kernel.files)
        wrong = [_unusable(made.path, name) for name in kernel.files]
        mistakes += [mistake for mistake in wrong if mistake]
        size += 0 if wrong[0] else hlo.stat().st_size
        if check and not wrong[0] and hashlib.sha256(hlo.read_bytes()).hexdigest() != kernel.hlo_sha256:
            mistakes.append(Diagnostic(f"{hlo}: not the file that {tree.INDEX} describes: its SHA-256 differs"))
        if wrong[1]:
            continue
        real = file.stat().st_size
        if real != kernel.neff_size:
            mistakes.append(Diagnostic(f"{file}: {real} bytes, but {tree.INDEX} says {kernel.neff_size}"))
            continue
        data = file.read_bytes() if check else _head(file)
        tensors = _tensors_of(hlo) if check else None
        mistakes += _judge(data, real, kernel.neff_sha256, made.origin, str(file), check, tensors)
    return size, mistakes


def _unusable(folder: Path, name: str) -> Diagnostic | None:
    if not (folder / name).is_file():
        return Diagnostic(f"{folder / name}: missing, but {tree.INDEX} names it")
    return Diagnostic(f"{folder / name}: a link that leads out of the tree") if tree.leads_out(folder, name) else None


def _tensors_of(hlo: Path) -> tuple[container.NeffTensor, ...] | None:
    """Returns the tensors of a kernel; None if its HLO can't be read, which another message reports."""
    try:
        return container.tensors_of(hlo.read_bytes())
    except (OSError, KernelgenError):
        return None


def _judge(
    data: bytes,
    size: int,
    sha256: str,
    origin: BundleOrigin,
    source: str,
    whole: bool,
    tensors: tuple[container.NeffTensor, ...] | None = None,
) -> list[Diagnostic]:
    """Returns the problems of a NEFF in a bundle; `data` is all of it, or its header. A pack has no HLO to compare it with."""
    try:
        header = container.read_header(data, total=size, source=source)
    except KernelgenError as error:
        return list(error.diagnostics)
    if header.simulated != origin.simulated:
        return [Diagnostic(f"{source}: {'simulated' if header.simulated else 'real'}, unlike its bundle")]
    if whole and hashlib.sha256(data).hexdigest() != sha256:
        return [Diagnostic(f"{source}: damaged: its SHA-256 is not the one in the index")]
    if whole:
        try:
            said = description.describe(data, source=source)
            if tensors is None:
                description.check_device(said, origin.target, origin.lnc, source=source)
            else:
                description.check(said, tensors, origin.target, origin.lnc, source=source)
        except KernelgenError as error:
            return list(error.diagnostics)
    return []


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEADER_SIZE)


def _neff(data: bytes, source: str) -> dict[str, Any]:
    header = container.read_header(data, source=source)
    members = {name: len(content) for name, content in container.unpack(data, source=source).items()}
    what: dict[str, Any] = {"path": source, "kind": "neff", "simulated": header.simulated}
    try:
        said = description.describe(data, source=source)
    except KernelgenError as error:
        # The NEFF is whole, but its form differs from every public NEFF.
        said = None
        what["not_read"] = error.diagnostics[0].message.removeprefix(f"{source}: ")
    if said is not None:
        what |= {"target": ", ".join(said.targets), "device": said.device, "compiler": said.identity}
        what["physical_cores"] = len(said.cores)
        what["features"] = list(said.features)
    if header.simulated:
        made = container.read_simulated(data, source=source)
        what |= {"target": flag(made.info["flags"], "--target")}
        what |= {"flags": made.info["flags"], "hlo_sha256": made.info["hlo_sha256"]}
    what |= {
        "lnc": header.lnc_size,
        "name": header.name,
        "neff_version": ".".join(map(str, header.neff_version)),
        "package": f"{header.pkg_version}, {'gzip' if header.pkg_version == container.GZIP else 'plain'} tar",
        "build": header.build_version,
        "cores": f"{header.num_tpb}, {header.requested_tpb} requested, {sum(header.tpb_per_node)} on all nodes",
        "hash": header.hash.hex(),
        # How neuronx-cc computes the hash from 2.18 on is not documented: a hash that is not a digest gets a remark, not an error.
        "digest": container.payload_digest(data, header) or "the hash is not a known digest of the payload",
        "uuid": header.uuid.hex(),
        "size": len(data),
    }
    if header.simulated:
        what["tensors"] = [t.to_json() for t in made.tensors]
    elif said is not None:
        what["tensors"] = [t.to_json() for t in said.tensors]
    what["members"] = members
    return what


def _hlo(data: bytes, source: str) -> dict[str, Any]:
    try:
        module = describe_hlo(data)
    except (ValueError, IndexError, StopIteration):
        raise KernelgenError(
            f"{source}: neither a bundle's tree or pack, nor a NEFF, nor an HLO module ({len(data)} bytes)"
        ) from None
    return {
        "path": source,
        "kind": "hlo",
        "name": module.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "computations": module.computations,
        "instructions": dict(module.opcodes),
        "tensors": [t.to_json() for t in container.tensors_of(data, source=source)],
    }
