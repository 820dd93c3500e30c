"""Small bundles for tests, right and broken: `broken-bundles.json` has the damage of each, and the messages of
kernelgen and the C++ library.

A row is written as a tree, as a pack, or as both. It is an object:

  broken    what is wrong
  forms     "tree" or "pack"; both if it is absent
  edits     the edits of the right bundle, in order; see `_EDITS`
  check     a part of the message of `kernelgen inspect --check`; absent if it finds nothing
  library   a part of the message of the C++ library, which reads packs; absent if it opens the pack
  why       the reason, if only kernelgen refuses the pack
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelgen.bundle import build as bundle
from kernelgen.bundle.key import make_slots
from kernelgen.compilers.settings import CompileConfig
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import proto
from kernelgen.neff import container
from kernelgen.plan import BundleEntries, Entry
from kernelgen.spec.arrays import ArrayDesc
from kernelgen.spec.kernel import GraphSpec, KernelSpec, SourceSpec, Spec

ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("broken-bundles.json").read_text())


def make_hlo(length: int) -> bytes:
    """Returns a module that copies f32[length]."""
    module = proto.parse(b"\x1a\x02\x28\x01\x30\x01")  # one computation with id 1, which is the entry
    (computation,) = module.computations
    for number, (name, opcode) in enumerate((("input0", "parameter"), ("copy.2", "copy")), start=1):
        instruction = computation.instructions.add(id=number, name=name, opcode=opcode)
        instruction.shape.element_type = 11
        instruction.shape.dimensions.append(length)
        instruction.operand_ids.extend(range(1, number))
    computation.root_id = 2
    shape = computation.program_shape
    shape.parameters.append(computation.instructions[0].shape)
    shape.result.CopyFrom(computation.instructions[0].shape)
    shape.parameter_names.append("input0")
    module.name = module.entry_computation_name = computation.name = "kernel"
    module.host_program_shape.CopyFrom(shape)
    return proto.serialize(module)


def specs() -> list[Spec]:
    """Returns one kernel of each kind that keys distinguish; rows name them by the beginnings of their ids."""
    t = TensorDesc.parse
    f32 = t("(64,4,1,1)/f32")
    return [
        KernelSpec.make("add", [f32, f32], f32),
        KernelSpec.make("mul", [f32, f32], f32),
        KernelSpec.make("soft_max", [f32, None, t("(4,1,1,1)/f32")], f32, {"scale": 0.125}),
        KernelSpec.make("set_rows", [f32, t("(4,1,1,1)/i64"), t("(64,32,1,1)/f16")], t("(64,32,1,1)/f16")),
        GraphSpec.from_json(
            {
                "graph": [
                    {"op": "add", "inputs": [f"s0 {f32}", f"s1 {f32}"], "output": str(f32), "params": {}, "escapes": False},
                    {"op": "relu", "inputs": [f"n0 {f32}"], "output": str(f32), "params": {}, "escapes": True},
                ]
            }
        ),
        SourceSpec("twice", "k.py:twice", (ArrayDesc.parse("f32[4]"),), (ArrayDesc.parse("f32[4]"),)),
    ]  # fmt: skip


@dataclass
class Draft:
    """A bundle that edits change.

    Attributes:
        folder: a tree without mistakes.
        index: the content of the new index.json.
        texts: (old, new) parts of the text of index.json.
        metadata: (name, kind, value) of the pack's fields that differ from the index.
        changes: functions that change the tree's files.
    """

    folder: Path
    index: dict[str, Any]
    texts: list[tuple[str, str]] = field(default_factory=list)
    metadata: list[tuple[str, str, Any]] = field(default_factory=list)
    changes: list[Callable[[Path], None]] = field(default_factory=list)

    def find(self, path: list[Any]) -> tuple[Any, Any]:
        """Returns the container of a value, and its name or number there; a kernel is named by the beginning of its id."""
        at: Any = self.index
        for number, name in enumerate(path):
            if isinstance(at, list) and isinstance(name, str):
                (name,) = (i for i, kernel in enumerate(at) if kernel["id"].startswith(f"{name}-"))
            if number == len(path) - 1:
                return at, name
            at = at[name]
        raise ValueError("an empty path")

    def get(self, path: list[Any]) -> Any:
        at, name = self.find(path)
        return at[name]

    def set(self, path: list[Any], value: Any) -> None:
        at, name = self.find(path)
        at[name] = value

    def delete(self, path: list[Any]) -> None:
        at, name = self.find(path)
        del at[name]

    def swap(self, one: list[Any], other: list[Any]) -> None:
        a, b = self.get(one), self.get(other)
        self.set(one, b)
        self.set(other, a)

    def word(self, kernel: str, number: int, value: int) -> None:
        """Changes a word of a kernel's key."""
        key = self.get(["kernels", kernel, "key"])
        self.set(["kernels", kernel, "key"], f"{key[: 16 * number]}{value:016x}{key[16 * number + 16 :]}")

    def file(self, path: list[Any], text: str) -> None:
        """Replaces a file that the index names."""
        name = self.get(path)

        def change(folder: Path) -> None:
            (folder / name).unlink()
            (folder / name).write_text(text)

        self.changes.append(change)

    def link(self, path: list[Any]) -> None:
        """Moves a file of the tree elsewhere, and puts a link to it in its place."""
        name = self.get(path)

        def change(folder: Path) -> None:
            (folder / name).rename(folder.with_name(f"{folder.name}.elsewhere"))
            (folder / name).symlink_to(folder.with_name(f"{folder.name}.elsewhere"))

        self.changes.append(change)


_EDITS: Mapping[str, Callable[..., Any]] = {
    "set": Draft.set,
    "delete": Draft.delete,
    "swap": Draft.swap,
    "copy": lambda draft, source, to: draft.set(to, copy.deepcopy(draft.get(source))),
    "word": Draft.word,
    "text": lambda draft, old, new: draft.texts.append((old, new)),
    "metadata": lambda draft, name, kind, value: draft.metadata.append((name, kind, value)),
    "file": Draft.file,
    "link": Draft.link,
}


def write_right(folder: Path) -> Path:
    """Writes a tree without mistakes into a folder, and returns it."""
    made = specs()
    config = CompileConfig.make("trn1")
    hlos, neffs = {}, {}
    for number, spec in enumerate(made):
        hlo = make_hlo(1 + number // 2)  # two kernels each share a NEFF
        hlos[spec.id], neffs[spec.id] = folder / f"{spec.id}.hlo.pb", folder / f"{spec.id}.neff"
        hlos[spec.id].write_bytes(hlo)
        neffs[spec.id].write_bytes(container.write_simulated(hlo, config.flags(), "simulator 1 (jaxlib 1.2.3)"))
    entries = tuple(Entry(spec.id, spec, config) for spec in made)
    bundle.build(BundleEntries("tiny", config, entries), hlos, neffs, tree_path=folder / "tree")
    return folder / "tree"


def forms(row: Mapping[str, Any]) -> list[str]:
    """Returns the forms of a row."""
    return [row["forms"]] if "forms" in row else ["tree", "pack"]


def write(row: Mapping[str, Any], form: str, right: Path, path: Path) -> Path:
    """Writes a row's bundle; returns its path.

    Args:
        row: the row.
        form: "tree" or "pack".
        right: the tree without mistakes.
        path: the output, without an ending.
    """
    draft = Draft(right, json.loads((right / "index.json").read_text()))
    for name, *arguments in row["edits"]:
        _EDITS[name](draft, *copy.deepcopy(arguments))
    if form == "tree":
        write_tree(draft, path)
        return path
    path = path.with_name(f"{path.name}.kernels.gguf")
    path.write_bytes(pack_bytes(draft))
    return path


def write_tree(draft: Draft, path: Path) -> None:
    """Writes a tree."""
    shutil.copytree(draft.folder, path, copy_function=os.link)
    text = json.dumps(draft.index, separators=(",", ":"))
    for old, new in draft.texts:
        if old not in text:
            raise ValueError(f"{old} is not in the index")
        text = text.replace(old, new, 1)
    (path / "index.json").unlink()
    (path / "index.json").write_bytes(text.encode(errors="surrogateescape"))
    for change in draft.changes:
        change(path)


_KINDS = {"u32": (4, "I"), "bool": (7, "B"), "string": (8, ""), "u64": (10, "Q")}


def pack_bytes(draft: Draft) -> bytes:
    """Returns a pack in the format of kernelgen.bundle.pack, with any content."""
    index, kernels = draft.index, draft.index["kernels"]
    files = {kernel["neff_sha256"]: draft.folder / kernel["neff"] for kernel in kernels}
    digests = list(files)
    keys = [[int(k["key"][at : at + 16], 16) for at in range(0, len(k["key"]), 16)] for k in kernels]
    offsets = [sum(map(len, keys[:number])) for number in range(len(keys) + 1)]
    words = [word for key in keys for word in key]
    metadata: dict[str, tuple[str, Any]] = {
        "general.architecture": ("string", "neuron-kernels"),
        "general.alignment": ("u32", 64),
        "kernelgen.format": ("u32", index["format"]),
        "kernelgen.lnc": ("u32", index["lnc"]),
        "kernelgen.simulated": ("bool", index["simulated"]),
        "kernelgen.flags": ("strings", index["flags"]),
        "kernelgen.kernel.ids": ("strings", [k["id"] for k in kernels]),
        "kernelgen.kernel.specs": ("strings", [json.dumps(k["spec"]) for k in kernels]),
        "kernelgen.kernel.hlo_sha256": ("strings", [k["hlo_sha256"] for k in kernels]),
        "kernelgen.kernel.neff": ("u32s", [digests.index(k["neff_sha256"]) for k in kernels]),
        "kernelgen.neff.sha256": ("strings", digests),
        "kernelgen.key.words": ("u64s", words),
        "kernelgen.key.offsets": ("u32s", offsets),
        "kernelgen.key.slots": ("u32s", make_slots(words, offsets)),
        **{f"kernelgen.{n}": ("string", index[n]) for n in ("name", "target", "compiler", "version", "jax_version")},
    }
    memory = {k["neff_sha256"]: k["neff_memory"] for k in kernels if "neff_memory" in k}
    if memory:
        figures = [memory[d][name] for d in digests for name in ("code", "rings", "scratchpad")]
        metadata["kernelgen.neff.memory"] = ("u64s", figures)
    metadata |= {name: (kind, value) for name, kind, value in draft.metadata}
    body = b"".join(_text(name) + _value(kind, value) for name, (kind, value) in metadata.items())
    names = [f"neff.{digest[:32]}" for digest in metadata["kernelgen.neff.sha256"][1]]
    data = b""
    for name, digest in zip(names, digests, strict=True):
        raw = files[digest].read_bytes()
        body += _text(name) + struct.pack("<IQIQ", 1, len(raw), 24, len(data))
        data += raw + bytes(-len(raw) % 64)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), len(metadata)) + body
    return head + bytes(-len(head) % 64) + data


def _text(text: str) -> bytes:
    raw = text.encode(errors="surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: str, value: Any) -> bytes:
    number, code = _KINDS[kind.removesuffix("s")]
    items = value if kind.endswith("s") else [value]
    raw = b"".join(struct.pack(f"<{code}", item) if code else _text(item) for item in items)
    return (struct.pack("<IIQ", 9, number, len(items)) if kind.endswith("s") else struct.pack("<I", number)) + raw
